"""Take a picture of every diagram and figure to play with: `python figures/pictures.py` writes a PNG beside each.

JupyterLab shows neither SVG nor pages of a notebook that nobody has trusted, and GitHub no pages: there the picture is
shown. A diagram that moves also gets a GIF, for slides and pages that show no moving SVG. The program needs a Chromium
browser (see book/print_pdf.py). Each picture holds a mark of the file it was taken of.
"""

import re
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

from PIL import Image
from PIL.ImageChops import difference
from PIL.PngImagePlugin import PngInfo

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "book"))
from print_pdf import browse, find_browser  # noqa: E402

from marlhf_lab.figures.notebook import PALETTE  # noqa: E402

WIDTH, HEIGHT = 760, 700  # of the browser's window, in pixels; `take` cuts off what stays empty


def sources() -> list[Path]:
    """The diagrams and pages that need a picture."""
    return sorted([*HERE.glob("diagrams/*.svg"), *HERE.glob("interactive/*.html")])


def mark(source: Path) -> str:
    """The mark of a source, which its picture holds: if the source changes, so does its mark."""
    return sha256(source.read_bytes()).hexdigest()


def width(source: Path) -> int:
    """The width of the browser's window for this source: a diagram's own width, or that of a notebook's page."""
    return (
        int(re.search(r'<svg[^>]* width="(\d+)', source.read_text("utf-8"))[1])
        if source.suffix == ".svg"
        else WIDTH
    )


def take(browser: str, source: Path) -> None:
    """Take a picture of the source in a browser, and write it beside the source."""
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "shot.png"
        size = f"--window-size={width(source)},{HEIGHT}"
        # With reduced motion, what moves shows its end.
        browse(
            browser,
            source,
            f"--screenshot={shot}",
            size,
            "--hide-scrollbars",
            "--force-prefers-reduced-motion",
        )
        picture = Image.open(shot).convert("RGB")
    # Cut off what is empty on the right and below, except 8 pixels. The last pixel has the colour of empty places.
    background = Image.new(
        "RGB", picture.size, picture.getpixel((picture.width - 1, picture.height - 1))
    )
    _, _, right, bottom = difference(picture, background).getbbox()
    picture = picture.crop(
        (0, 0, min(right + 8, picture.width), min(bottom + 8, picture.height))
    ).quantize(**PALETTE | {"colors": 16})
    note = PngInfo()
    note.add_text("source", mark(source))
    picture.save(source.with_suffix(".png"), optimize=True, pnginfo=note)


def film(browser: str, source: Path) -> None:
    """Write a GIF of one period of a diagram that moves. Each frame is a picture of the motion, stopped at its time."""
    text = source.read_text("utf-8")
    period = float(re.search(r"animation: \w+ (\d+)s", text)[1])  # in seconds
    frames_per_second = 5
    frames = []
    with tempfile.TemporaryDirectory() as folder:
        for i in range(round(period * frames_per_second)):
            # With a negative delay, a paused motion stands where it would be after that time.
            delay = f"animation-delay: -{i / frames_per_second}s !important"
            stopped = f"* {{ animation-play-state: paused !important; {delay}; }}"
            still, shot = Path(folder) / "still.svg", Path(folder) / f"{i}.png"
            still.write_text(text.replace("</style>", f"{stopped}\n</style>"), encoding="utf-8")
            height = re.search(r'<svg[^>]* height="(\d+)', text)[1]
            size = f"--window-size={width(source)},{height}"
            browse(browser, still, f"--screenshot={shot}", size, "--hide-scrollbars")
            frames.append(Image.open(shot).convert("RGB").quantize(colors=32))
    frames[0].save(
        source.with_suffix(".gif"),
        save_all=True,
        append_images=frames[1:],
        duration=1000 // frames_per_second,
        loop=0,
        comment=mark(source).encode(),
    )


def is_new(source: Path) -> bool:
    """Whether the source has a picture beside it, and this was taken of the source as it is now."""
    if not source.with_suffix(".png").exists():
        return False
    with Image.open(source.with_suffix(".png")) as picture:
        return picture.text.get("source") == mark(source)


if __name__ == "__main__":
    for path in sources():
        if not is_new(path):
            take(find_browser(), path)
            if path.suffix == ".svg" and "@keyframes" in path.read_text("utf-8"):
                film(find_browser(), path)
