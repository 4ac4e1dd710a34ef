"""The slides of `make slides`: a deck for ninety minutes with lesson 01, by reveal.js and without the network."""

from importlib import metadata

MATHJAX = next(f for f in metadata.files("sphinx-mathjax-offline") if f.name == "tex-svg-full.js")

project = "marlhf_lite"
extensions = ["myst_parser", "sphinx.ext.mathjax", "sphinx_revealjs"]
root_doc = "lesson_01"
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
