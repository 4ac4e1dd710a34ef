"""The diagrams: as committed, well-formed, with words that fit, and shown with a text for those who cannot see them."""

import json
import re
import sys
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib import font_manager
from matplotlib.ft2font import FT2Font

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "figures" / "diagrams"
sys.path.insert(0, str(FOLDER))  # the script imports its helpers as neighbours
import draw  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"
every_diagram = pytest.mark.parametrize("name", list(draw.DIAGRAMS))


def picture(name: str) -> ElementTree.Element:
    return ElementTree.parse(FOLDER / f"{name}.svg").getroot()


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


def test_committed_files_are_what_the_script_draws():
    drawn = {f"{name}.svg": svg() for name, svg in draw.DIAGRAMS.items()}
    committed = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.svg")}
    assert committed.keys() == drawn.keys()
    assert not [name for name in drawn if committed[name] != drawn[name]], "run python figures/diagrams/draw.py"


@every_diagram
def test_says_what_it_shows_and_is_wide_enough(name):
    root = picture(name)
    assert len(root.findtext(f"{SVG}title")) > 10 and len(root.findtext(f"{SVG}desc")) > 40
    width, height = float(root.get("width")), float(root.get("height"))
    assert width >= 640 and root.get("viewBox") == f"0 0 {width:g} {height:g}"
    panel = root.find(f"{SVG}rect")
    assert float(panel.get("width")) >= width - 2 and float(panel.get("height")) >= height - 2


@every_diagram
def test_words_are_large_enough_stay_inside_and_do_not_overlap(name):
    root = picture(name)
    texts = {text: extent(text) for text in root.iter(f"{SVG}text")}
    assert min(float(text.get("font-size")) for text in texts) >= 12
    room = (8, 8, float(root.get("width")) - 8, float(root.get("height")) - 8)
    rooms = dict.fromkeys(texts, room)
    for group in root.iter(f"{SVG}g"):
        x, y, w, h = (float(group.find(f"{SVG}rect").get(key)) for key in ("x", "y", "width", "height"))
        rooms |= dict.fromkeys(group.iter(f"{SVG}text"), (x + 1, y, x + w - 1, y + h))
    outside = [
        text.text
        for text, (left, top, right, bottom) in texts.items()
        if left < rooms[text][0] or top < rooms[text][1] or right > rooms[text][2] or bottom > rooms[text][3]
    ]
    assert not outside
    overlapping = [
        (s.text, t.text)
        for (s, p), (t, q) in combinations(texts.items(), 2)
        if p[0] < q[2] and q[0] < p[2] and p[1] < q[3] and q[1] < p[3]
    ]
    assert not overlapping


def markdown() -> dict[Path, str]:
    texts = {path: path.read_text(encoding="utf-8") for path in ROOT.glob("*.md")}
    for path in ROOT.glob("notebooks/**/*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        texts[path] = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return texts


def test_every_diagram_shown_exists_and_has_a_text_and_a_caption():
    shown, bad = 0, []
    for path, text in markdown().items():
        for alt, place, after in re.findall(r"!\[([^]]*)\]\(([^)]*diagrams/[^)]*)\)(\n\n?.*)?", text):
            shown += 1
            if not (path.parent / place).is_file() or len(alt) < 20 or not re.match(r"\n\n?\*[^*\n]", after):
                bad.append(f"{path.name}: {place}")
    assert shown >= 12 and not bad
