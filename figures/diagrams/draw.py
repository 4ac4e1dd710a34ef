"""Draw the diagrams of README and lessons: `python figures/diagrams/draw.py` writes the SVG files beside this one.

canvas           palette, font and shapes
schemes          diagrams that show how parts stand to each other
worked_examples  diagrams with numbers
moving           the diagram that moves

A diagram is one function: its name is the file's, its docstring holds title and description.
"""

from pathlib import Path

import moving  # noqa: F401  (each module registers its diagrams)
import schemes  # noqa: F401
import worked_examples  # noqa: F401
from canvas import DIAGRAMS

if __name__ == "__main__":
    for name, svg in DIAGRAMS.items():
        Path(__file__).with_name(f"{name}.svg").write_text(svg(), encoding="utf-8")
