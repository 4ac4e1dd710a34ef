"""The site of `make book`: README, docs, lessons, solutions, figures to play with and glossary, made by Sphinx.

Outputs of notebooks stand as committed: nothing is executed. The site needs no network, neither to build nor to read.
With the option `-t students` of sphinx-build it has no solutions and no answers to the exam.
"""

import re
import shutil
import sys
from importlib import metadata
from pathlib import Path

from docutils import nodes

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "book"))
import course  # noqa: E402

PLAY = "figures/interactive"
STUDENTS = tags.has("students")  # noqa: F821  (Sphinx gives this file the name `tags`)
MATHJAX = next(f for f in metadata.files("sphinx-mathjax-offline") if f.name == "tex-svg-full.js")

project = "marlhf_lite"
copyright = "marlhf_lite contributors; MIT licence, for text and code"
html_title = "MA-RLHF, taught and reproduced"
extensions = ["myst_nb", "sphinx.ext.mathjax", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = [
    "*.md",
    "docs/*.md",
    "book/*.md",
    "benchmarks/*.md",
    "tests/*.md",
    "data/results/**/*.md",
    "data/pandalm/*.md",
]
include_patterns += [
    "book/api.rst",
    "notebooks/*.ipynb",
    "notebooks/solutions/*.ipynb",
    f"{PLAY}/*.md",
]
exclude_patterns = [".*", "**/.*", "build", "runs", "marlhf_lite"]
exclude_patterns += ["docs/exam_answers.md", "notebooks/solutions"] if STUDENTS else []
# result tables and the note of the data are reached by links
suppress_warnings = ["toc.not_included"]

nb_execution_mode = "off"
nb_render_markdown_format = "myst"  # tables and formulas in outputs
nb_ipywidgets_js = {}  # widgets need a kernel; their scripts would be fetched
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
highlight_language = "none"  # of blocks that name no language: commands

# The API page, from docstrings.
default_role = "code"
smartquotes = False  # "equal" is text that you type
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # shapes stand in the docstrings
autodoc_preserve_defaults = True

html_theme = "furo"
html_static_path = ["static", str(MATHJAX.locate())]
html_css_files = ["book.css"]
html_copy_source = False
html_show_sphinx = False
mathjax_path = MATHJAX.name  # draws formulas as SVG: no fonts to load

BADGE = re.compile(r"\[(?:!\[Open in \w+\]\([^)]*\)|All lessons[^\]]*)\]\([^)]*\)(\\n)?")
# JupyterLab's link to a section, in an output
SECTION = re.compile(r"\]\(#((?:\d+|[A-Z])-·-[^)\s]*)\)")
# a link to what students lack
ANSWERS = re.compile(r"\[([^][]*)\]\([^)\s]*(?:solutions/|exam_answers)[^)\s]*\)")
# a link to a page that plays
PAGE = re.compile(r"\[(!\[[^]]*\]\([^)]*\)|[^][]*)\]\(([^):\s]+\.html)\)")
# Where README says how to open the page of one update, the site shows the page itself, with three doors above it.
LIVE = re.compile(r"<!-- live -->.*<!-- /live -->")
DOORS = """<div class="doors">
<a href="#learn"><b>Learn</b> Nine lessons from the policy gradient to MA-PPO. They run on a laptop.</a>
<a href="#use"><b>Use</b> Train with PPO or MA-PPO on your own preference data, in one command.</a>
<a href="#change"><b>Change</b> Replace the rule, the objective or the reward by a function of your own.</a>
</div>
<iframe class="live" src="figures/interactive/one_update.html" title="One sentence, one update"></iframe>"""
CONTENTS = """
```{{toctree}}
:hidden:
:caption: {}

{}
```
"""


def contents() -> str:
    """The site's tables of contents, which stand at the side of every page, as text for the front page."""
    lessons = [f"notebooks/{lesson.file}" for lesson in course.LESSONS]
    electives = [f"notebooks/{elective.file}" for elective in course.ELECTIVES]
    solutions = []
    for path in sorted(ROOT.glob("notebooks/solutions/*.ipynb")):
        solutions.append(str(path.relative_to(ROOT).with_suffix("")))
    documents = (
        "start",
        "results",
        "provenance",
        "guide",
        "teaching",
        "homework",
        "exam_answers",
        "tasks",
        "scaling",
        "troubleshooting",
        "release",
    )
    reference = [f"docs/{page}" for page in documents]
    reference += [
        "book/api",
        "benchmarks/README",
        f"{PLAY}/README",
        "GLOSSARY",
        "book/README",
        "CONTRIBUTING",
        "tests/README",
        "CHANGELOG",
    ]
    parts = {"Lessons": lessons, "Electives": electives}
    parts |= {"Reference": reference, "Solutions": solutions}
    if STUDENTS:
        reference.remove("docs/exam_answers")
        del parts["Solutions"]
    tables = [CONTENTS.format(caption, "\n".join(pages)) for caption, pages in parts.items()]
    return "".join(tables)


def prepare(app, page: str, source: list[str]) -> None:
    """Change the text of a page before Sphinx reads it, from what suits GitHub and JupyterLab to what suits the site.

    Badges and links to what the site lacks are taken out, the front page gets doors and contents, and links to sections
    name them as Sphinx does.
    """
    text = BADGE.sub("", source[0])
    if page == root_doc:
        text = LIVE.sub(DOORS, text) + contents()
    if STUDENTS:  # their site has no solutions and answers: of a link to them, the words stay
        text = ANSWERS.sub(r"\1", text)
    # As HTML, so that the browser opens the page; of a Markdown link Sphinx would make one that saves it.
    text = PAGE.sub(r"<a href='\2'>\1</a>", text)
    text = SECTION.sub(lambda link: f"](#{nodes.make_id(link[1])})", text)
    source[0] = text  # Sphinx reads the page from this list


def describe_pictures(app, page: nodes.document) -> None:
    """Make the caption below a picture of an output its alternative text, too: an output has no other description.

    The caption is the paragraph after the notebook cell with the picture; without one the alternative text is empty.
    """
    for picture in page.findall(nodes.image):
        is_output = "alt" not in picture  # pictures in texts have one
        if is_output:
            cell = picture
            while cell.parent is not None and "cell" not in cell.get("classes", ()):
                cell = cell.parent
            below = cell.next_node(descend=False, siblings=True)
            has_caption = isinstance(below, nodes.paragraph)
            picture["alt"] = below.astext() if has_caption else ""


def finish(app, error) -> None:
    """Make the front page the one that opens first, and copy pages that are HTML already into the site.

    In the copies, links to notebooks lead to the site's pages of the notebooks. If the build has failed, or makes
    something else than HTML, nothing is done.
    """
    if error is not None or app.builder.format != "html":
        return
    shutil.copy(app.outdir / f"{root_doc}.html", app.outdir / "index.html")
    for page in [*ROOT.glob(f"{PLAY}/*.html"), *ROOT.glob("docs/*.html")]:
        text = page.read_text(encoding="utf-8")
        text = re.sub(r'(href="[^"]*)\.ipynb"', r'\1.html"', text)
        (app.outdir / page.relative_to(ROOT)).write_text(text, encoding="utf-8")


def setup(app) -> None:
    app.connect("source-read", prepare)
    app.connect("doctree-read", describe_pictures)
    app.connect("build-finished", finish)
