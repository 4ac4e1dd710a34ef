"""Diagrams and figures to play with: as their scripts draw them, with words that fit, readable by everyone."""

import re
import runpy
import sys
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib import font_manager
from matplotlib.ft2font import FT2Font

ROOT = Path(__file__).resolve().parents[2]
DIAGRAMS, PLAY = ROOT / "figures" / "diagrams", ROOT / "figures" / "interactive"
PAGES = sorted(PLAY.glob("*.html"))
sys.path.insert(0, str(DIAGRAMS))  # the script imports its helpers as neighbours
import draw  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"
DECIMAL = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")


def is_same(text: str, other: str) -> bool:
    """Whether texts are equal but for the last digits of decimals, which another processor rounds otherwise."""
    numbers, others = (list(map(float, DECIMAL.findall(x))) for x in (text, other))
    return DECIMAL.split(text) == DECIMAL.split(other) and numbers == pytest.approx(
        others, rel=1e-5
    )


def test_committed_files_are_what_the_scripts_draw():
    drawn = {f"{name}.svg": svg() for name, svg in draw.DIAGRAMS.items()}
    drawn |= runpy.run_path(str(PLAY / "draw.py"))["pages"]()
    committed = {
        path.name: path.read_text(encoding="utf-8") for path in [*DIAGRAMS.glob("*.svg"), *PAGES]
    }
    assert committed.keys() == drawn.keys()
    assert not [name for name, text in committed.items() if not is_same(text, drawn[name])]


def test_pictures_are_of_these_very_files():
    pictures = runpy.run_path(str(ROOT / "figures" / "pictures.py"))
    assert not [path.name for path in pictures["sources"]() if not pictures["is_new"](path)], (
        "run figures/pictures.py"
    )


def extent(text: ElementTree.Element) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a text in DejaVu Sans, the widest font of the diagrams' list."""
    weight = text.get("font-weight", "normal")
    font = FT2Font(font_manager.findfont(font_manager.FontProperties("DejaVu Sans", weight=weight)))
    size, x, y = (float(text.get(key)) for key in ("font-size", "x", "y"))
    font.set_size(size, 72)
    font.set_text(" ".join(text.text.split()))
    width = font.get_width_height()[0] / 64
    left = x - width * {"start": 0, "middle": 0.5, "end": 1}[text.get("text-anchor")]
    return left, y - 0.75 * size, left + width, y + 0.2 * size


@pytest.mark.parametrize("name", list(draw.DIAGRAMS))
def test_words_of_a_diagram_are_large_enough_stay_inside_and_do_not_overlap(name):
    root = ElementTree.parse(DIAGRAMS / f"{name}.svg").getroot()
    assert len(root.findtext(f"{SVG}title")) > 10 and len(root.findtext(f"{SVG}desc")) > 40
    texts = {text: extent(text) for text in root.iter(f"{SVG}text")}
    assert min(float(text.get("font-size")) for text in texts) >= 12
    width, height = float(root.get("width")) - 8, float(root.get("height")) - 8
    for text, (left, top, right, bottom) in texts.items():
        assert min(left, top) >= 8 and right <= width and bottom <= height, text.text
    for (s, p), (t, q) in combinations(texts.items(), 2):
        assert p[0] >= q[2] or q[0] >= p[2] or p[1] >= q[3] or q[1] >= p[3], (s.text, t.text)


@pytest.mark.parametrize("name", list(draw.DIAGRAMS))
def test_a_dark_page_turns_over_every_colour_and_its_words_stand_out_as_much(name):
    """Panel and words change together: no dark word is left on a dark panel."""
    text = (DIAGRAMS / f"{name}.svg").read_text(encoding="utf-8")
    style, drawing = text.split("</style>", 1)
    rules = dict(re.findall(r"\[(.*?)\] { \w+: (#\w{6}); }", style))
    assert rules.keys() == {f'{kind}="{c}"' for kind, c in re.findall(COLOURED, drawing)}
    panel, *inks = (rules[f'fill="{colour}"'] for colour in ("#fdfcf9", "#1f1f1f", "#5f5f5f"))
    assert all(lightness(ink) - lightness(panel) > 0.4 for ink in inks)


COLOURED = r'(fill|stroke)="(#\w{6})"'


def lightness(colour: str) -> float:
    return sum(int(colour[i : i + 2], 16) for i in (1, 3, 5)) / (3 * 255)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_a_page_stands_alone_and_each_control_has_a_name(page):
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"https?://|\bsrc=|@import|<link", text)
    controls, labels = (
        re.findall(r"<(?:input|select)\b[^>]*>", text),
        re.findall(r"<label>.*?</label>", text),
    )
    assert controls and len(labels) == len(controls) and "<html lang=" in text
