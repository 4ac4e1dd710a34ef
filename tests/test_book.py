"""The site, the handout and the PDF files: `make book`, `make handout`, `make pdf`."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
BOOK = ROOT / "book"
sys.path.insert(0, str(BOOK))
import handout  # noqa: E402
import print_pdf  # noqa: E402

LESSONS = sorted((ROOT / "notebooks").glob("*.ipynb"))
needs_browser = pytest.mark.skipif(print_pdf.find_browser() is None, reason="no Chromium browser on this machine")


# The site


class Resources(HTMLParser):
    """What a page loads: scripts, styles, pictures, frames."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag in ("script", "img", "iframe"):
            self.found.append(attrs.get("src"))
        if tag == "link" and attrs.get("rel") in ("stylesheet", "preload"):
            self.found.append(attrs.get("href"))


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Front page, one lesson, its solutions and the figures to play with."""
    for package in ("sphinx", "myst_nb", "furo"):
        pytest.importorskip(package, reason="the extra `book` is not installed: `make book` installs it")
    target = tmp_path_factory.mktemp("site")
    pages = "README.md,notebooks/04*.ipynb,notebooks/solutions/04*.ipynb,figures/interactive/*.md"
    command = [sys.executable, "-m", "sphinx", "-q", "-c", str(BOOK), "-D", f"include_patterns={pages}"]
    subprocess.run([*command, "-d", str(target / "cache"), str(ROOT), str(target / "html")], check=True, timeout=300)
    return target / "html"


@pytest.mark.long
def test_site_shows_outputs_as_committed_and_loads_nothing_from_the_network(site):
    lesson = (site / "notebooks" / "04_values_and_advantages.html").read_text(encoding="utf-8")
    assert lesson.count('class="cell_output') > 10 and "profile cpu" in lesson
    assert 'class="math' in lesson and (site / "_static" / "tex-svg-full.js").is_file()
    for page in site.rglob("*.html"):
        resources = Resources()
        resources.feed(page.read_text(encoding="utf-8"))
        outside = [url for url in resources.found if url and re.match(r"(?:https?:)?//", url)]
        assert not outside, f"{page.name}: {outside}"


@pytest.mark.long
def test_site_opens_with_readme_and_leads_to_every_kind_of_page(site):
    front = (site / "index.html").read_text(encoding="utf-8")
    assert "<title>" in front and "taught and reproduced" in front
    wanted = ("notebooks/04_values_and_advantages", "notebooks/solutions/04_values_and_advantages")
    for page in (*wanted, "figures/interactive/README"):
        assert f'href="{page}.html"' in front and (site / f"{page}.html").is_file()
    assert (site / "figures" / "interactive" / "signal_kept.html").is_file()


@pytest.mark.long
@needs_browser
def test_formulas_of_the_site_are_drawn_without_the_network(site):
    page = site / "notebooks" / "04_values_and_advantages.html"
    drawn = print_pdf.browse(print_pdf.find_browser(), page, "--dump-dom")
    asked = len(re.findall(r'class="math notranslate', page.read_text(encoding="utf-8")))
    assert drawn.count("<mjx-container") == asked > 20
    assert "data-mjx-error" not in drawn


# The handout


@pytest.fixture(scope="module")
def handed_out(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("handout") / "new"
    handout.main(ROOT / "notebooks", target)
    return target


@pytest.mark.parametrize("path", LESSONS, ids=lambda p: p.name)
def test_handout_has_the_lesson_and_answer_cells_but_no_outputs_and_no_solutions(path, handed_out):
    lesson, copy = (nbformat.read(file, 4) for file in (path, handed_out / "notebooks" / path.name))
    nbformat.validate(copy)
    code = [cell for cell in copy.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert "solutions/" not in nbformat.writes(copy)
    sources = [cell.source for cell in lesson.cells if cell.cell_type == "code"]
    assert [cell.source for cell in code if not cell.id.endswith("-answer")] == sources
    exercises = [i for i, c in enumerate(copy.cells) if re.match(r"\*\*\d+ · |\d+\. \*", c.source)]
    assert exercises
    for place in exercises:
        assert copy.cells[place + 1].cell_type == "code"


def test_handout_brings_the_pictures_of_its_notebooks(handed_out):
    for path in (handed_out / "notebooks").glob("*.ipynb"):
        text = "\n".join(cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "markdown")
        for place in re.findall(r"\]\((\.\./figures/[^)]*)\)", text):
            assert (path.parent / place).is_file(), f"{path.name}: {place}"


# The PDF files


def test_pdf_without_a_browser_says_what_to_do(tmp_path):
    command = [sys.executable, str(BOOK / "print_pdf.py"), str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, env={"BROWSER": "no-such-browser"}, capture_output=True, text=True)
    assert done.returncode == 2 and "set BROWSER" in done.stderr and done.stderr.count("\n") == 1


@needs_browser
def test_pdf_of_each_page(tmp_path):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "00_x.html").write_text("<!doctype html><title>x</title><p>a lesson")
    print_pdf.main(tmp_path, tmp_path / "pdf")
    assert (tmp_path / "pdf" / "00_x.pdf").read_bytes().startswith(b"%PDF")
