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

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert.preprocessors import CoalesceStreamsPreprocessor

TOLERANCE = 0.02
# Share by which a figure may be larger or smaller, because the numbers at its edge may have more digits or fewer.
PIXELS = 0.1
NUMBER = re.compile(r"(?<![\w.])[-−+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?|(?<=\D)\.\d+")
# What differs from run to run or from machine to machine: versions, progress bars, addresses in memory.
CHANGING = re.compile(r"^marlhf_lite \d.*$|\[[\d:?]+ left|█+[▏▎▍▌▋▊▉]? *|0x[0-9a-f]+", re.M)
SPACE = re.compile(r"\s+|-{3,}")
TAGS = re.compile(r"<(script|style)\b.*?</\1>|<[^>]*>", re.S)
OBJECT = re.compile(r"<[\w.]+( [^>]*)?>$")  # the text of an output that has no text of its own


def text_of(output) -> str:
    """What the output says, on one line, without `CHANGING`; empty for a picture.

    Of the forms in which an output has its content, the first with words counts: Markdown, plain text, HTML.
    """
    text = ""
    if output.output_type in ("stream", "error"):
        text = output.get("text", "") + output.get("evalue", "")
    else:
        forms = [output.data.get(form, "") for form in ("text/markdown", "text/plain")]
        forms.append(TAGS.sub(" ", output.data.get("text/html", "")))
        forms_with_words = [form for form in forms if form and not OBJECT.match(form)]
        if forms_with_words:
            text = forms_with_words[0]
    return SPACE.sub(" ", CHANGING.sub("", text)).strip()


def size_of(output) -> tuple[int, int] | None:
    """Width and height of the output's PNG in pixels; None if it has none."""
    png = output.get("data", {}).get("image/png")
    # In a PNG's header both numbers stand at byte 16, as big-endian integers of four bytes.
    return struct.unpack(">II", b64decode(png)[16:24]) if png else None


def tolerance_of(cell) -> float | None:
    """The tolerance that the cell's tag names, or `TOLERANCE`; None if the cell is not to be compared."""
    prefix = "tolerance:"
    all_tags = cell.metadata.get("tags", [])
    named = [tag.removeprefix(prefix) for tag in all_tags if tag.startswith(prefix)]
    if "skip" in named:
        return None
    return float(named[0]) if named else TOLERANCE


def near(old: str, new: str, tolerance: float) -> bool:
    """Whether two printed numbers differ by no more than the tolerance and one unit of the last printed digit.

    The tolerance is a share of the larger number. If one number has fewer decimals, the last digit is that of this one.
    """
    one, other = (float(number.replace("−", "-")) for number in (old, new))
    if one == other:  # also of infinite numbers, whose difference is not a number
        return True
    digits = min(len(number.partition("e")[0].partition(".")[2]) for number in (old, new))
    largest = max(abs(one), abs(other))
    if digits == 0 and largest < 10:
        unit = 0.0  # counts below ten are exact
    else:
        unit = 10.0**-digits
    # 1.001, because in floating point a difference of one unit may come out a little larger.
    return abs(one - other) <= tolerance * largest + 1.001 * unit


def compare_outputs(old, new, tolerance: float) -> list[tuple[str, str]]:
    """What differs between two outputs, as pairs of a line that says so and the old number that left.

    The number is "" if something else than a number differs. An output that is missing is None.
    """
    old_kind = _kind(old)
    new_kind = _kind(new)
    if old_kind != new_kind:
        return [(f"output: {old_kind} → {new_kind}", "")]
    found = []
    # 1. The size of a figure.
    if size_of(old):
        (width, height), (new_width, new_height) = size_of(old), size_of(new)
        if abs(width - new_width) > PIXELS * width or abs(height - new_height) > PIXELS * height:
            line = f"figure: {width}×{height} → {new_width}×{new_height} pixels"
            found.append((line, ""))
    # 2. Words: the texts with a sign in place of each number.
    old_text = text_of(old)
    new_text = text_of(new)
    old_words = NUMBER.sub("#", old_text)
    new_words = NUMBER.sub("#", new_text)
    if old_words != new_words:
        letters = enumerate(zip_longest(old_words, new_words))
        first_difference = next(place for place, (a, b) in letters if a != b)
        start = max(first_difference - 20, 0)
        end = start + 60
        found.append((f"words: {old_words[start:end]!r} → {new_words[start:end]!r}", ""))
        return found  # with other words it is not clear which numbers belong together
    # 3. Numbers: with equal words there are equally many.
    numbers = zip(NUMBER.findall(old_text), NUMBER.findall(new_text), strict=True)
    for old_number, new_number in numbers:
        if not near(old_number, new_number, tolerance):
            found.append((f"number: {old_number} → {new_number}", old_number))
    return found


def _kind(output) -> str:
    """The type of the output, and the forms that its content has."""
    if output is None:
        return "nothing"
    return " ".join([output.output_type, *sorted(output.get("data", ()))])


def compare(old, new) -> list[str]:
    """A line for everything in which the outputs of the executed notebook `new` differ from those of `old`."""
    prose = {cell.id: cell.source for cell in old.cells if cell.cell_type == "markdown"}
    lines = []
    for before, after in zip(old.cells, new.cells, strict=True):
        tolerance = tolerance_of(before)
        if before.cell_type != "code" or tolerance is None:
            continue
        # An output that has no counterpart meets None.
        for one, other in zip_longest(before.outputs, after.outputs):
            for line, number in compare_outputs(one, other, tolerance):
                lines.append(f"{before.id}: {line}{_where_repeated(number, prose)}")
    return lines


def _where_repeated(number: str, prose: dict[str, str]) -> str:
    """The Markdown cells that have this number too, in brackets.

    Empty if there are none, or if the number has only one or two characters: those are not looked for.
    """
    plain = number.lstrip("-−+")
    if len(plain) <= 2:
        return ""
    # Not as a part of a longer number.
    whole_number = re.compile(rf"(?<![\d.]){re.escape(plain)}(?![\d.]\d)")
    cells = [cell for cell, text in prose.items() if whole_number.search(text)]
    return f" (also in {', '.join(cells)})" if cells else ""


def executed(notebook):
    """A copy of the notebook with the outputs of a new execution, as `make notebooks` would store them."""
    copy = deepcopy(notebook)
    with tempfile.TemporaryDirectory() as empty:
        NotebookClient(
            copy, timeout=None, record_timing=False, resources={"metadata": {"path": empty}}
        ).execute()
    return CoalesceStreamsPreprocessor().preprocess(copy, {})[0]


def main(paths: list[str]) -> int:
    """Compare these notebooks with a new execution, print what differs, and return 1 if anything does, else 0."""
    left = 0
    for path in paths:
        stored = nbformat.read(path, 4)
        try:
            lines = compare(stored, executed(stored))
        except CellExecutionError as error:
            lines = [f"stopped: {error.ename}: {error.evalue}"]
        left += len(lines)
        result = f"{len(lines)} left" if lines else "as committed"
        print(f"{path}: {result}", *lines, sep="\n    ", flush=True)
    return int(left > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
