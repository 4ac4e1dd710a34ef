"""What all diagrams share: palette, font, and a few shapes that are written as SVG.

Coordinates are in pixels, y goes down. Every diagram has a panel of its own, so that it can be read on a white and on a
dark page; if a browser asks for dark pages, the panel is dark, too. Each colour stands beside a word or another line
style, so that it can be read in grey print.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Sequence
from inspect import getdoc
from xml.sax.saxutils import escape, quoteattr

from marlhf_lite.plotting.styles import METHODS, PALE_SPANS, SERIES

WIDTH = 800
FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
INK, FAINT, PANEL, FRAME, GREY = "#1f1f1f", "#5f5f5f", "#fdfcf9", "#cfcabf", "#e9e6df"

# A method has the same colour as in the plots. Reward model and critic are no methods: they have colours of `SERIES`.
PPO, MACRO, REFERENCE, LONGER = (METHODS[name].colour for name in ("PPO", "MA-PPO", "SFT", "E1"))
SAE, FIRST, ALL, CALIBRATED = (METHODS[name].colour for name in ("E2", "E3", "lam=1", "VC"))
REWARD, CRITIC = SERIES[1], SERIES[3]

Point = tuple[float, float]


def tint(colour: str, share: float = 0.17) -> str:
    """Mix a colour with white, for the inside of boxes under black text."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - share * (255 - part)):02x}" for part in parts)


def turned_over(colour: str) -> str:
    """Make a pale colour dark and a dark one pale, for dark pages; the hue stays.

    All three channels move by the same amount, so that the lightness changes from Y to 1 − Y and the differences
    between the channels stay. Then all channels move a little towards grey, because pure black and white are too hard
    beside a dark page.
    """
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = channels
    lightness = 0.213 * red + 0.715 * green + 0.072 * blue  # how bright each channel looks
    lightness_on_dark = 1 - lightness
    # Only lines and bars have such strong colours: boxes under words are paler.
    is_line_or_bar = max(channels) - min(channels) > 0.4
    if is_line_or_bar:
        # Light enough to stand out from the dark panel.
        lightness_on_dark = max(lightness_on_dark, 0.42)
    moved = [channel + lightness_on_dark - lightness for channel in channels]
    softer = [0.08 + 0.86 * min(1, max(0, channel)) for channel in moved]
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in softer)


def style_for_dark_pages(drawing: str) -> str:
    """Return a style that turns over every colour of the drawing if a browser asks for dark pages."""
    rules = [
        f'[{kind}="{colour}"] {{ {kind}: {turned_over(colour)}; }}'
        for kind, colour in sorted(set(re.findall(r'(fill|stroke)="(#\w{6})"', drawing)))
    ]
    return "\n".join(["<style>", "@media (prefers-color-scheme: dark) {", *rules, "}", "</style>"])


def number(value: float, digits: int = 2) -> str:
    """Format a number as it is printed: a fixed count of digits and a real minus sign."""
    return f"{value:.{digits}f}".replace("-", "−")


class Canvas:
    """One diagram. Shapes appear in the order in which they are asked for; `svg` returns the file's text."""

    def __init__(self, title: str, description: str, height: int):
        self.title, self.description, self.height = title, description, height
        self._parts: list[str] = []
        self.rect(1, 1, WIDTH - 2, height - 2, PANEL, FRAME, radius=14, thick=1)
        self.text(28, 36, title, size=18, bold=True, anchor="start")

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: float = 13.5,
        bold: bool = False,
        colour: str = INK,
        anchor: str = "middle",
        kind: str = "",
    ) -> None:
        """Write one or several lines; y is the middle of their height. In `words`, ^x or ^(x y) is a superscript.

        `kind` is a class of the diagram's own style, as for a part that moves.
        """
        lines, step = words.split("\n"), 1.32 * size
        # SVG places the baseline of a line, which is about 0.35 of its size below the middle of its letters.
        first = y + 0.35 * size - step * (len(lines) - 1) / 2
        weight = ' font-weight="bold"' if bold else ""
        # A superscript (\1 or \2) is raised and smaller. The tspan after it lowers the rest of the line again and stays
        # open up to the end of the line, which needs one closing tag for each superscript.
        raised = rf'<tspan dy="-{0.35 * size:g}" font-size="{0.75 * size:g}">\1\2</tspan><tspan dy="{0.35 * size:g}">'
        for i, line in enumerate(lines):
            place = f'x="{x:g}" y="{first + i * step:.1f}" font-size="{size:g}" text-anchor="{anchor}" fill="{colour}"'
            inside, marks = re.subn(r"\^(?:\(([^)]*)\)|(\w))", raised, escape(line))
            # Some programs drop a space at the start of a tspan, so there `dx` moves the words by the width of a space.
            inside = re.sub(r'(<tspan dy="[\d.]+")> ', rf'\1 dx="{0.28 * size:g}">', inside)
            of_kind = f' class="{kind}"' if kind else ""
            self._parts.append(
                f"<text {place}{weight}{of_kind}>{inside}{'</tspan>' * marks}</text>"
            )

    def note(self, y: float, words: str) -> None:
        """Write a remark from the left margin on, in lines that fit; y is the middle of the first line."""
        lines = textwrap.wrap(words, 110)
        # `text` takes the middle of all lines, which are 1.32 · 13 pixels apart.
        self.text(
            28,
            y + (len(lines) - 1) * 0.66 * 13,
            "\n".join(lines),
            size=13,
            colour=FAINT,
            anchor="start",
        )

    def rect(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        fill: str,
        line: str = "none",
        radius: float = 0,
        thick: float = 1.2,
        dashed: bool = False,
    ) -> None:
        dash = ' stroke-dasharray="6 4"' if dashed else ""
        look = f'fill="{fill}" stroke="{line}" stroke-width="{thick:g}"{dash}'
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{radius:g}" {look}/>'
        )

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        words: str,
        colour: str = FAINT,
        dashed: bool = False,
        size: float = 13.5,
        bold: bool = False,
    ) -> None:
        """Draw a box with words in its middle. Both are one group, so that a test can check that the words fit."""
        self._parts.append('<g class="box">')
        self.rect(x, y, w, h, tint(colour), colour, radius=7, thick=1.8, dashed=dashed)
        self.text(x + w / 2, y + h / 2, words, size, bold)
        self._parts.append("</g>")

    def line(
        self, points: Sequence[Point], colour: str = INK, thick: float = 1.8, dashed: bool = False
    ) -> None:
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        look = (
            f'fill="none" stroke="{colour}" stroke-width="{thick:g}" stroke-linejoin="round"{dash}'
        )
        self._parts.append(f'<polyline points="{path}" {look}/>')

    def arrow(self, *points: Point, colour: str = INK, dashed: bool = False) -> None:
        """Draw a line through the points with a head at the last one."""
        (x0, y0), (x, y) = points[-2:]
        length = math.hypot(x - x0, y - y0)
        u, v = (x - x0) / length, (y - y0) / length  # the direction of the last piece, of length 1
        # The head is a triangle, 10 pixels long and 10 wide; the line ends at its back.
        back = (x - 10 * u, y - 10 * v)
        self.line([*points[:-1], back], colour, dashed=dashed)
        head = [(x, y), (back[0] - 5 * v, back[1] + 5 * u), (back[0] + 5 * v, back[1] - 5 * u)]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in head)
        self._parts.append(f'<polygon points="{path}" fill="{colour}"/>')

    def cells(
        self,
        x: float,
        y: float,
        widths: Sequence[float],
        words: Sequence[str],
        fills: Sequence[str] | None = None,
        h: float = 28,
        size: float = 13,
        bold: bool = False,
    ) -> None:
        """Draw a row of neighbouring cells from its left upper corner, one for each word; white without `fills`."""
        for i, (w, word) in enumerate(zip(widths, words, strict=True)):
            self._parts.append('<g class="box">')
            self.rect(x, y, w, h, fills[i] if fills else "#ffffff", "#8a857b", thick=1)
            if word:
                self.text(x + w / 2, y + h / 2, word, size, bold)
            self._parts.append("</g>")
            x += w

    def style(self, rules: str) -> None:
        """Give the diagram a style of its own, such as how its parts move. Without motion it must show everything."""
        self._parts.append(f"<style>\n{rules}\n</style>")

    def cover(self, x: float, y: float, w: float, h: float, kind: str) -> None:
        """Hide what is drawn here under a rectangle. A style of class `kind` makes it narrower, from the right on."""
        place = f'x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}"'
        origin = f'style="transform-origin: {x:g}px {y:g}px"'
        self._parts.append(f'<rect {place} fill="{PANEL}" class="{kind}" {origin}/>')

    def ball(self, x: float, y: float, colour: str, kind: str) -> None:
        """Draw a small ball, which a style of class `kind` moves."""
        self._parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="6" fill="{colour}" class="{kind}"/>')

    def svg(self) -> str:
        size = f'width="{WIDTH}" height="{self.height}" viewBox="0 0 {WIDTH} {self.height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family={quoteattr(FONT)}>'
        words = f"<title>{escape(self.title)}</title>\n<desc>{escape(self.description)}</desc>"
        dark = style_for_dark_pages("\n".join(self._parts))
        return "\n".join([head, words, dark, *self._parts, "</svg>", ""])


DIAGRAMS: dict[str, Callable[[], str]] = {}  # by file name: a function that returns the SVG


def diagram(height: int) -> Callable:
    """Return a decorator that adds a drawing function to `DIAGRAMS`, for a canvas of this height.

    The first line of the function's docstring is the diagram's title, the rest its description for those who cannot
    see it.
    """

    def register(draw: Callable[[Canvas], None]) -> Callable[[Canvas], None]:
        def svg() -> str:
            title, description = getdoc(draw).split("\n\n")
            canvas = Canvas(title, " ".join(description.split()), height)
            draw(canvas)
            return canvas.svg()

        DIAGRAMS[draw.__name__] = svg
        return draw

    return register


def alternate(lengths: Sequence[int]) -> list[str]:
    """Return the fill of each token: the two colours of the plots in turn, so that neighbouring macro actions differ.

    lengths: of the macro actions, in tokens.
    """
    return [PALE_SPANS[i % 2] for i, length in enumerate(lengths) for _ in range(length)]
