"""The decks of `make slides`, by reveal.js and without the network: a lecture of two hours, and session 1 of six."""

from importlib import metadata

MATHJAX = next(f for f in metadata.files("sphinx-mathjax-offline") if f.name == "tex-svg-full.js")

project = "marlhf_lite"
extensions = ["myst_parser", "sphinx.ext.mathjax", "sphinx_revealjs"]
suppress_warnings = ["toc.not_included"]  # each page is a deck
root_doc = "lecture"
include_patterns = ["*.md"]
myst_enable_extensions = ["dollarmath"]
mathjax_path = MATHJAX.name  # draws formulas as SVG: no fonts to load
html_static_path = revealjs_static_path = [str(MATHJAX.locate()), "slides.css"]

revealjs_style_theme = "white"
revealjs_css_files = ["slides.css"]
revealjs_script_conf = {
    "hash": True,
    "slideNumber": True,
    "width": 1280,
    "height": 720,
    "margin": 0.04,
}
revealjs_script_plugins = [{"name": "RevealNotes", "src": "revealjs/plugin/notes/notes.js"}]
revealjs_use_section_ids = True
