"""Write study times and processor times at the top of the lessons, and in the tables of docs:
`python book/times.py`.

A lesson's core is all that stands before "For the careful reader"; exercises and symbols are not counted.
"""

import json
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TABLES = (ROOT / "docs" / "start.md", ROOT / "docs" / "teaching.md")
LESSONS = sorted(ROOT.glob("notebooks/*.ipynb"))
# of prose and of code (at most 88 columns wide) that a student reads in a minute
WORDS, LINES = 200, 18

# Seconds of one processor core for a whole lesson in the profile cpu, on a machine of 2026: user and system time of
# `make notebooks` with OMP_NUM_THREADS=1.
PROCESSOR = {"00": 31, "01": 13, "02": 61, "03": 28, "04": 15, "05": 10, "06": 16, "07": 305}
PROCESSOR |= {
    "08": 169,
    "09": 90,
    "10": 145,
    "11": 72,
    "12": 136,
    "13": 49,
    "14": 20,
    "15": 20,
    "16": 11,
    "17": 30,
}
# of times, at the top of a lesson
LINE = re.compile(r"\*\*(?:Study time|Time)\*\*.*?\s+(?=\*\*Paper\*\*)", re.S)
COURSES = {  # lessons of which the core is read; 01a is lesson 01 up to its pause, 01b the rest
    "two hours": ["00", "01", "03", "04", "05"],
    "one day": ["00", "01", "02", "03", "04", "05", "08", "15"],
    "a term": [path.name[:2] for path in LESSONS],
}
# The first course: sections of lessons, in the order in which they are read. Each may hold others, under "###".
SPINE = {
    "01": ["1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12"],
    "02": ["1"],
    "04": ["1", "2", "4", "5"],
    "05": ["1", "2"],
    "08": ["2"],
    "15": ["1"],
    "13": ["8", "9"],
}
SESSION = 90  # minutes of a session in class, where a core takes twice its study time
# what is taught in class, and what is read at home before it: together the course "one day"
SESSIONS = {
    "1": (["00"], []),
    "2": (["01a"], []),
    "3": (["01b"], []),
    "4": (["02"], []),
    "5": (["04"], ["03"]),
    "6": (["08"], ["05"]),
    "after 6": ([], ["15"]),
}


class Times(NamedTuple):
    """Minutes of study, and of one processor core."""

    pause: int | None  # up to the pause, in a lesson that has one
    core: int
    all: int
    processor: int

    def line(self) -> str:
        """What stands at the top of the lesson."""
        halves = (
            f" ({self.pause} to the pause, {self.core - self.pause} after it)" if self.pause else ""
        )
        letters = ""
        if self.all > self.core:
            letters = 'Numbered sections are the core; lettered ones, under "For the careful reader", are optional.'
        rest = f", all {self.all} min" if letters else ""
        study = f"**Study time** core {self.core} min{halves}{rest}, without the exercises."
        return " ".join(
            filter(None, [study, letters, f"**Processor time** {self.processor} min on one core."])
        )


def parts(path: Path) -> dict[str, list[tuple[str, str]]]:
    """What there is to read before the pause, in the rest of the core, and for the careful reader: (kind, text)."""
    found, part = {"pause": [], "core": [], "careful": [], "rest": []}, "pause"
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        for piece in re.split(r"^(?=## |---$)", LINE.sub("", "".join(cell["source"])), flags=re.M):
            if cell["cell_type"] == "markdown":
                part = "core" if piece.startswith("---\n\n**Pause.**") else part
                part = "careful" if piece.startswith("## For the careful reader") else part
                part = "rest" if re.match("## (Exercises|Symbols)", piece) else part
            found[part].append((cell["cell_type"], piece))
    return found


def minutes(pieces: list[tuple[str, str]]) -> float:
    """Time for words of prose, and for lines of code that are not empty."""
    code = [
        line
        for kind, text in pieces
        if kind == "code"
        for line in text.splitlines()
        if line.strip()
    ]
    return words(pieces) / WORDS + len(code) / LINES


def spine() -> list[tuple[str, str]]:
    """What there is to read in the first course: (kind, text)."""
    found = []
    for number, sections in SPINE.items():
        (path,) = (path for path in LESSONS if path.name.startswith(number))
        pieces, inside = parts(path), False
        for kind, text in pieces["pause"] + pieces["core"]:
            if kind == "markdown" and (heading := re.match(r"## (.*)", text)):
                inside = heading[1].partition(" · ")[0] in sections
            found += [(kind, text)] if inside else []
    return found


def words(pieces: list[tuple[str, str]]) -> int:
    """Words of prose, without addresses and marks."""
    prose = " ".join(
        re.sub(r"\]\([^)]*\)|<[^>]*>|!\[[^]]*", " ", text)
        for kind, text in pieces
        if kind == "markdown"
    )
    return sum(any(map(str.isalnum, word)) for word in prose.split())


def rounded(minutes: float) -> int:
    """The next five minutes."""
    return 5 * -int(-minutes // 5)


def hours_of(minutes: int) -> str:
    """Minutes as hours and minutes."""
    return f"{minutes // 60} h {minutes % 60:02} min"


def measure(path: Path) -> Times:
    """Each part is rounded up, so that printed times add up."""
    found = parts(path)
    first, second, careful = (
        rounded(minutes(found[part])) for part in ("pause", "core", "careful")
    )
    processor = -(-PROCESSOR[path.name[:2]] // 60)
    return Times(first if second else None, first + second, first + second + careful, processor)


def lesson_page(path: Path, times: Times) -> str:
    """The notebook with its line of times."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    top = "".join(notebook["cells"][0]["source"])
    top = LINE.sub(lambda _: times.line() + "\n", top)
    notebook["cells"][0]["source"] = top.splitlines(keepends=True)
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def study(lessons: list[str], times: dict[str, Times]) -> int:
    """Minutes of study for the core of these lessons or halves."""
    halves = {"a": lambda row: row.pause, "b": lambda row: row.core - row.pause}
    return sum(halves.get(x[2:], lambda row: row.core)(times[x[:2]]) for x in lessons)


def sessions(times: dict[str, Times]) -> dict[str, list[int]]:
    """Of each session: minutes of study, in class, left, and of study at home."""
    rows = {}
    for name, (shown, read) in SESSIONS.items():
        minutes = study(shown, times)
        rows[name] = [
            minutes,
            2 * minutes,
            SESSION - 2 * minutes if shown else 0,
            study(read, times),
        ]
    return rows | {"sum": [sum(column) for column in zip(*rows.values(), strict=True)]}


def with_tables(path: Path, times: dict[str, Times]) -> str:
    """The page with times in its tables of lessons and of courses."""
    text = path.read_text(encoding="utf-8")
    for number, row in times.items():
        cells = f" {row.core} | {row.all} | {row.processor} |"
        text = re.sub(
            rf"^(\| \[{number}_[^|]*\|[^|]*\|).*$",
            lambda m, cells=cells: m[1] + cells,
            text,
            flags=re.M,
        )
    totals = {"the spine": hours_of(rounded(minutes(spine())))}
    totals |= {name: hours_of(study(lessons, times)) for name, lessons in COURSES.items()}
    totals["a term"] += f"; all sections: {hours_of(sum(row.all for row in times.values()))}"
    for name, hours in totals.items():
        text = re.sub(
            rf"^(\| {name} \|[^|]*\|)[^|]*\|",
            lambda m, hours=hours: f"{m[1]} {hours} |",
            text,
            flags=re.M,
        )
    for name, (*taught, read) in sessions(times).items():
        row, cells = (
            rf"^(\| {name} \|[^|]*\|)(?: \d+ \|){{3}}([^|]*\|) \d+ \|$",
            "".join(f" {x} |" for x in taught),
        )
        text = re.sub(
            row, lambda m, cells=cells, read=read: f"{m[1]}{cells}{m[2]} {read} |", text, flags=re.M
        )
    return text


def pages() -> dict[Path, str]:
    """What lessons and the pages of docs with study times should be."""
    times = {path.name[:2]: measure(path) for path in LESSONS}
    lessons = {path: lesson_page(path, times[path.name[:2]]) for path in LESSONS}
    return lessons | {path: with_tables(path, times) for path in TABLES}


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
