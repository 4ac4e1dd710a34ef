"""Execute notebooks in an empty folder and say what left the committed outputs: `make notebooks CHECK=1`, or
`python book/check_outputs.py NOTEBOOK ...`. The notebooks stay as they are.

Named are: numbers that moved by more than the cell's tolerance, with the Markdown cells that repeat them; words that
changed; outputs that are missing or new; figures of another size (what they show is not compared). The exit code is 1
where something was named, else 0.

The tolerance is `TOLERANCE`, or what a tag of the cell says, such as `tolerance:0.3`: a share of the larger number, to
which one unit of the last printed digit is added. `tolerance:inf` compares words alone, `tolerance:skip` nothing.
"""

import re
import struct
import sys
import tempfile
from base64 import b64decode
from copy import deepcopy
from itertools import zip_longest
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert.preprocessors import CoalesceStreamsPreprocessor

TOLERANCE = 0.02
# share by which a figure may be larger or smaller: numbers at its edge have more digits or fewer
PIXELS = 0.1
NUMBER = re.compile(r"(?<![\w.])[-−+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?|(?<=\D)\.\d+")
# versions, progress
CHANGING = re.compile(r"^marlhf_lite \d.*$|\[[\d:?]+ left|█+[▏▎▍▌▋▊▉]? *|0x[0-9a-f]+", re.M)
SPACE = re.compile(r"\s+|-{3,}")
TAGS = re.compile(r"<(script|style)\b.*?</\1>|<[^>]*>", re.S)
OBJECT = re.compile(r"<[\w.]+( [^>]*)?>$")  # the text of an output that has no text of its own


def text_of(output) -> str:
    """What the output says, without what differs from machine to machine; empty for a picture."""
    if output.output_type in ("stream", "error"):
        text = output.get("text", "") + output.get("evalue", "")
    else:
        forms = [output.data.get(form, "") for form in ("text/markdown", "text/plain")]
        forms.append(TAGS.sub(" ", output.data.get("text/html", "")))
        text = next((form for form in forms if form and not OBJECT.match(form)), "")
    return SPACE.sub(" ", CHANGING.sub("", text)).strip()


def size_of(output) -> tuple[int, int] | None:
    """Width and height of the output's PNG in pixels."""
    png = output.get("data", {}).get("image/png")
    return struct.unpack(">II", b64decode(png)[16:24]) if png else None


def tolerance_of(cell) -> float | None:
    """The tolerance that the cell's tag names; None: not compared."""
    tags = [
        tag.removeprefix("tolerance:")
        for tag in cell.metadata.get("tags", [])
        if tag.startswith("tolerance:")
    ]
    return None if "skip" in tags else float(tags[0]) if tags else TOLERANCE


def near(old: str, new: str, tolerance: float) -> bool:
    """Whether two printed numbers differ by no more than the tolerance and one unit of the last digit."""
    one, other = (float(number.replace("−", "-")) for number in (old, new))
    digits = min(len(number.partition("e")[0].partition(".")[2]) for number in (old, new))
    # counts below ten are exact
    unit = 0.0 if digits == 0 and max(abs(one), abs(other)) < 10 else 10.0**-digits
    largest = max(abs(one), abs(other))
    # inf times 0 is no number
    return one == other or abs(one - other) <= tolerance * largest + 1.001 * unit


def compare_outputs(old, new, tolerance: float) -> list[tuple[str, str]]:
    """What differs between two outputs: (a line that says so, the number that left or "")."""
    kinds = [_kind(output) for output in (old, new)]
    if kinds[0] != kinds[1]:
        return [(f"output: {kinds[0]} → {kinds[1]}", "")]
    found, sizes = [], (size_of(old), size_of(new))
    if sizes[0] and any(abs(a - b) > PIXELS * a for a, b in zip(*sizes, strict=True)):
        found.append(("figure: {}×{} → {}×{} pixels".format(*sizes[0], *sizes[1]), ""))
    texts = [text_of(output) for output in (old, new)]
    words = [NUMBER.sub("#", text) for text in texts]
    if words[0] != words[1]:
        start = max(next(i for i, (a, b) in enumerate(zip_longest(*words)) if a != b) - 20, 0)
        return [
            *found,
            ("words: " + " → ".join(repr(text[start : start + 60]) for text in words), ""),
        ]
    moved = [
        (a, b)
        for a, b in zip(*map(NUMBER.findall, texts), strict=True)
        if not near(a, b, tolerance)
    ]
    return found + [(f"number: {a} → {b}", a) for a, b in moved]


def _kind(output) -> str:
    """The type of the output, and the forms that its content has."""
    return (
        "nothing"
        if output is None
        else " ".join([output.output_type, *sorted(output.get("data", ()))])
    )


def compare(old, new) -> list[str]:
    """A line for everything in which the executed notebook `new` left the outputs of `old`."""
    prose = [(cell.id, cell.source) for cell in old.cells if cell.cell_type == "markdown"]
    lines = []
    for before, after in zip(old.cells, new.cells, strict=True):
        tolerance = tolerance_of(before)
        if before.cell_type != "code" or tolerance is None:
            continue
        for one, other in zip_longest(before.outputs, after.outputs):
            for line, number in compare_outputs(one, other, tolerance):
                plain = number.lstrip("-−+")
                said = [
                    id
                    for id, text in prose
                    if re.search(rf"(?<![\d.]){re.escape(plain)}(?![\d.]\d)", text)
                ]
                again = f" (also in {', '.join(said)})" if len(plain) > 2 and said else ""
                lines.append(f"{before.id}: {line}{again}")
    return lines


def executed(notebook):
    """A copy of the notebook with the outputs of a new execution, as `make notebooks` would store them."""
    copy = deepcopy(notebook)
    with tempfile.TemporaryDirectory() as empty:
        NotebookClient(
            copy, timeout=None, record_timing=False, resources={"metadata": {"path": empty}}
        ).execute()
    return CoalesceStreamsPreprocessor().preprocess(copy, {})[0]


def main(paths: list[str]) -> int:
    left = 0
    for path in map(Path, paths):
        stored = nbformat.read(path, 4)
        try:
            lines = compare(stored, executed(stored))
        except CellExecutionError as error:
            lines = [f"stopped: {error.ename}: {error.evalue}"]
        left += len(lines)
        print(
            f"{path}: {'as committed' if not lines else f'{len(lines)} left'}",
            *lines,
            sep="\n    ",
            flush=True,
        )
    return int(left > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
