"""Where results come from: when protocols were committed and changed, when runs began, and from which commit.

The facts come from files and from git's history. Other things, such as why a run was done again, are in
`data/results/history.yaml`: study -> fact -> note; a fact without a note is an error.
"""

import datetime
import io
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import yaml

from marlhf_lab.studies.results import JOINED, parse_results, result_files, run_name
from marlhf_lab.studies.study import STUDIES
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.tables import markdown

RESULTS, PAGE = "data/results", "docs/provenance.md"
WRITTEN = rf"[AM]\t.*(-seed\d+\.json(\.gz)?|/{re.escape(JOINED)})$"  # a line of git's log
FACTS = {
    "older": "runs that began before their protocol was committed",
    "lacking": "runs whose commit does not hold their protocol",
    "changed": "what of the protocol changed after the first run began",
    "dirty": "runs of a work tree with changes that were not committed",
    "rerun": "runs that were done again, and their first results overwritten",
    "added": "runs that the protocol did not name when the first run began",
    "missing": "runs that the protocol named and that are not here",
    "lost": "runs whose files were lost before they were stored",
    "order": "seeds with a run that began after the last run of a seed that is later in the protocol",
    "hardware": "seeds whose runs were not all made on the same processor, graphics card, Python and PyTorch",
}
HARDWARE = ("processor", "gpu", "python", "torch")  # of a run's environment
HEAD = """# Where the results come from

Written by `marlhf study --audit` from the files and git's history alone. A protocol is committed before its first run;
if a study departs from this, was changed, run again or extended, the facts are listed below, each with a note. A
protocol has the commit of its first version. "Begun" is when the training of a run began, "commits" are those that its
runs were made from. All times are UTC.
"""


def write_page(root: Path) -> str:
    """Write the page of all studies to `docs/`. Returns it. Raises `InputError` for a fact without a note."""
    notes = yaml.safe_load((root / RESULTS / "history.yaml").read_text(encoding="utf-8"))
    rows = audit(root, notes)
    text = page(rows, notes)
    (root / PAGE).write_text(text, encoding="utf-8")
    facts = {f"{row['study']}: {fact}" for row in rows for fact in row["facts"]}
    if faults := sorted(
        facts ^ {f"{study}: {fact}" for study, explained in notes.items() for fact in explained}
    ):
        raise InputError(
            f"{RESULTS}/history.yaml: {'; '.join(faults)}: each fact needs a note, each note a fact"
        )
    return text


def page(rows: Sequence[Mapping], notes: Mapping[str, Mapping]) -> str:
    """The table of all studies, and their facts with notes, in Markdown."""
    heads = ["study", "protocol committed", "runs", "begun", "commits", "facts"]
    cells = [
        [*(str(cell) for cell in list(row.values())[:-1]), ", ".join(row["facts"]) or "–"]
        for row in rows
    ]
    text = [HEAD + "\n" + markdown(heads, cells)]
    for row in (row for row in rows if row["facts"]):
        explained = notes.get(row["study"], {})
        lines = [
            f"* *{fact}*, {FACTS[fact]}: {what}. {explained.get(fact, '')}"
            for fact, what in row["facts"].items()
        ]
        text.append("\n".join([f"## {row['study']}\n", *lines]))
    return "\n\n".join(text) + "\n"


def audit(root: Path, notes: Mapping[str, Mapping]) -> list[dict]:
    """Return a row for each folder of results: study, protocol, runs, begun, commits, facts (name -> finding).

    Lost runs left no file, so only this fact comes from the notes.
    """
    stored, here = _stored(root)
    folders: dict[Path, dict] = {}
    for path in sorted(here):
        folders.setdefault(path.parent, {})[path.name] = stored[path]
    rows = []
    for folder, runs in folders.items():
        row = _row(root, str(folder.relative_to(root / RESULTS)), runs)
        if "lost" in notes.get(row["study"], {}):
            row["facts"]["lost"] = "told by the note alone"
        rows.append(row)
    return rows


def _row(root: Path, study: str, stored: Mapping[str, Sequence[Mapping]]) -> dict:
    """`stored`: name of a run -> environments of its result's versions, oldest first."""
    name = study.split("/")[0]
    last = {run: versions[-1] for run, versions in stored.items()}
    begun = sorted(run["date"] for run in last.values())
    facts = {
        "dirty": _share(stored, lambda runs: runs[-1]["git_dirty"]),
        "rerun": _share(stored, lambda runs: len({run["date"] for run in runs}) > 1),
    }
    protocol = STUDIES.relative_to(Path(__file__).parents[2]) / f"{name}.yaml"
    versions = _versions(root, protocol)
    fixed = "none"
    if versions:
        first_date, first_commit = versions[0][0], versions[0][1]
        fixed = f"{_short(first_date)}, {first_commit[:7]}"
        facts |= facts_of_protocol(root, versions, stored, is_whole_study=study == name)
    return {
        "study": study,
        "protocol": fixed,
        "runs": len(last),
        "begun": f"{_short(begun[0])} – {_short(begun[-1])}",
        "commits": ", ".join(sorted({str(run["git_commit"])[:7] for run in last.values()})),
        "facts": {fact: facts[fact] for fact in FACTS if facts.get(fact)},
    }


def facts_of_protocol(
    root: Path,
    versions: Sequence[tuple[str, str, str, str]],
    stored: Mapping[str, Sequence[Mapping]],
    is_whole_study: bool,
) -> dict[str, str]:
    """Return the facts that compare runs with their protocol; `versions`: see `_versions`.

    A folder below that of the study holds some of its runs, so none of them is missing there.
    """
    dates, _, paths, texts = zip(*versions, strict=True)
    last = {run: environments[-1] for run, environments in stored.items()}
    first_run = min(run["date"] for environments in stored.values() for run in environments)
    versions_before_first_run = sum(date <= first_run for date in dates)
    then = yaml.safe_load(texts[max(versions_before_first_run - 1, 0)])
    planned = set()
    for name, method in then["methods"].items():
        for seed in method.get("seeds", then["seeds"]):
            planned.add(run_name(name, seed))
    commits = {run["git_commit"] for run in last.values()}
    holding = {commit for commit in commits if _holds(root, commit, paths)}
    return {
        "older": _share(stored, lambda runs: runs[-1]["date"] < dates[0]),
        "lacking": _share(stored, lambda runs: runs[-1]["git_commit"] not in holding),
        "changed": _changes(dates, texts, first_run),
        "added": _listing(set(last) - planned),
        "missing": _listing(planned - set(last)) if is_whole_study else "",
        "order": _late(then["seeds"], last),
        "hardware": _mixed(last),
    }


def _share(stored: Mapping, has: Callable[[Sequence], bool]) -> str:
    count = sum(bool(has(versions)) for versions in stored.values())
    return f"{count} of {len(stored)}" if count else ""


def _listing(runs: Iterable[str]) -> str:
    """Methods, and how many runs of each, as `E1 (5)`."""
    counts = Counter(run.rsplit("-seed")[0] for run in sorted(runs))
    return ", ".join(f"{name} ({n})" for name, n in counts.items())


def _late(seeds: Sequence[int], last: Mapping[str, Mapping]) -> str:
    """The seeds with a run that began after the last run of a seed that is later in the protocol."""
    ends = {seed: max(run["date"] for run in runs) for seed, runs in _by_seed(last).items()}
    in_order = [seed for seed in seeds if seed in ends]
    late = []
    for place, seed in enumerate(in_order):
        if any(ends[later] < ends[seed] for later in in_order[place + 1 :]):
            late.append(seed)
    return ", ".join(map(str, late))


def _mixed(last: Mapping[str, Mapping]) -> str:
    """The seeds whose runs differ in what a seed's random numbers depend on; older records lack some of it."""
    mixed = []
    for seed, runs in sorted(_by_seed(last).items()):
        kinds = {tuple(run.get(key) for key in HARDWARE) for run in runs}
        if len(kinds) > 1:
            mixed.append(str(seed))
    return ", ".join(mixed)


def _by_seed(last: Mapping[str, Mapping]) -> dict[int, list[Mapping]]:
    found: dict[int, list[Mapping]] = {}
    for name, run in last.items():
        found.setdefault(int(name.rsplit("-seed")[1]), []).append(run)
    return found


def _changes(dates: Sequence[str], texts: Sequence[str], first: str) -> str:
    """What changed in each version after the first run began: its text (comments), or keys such as methods."""
    versions = []
    for text in texts:
        comments = " ".join(re.findall("^#.*", text, re.M))
        versions.append(yaml.safe_load(text) | {"text": re.findall(r"[^\s#]+", comments)})
    changes = []
    for date, before, after in zip(dates[1:], versions[:-1], versions[1:], strict=True):
        both = dict.fromkeys([*before, *after])
        keys = [key for key in both if before.get(key) != after.get(key)]
        if date > first and keys:
            changes.append(f"{', '.join(keys)} ({_short(date)})")
    return "; ".join(changes)


def _short(date: str) -> str:
    return date[:16].replace("T", " ")


# Git


def _git(root: Path, *arguments: str, stdin: str = "") -> bytes:
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    answer = subprocess.run(command, check=False, capture_output=True, input=stdin.encode())
    if answer.returncode:
        reason = answer.stderr.decode().strip()
        raise InputError(
            f"--audit: git {arguments[0]}: {reason}: run it in a clone with all its history"
        )
    return answer.stdout


def _versions(root: Path, path: Path) -> list[tuple[str, str, str, str]]:
    """(Date, commit, path, text) of a file's versions, oldest first, through renames; none if never committed."""
    versions = []
    log = _git(
        root, "log", "--follow", "--name-status", "--format=%x00%H %aI", "--", str(path)
    ).decode()
    for entry in log.split("\0")[1:]:
        (commit, date), (status, *paths) = (line.split() for line in entry.strip().split("\n\n"))
        utc = (
            datetime.datetime.fromisoformat(date)
            .astimezone(datetime.UTC)
            .isoformat(timespec="seconds")
        )
        versions.append(
            (utc, commit, paths[-1], _git(root, "show", f"{commit}:{paths[-1]}").decode())
        )
        # git would continue with the file that it was copied from
        if status.startswith(("A", "C")):
            break
    return versions[::-1]


def _holds(root: Path, commit: str, paths: Sequence[str]) -> bool:
    return b" blob " in _git(
        root, "cat-file", "--batch-check", stdin="".join(f"{commit}:{p}\n" for p in set(paths))
    )


def _stored(root: Path) -> tuple[dict[Path, list[dict]], set[Path]]:
    """Folder / name of a run -> environments of its versions in history, oldest first, and of its file; those here.

    A run that is in a separate file and later in one of the whole study has the same environment in both.
    """
    log = _git(
        root, "log", "--reverse", "--raw", "--no-abbrev", "--no-renames", "--format=", "--", RESULTS
    ).decode()
    written = [line for line in log.splitlines() if re.search(WRITTEN, line)]
    blobs = [(line.split()[3], line.split("\t")[1]) for line in written]
    texts = _contents(root, [blob for blob, _ in blobs])
    pairs = [(root / path, text) for (_, path), text in zip(blobs, texts, strict=True)]
    folders = sorted(path for path in (root / RESULTS).rglob("*") if path.is_dir())
    files = [(path, path.read_bytes()) for folder in folders for path in result_files(folder)]
    stored: dict[Path, list[dict]] = {}
    for path, content in pairs + files:
        for name, result in parse_results(path.name, content).items():
            stored.setdefault(path.parent / name, []).append(result["environment"])
    here = {
        path.parent / name for path, content in files for name in parse_results(path.name, content)
    }
    return stored, here


def _contents(root: Path, blobs: Sequence[str]) -> list[bytes]:
    answer = io.BytesIO(_git(root, "cat-file", "--batch", stdin="\n".join(blobs)))
    return [answer.read(int(answer.readline().split()[2]) + 1)[:-1] for _ in blobs]
