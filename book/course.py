"""Write the head and the foot of every notebook, the headings of the solutions, and the tables of docs/start.md, from
course.yaml: `python book/course.py`.

The head is the heading, a banner with the place in the course and the times, and, as the last line of the first cell,
the links to the lesson before and the lesson after; the foot, the last cell, repeats these links.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import yaml
from times import ROOT, StudyTimes, measure

START = ROOT / "docs" / "start.md"
NOTEBOOKS = ROOT / "notebooks"
# In docs/start.md each table stands between a line with its name and a line with the end.
BLOCK = "<!-- {name}: written by book/course.py -->\n{text}\n<!-- end of {name} -->"
ALL_LESSONS = "[all lessons and electives](../docs/start.md)"


@dataclass(frozen=True)
class Notebook:
    """A lesson, with its place in the course, or an elective, which has none."""

    file: str
    title: str
    question: str
    seconds: int
    place: int | None = None  # lessons count from 1
    after: str = ""  # of an elective: the file of the lesson to read before it
    number: str = ""  # of an elective: its name in headings

    @property
    def path(self) -> Path:
        return NOTEBOOKS / f"{self.file}.ipynb"

    @property
    def solutions(self) -> Path:
        return NOTEBOOKS / "solutions" / f"{self.file}.ipynb"

    @property
    def heading(self) -> str:
        number = f"Lesson {self.place}" if self.place else self.number
        return f"{number} · {self.title}"

    @property
    def processor_minutes(self) -> int:
        """Minutes of computing on one core, rounded up."""
        return -(-self.seconds // 60)  # `//` rounds down, so that of a negative number rounds up

    def link(self, folder: str = "") -> str:
        return f"[{self.heading}]({folder}{self.file}.ipynb)"


def read_course() -> tuple[list[Notebook], list[Notebook]]:
    """The lessons in their order, and the electives."""
    course = yaml.safe_load((ROOT / "book" / "course.yaml").read_text(encoding="utf-8"))
    lessons = []
    for place, (file, entry) in enumerate(course["lessons"].items(), start=1):
        lessons.append(Notebook(file, place=place, **entry))
    electives = []
    for file, entry in course["electives"].items():
        number_of_file = file.partition("_")[0]
        # The file course.yaml may give an elective another number.
        electives.append(Notebook(file, **{"number": number_of_file, **entry}))
    return lessons, electives


LESSONS, ELECTIVES = read_course()


def banner(notebook: Notebook, times: StudyTimes) -> str:
    """Where the reader is in the course, and how long the notebook takes."""
    if notebook.place:
        where = f"**Lesson {notebook.place} of {len(LESSONS)}**"
    else:
        where = f"**Elective**, to be read at any time after lesson {place_before(notebook)}"
    reading = f"reading: {times.core} minutes"
    if times.optional:
        reading += f", and {times.optional} for the lettered sections, which are optional"
    return f"{where} · {reading} · computing: {minutes_of(notebook.processor_minutes)} on one core"


def minutes_of(count: int) -> str:
    return f"{count} minute" if count == 1 else f"{count} minutes"


def place_before(elective: Notebook) -> int:
    """The place of the lesson after which an elective can be read."""
    (place,) = (lesson.place for lesson in LESSONS if lesson.file == elective.after)
    return place


def links(notebook: Notebook) -> str:
    """Links to the lessons before and after this one.

    The first lesson has none before it. After the last one, and from an elective, a link leads to the list of all.
    """
    if notebook.place is None:
        return f"**Back to** {ALL_LESSONS}"
    shown = []
    is_first = notebook.place == 1
    if not is_first:
        # Places begin with 1 and the list with 0, so this is the lesson before.
        shown.append(f"**Previous** {LESSONS[notebook.place - 2].link()}")
    is_last = notebook.place == len(LESSONS)
    after = ALL_LESSONS if is_last else LESSONS[notebook.place].link()
    shown.append(f"**Next** {after}")
    return " · ".join(shown)


def page_of(notebook: Notebook) -> str:
    """The text of the notebook's file with the head and the foot that it should have."""
    page = json.loads(notebook.path.read_text(encoding="utf-8"))
    cells = page["cells"]
    first = "".join(cells[0]["source"])
    head = f"# {notebook.heading}\n\n{banner(notebook, measure(notebook.path))}\n\n"
    # What stands above the badges, and what stands in the last line, is written anew.
    first = head + first[first.index("[![Open in Colab]") :]
    first = first.rpartition("\n")[0] + "\n" + links(notebook)
    cells[0]["source"] = first.splitlines(keepends=True)
    cells[-1]["source"] = [links(notebook)]
    return json.dumps(page, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def solutions_of(notebook: Notebook) -> str:
    """The text of the file with the notebook's solutions, with the heading that it should have."""
    page = json.loads(notebook.solutions.read_text(encoding="utf-8"))
    source = page["cells"][0]["source"]
    source[0] = f"# {notebook.heading}: solutions\n"
    return json.dumps(page, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def table_of_lessons() -> str:
    rows = ["| lesson | its question | read | optional | run |", "|---|---|---|---|---|"]
    for lesson in LESSONS:
        times = measure(lesson.path)
        rows.append(
            f"| {lesson.link('../notebooks/')} | {lesson.question} "
            f"| {times.core} | {times.optional or '-'} | {lesson.processor_minutes} |"
        )
    total = sum(measure(lesson.path).core for lesson in LESSONS)
    rows.append(f"| all | | {total // 60} h {total % 60:02} min | | |")
    return "\n".join(rows)


def table_of_electives() -> str:
    rows = [
        "| elective | its question | after | read | optional | run |",
        "|---|---|---|---|---|---|",
    ]
    for elective in ELECTIVES:
        times = measure(elective.path)
        rows.append(
            f"| {elective.link('../notebooks/')} | {elective.question} | lesson {place_before(elective)} "
            f"| {times.core} | {times.optional or '-'} | {elective.processor_minutes} |"
        )
    return "\n".join(rows)


def with_block(page: str, name: str, text: str) -> str:
    """The page with this text in the block of this name, in place of the text that stood there."""
    pattern = re.escape(BLOCK).replace(r"\{name\}", name).replace(r"\{text\}", ".*?")
    written = BLOCK.format(name=name, text=text)
    # A function, because `re` would read backslashes in a text as its own signs.
    page, count = re.subn(pattern, lambda _: written, page, flags=re.S)
    if count != 1:
        raise ValueError(f"{count} blocks {name!r}: a page needs one to be written into")
    return page


def pages() -> dict[Path, str]:
    """Path -> the text that it should have, for all pages that the course writes into."""
    start = START.read_text(encoding="utf-8")
    start = with_block(start, "lessons", "\n" + table_of_lessons() + "\n")
    start = with_block(start, "electives", "\n" + table_of_electives() + "\n")
    written = {START: start}
    for notebook in LESSONS + ELECTIVES:
        written[notebook.path] = page_of(notebook)
        written[notebook.solutions] = solutions_of(notebook)
    return written


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
