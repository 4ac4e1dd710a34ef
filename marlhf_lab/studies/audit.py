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

RESULTS = "data/results"
PAGE = "docs/provenance.md"
# A line of git's log that says that a file with results was added (A) or modified (M).
WRITTEN = rf"[AM]\t.*(-seed\d+\.json(\.gz)?|/{re.escape(JOINED)})$"
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
    """Write the page of all studies to `docs/`, and return it.

    Raises `InputError` for a fact without a note and for a note without a fact.
    """
    notes = yaml.safe_load((root / RESULTS / "history.yaml").read_text(encoding="utf-8"))
    rows = audit(root, notes)
    text = page(rows, notes)
    (root / PAGE).write_text(text, encoding="utf-8")
    facts = set()
    for row in rows:
        facts |= {f"{row['study']}: {fact}" for fact in row["facts"]}
    noted = set()
    for study, explained in notes.items():
        noted |= {f"{study}: {fact}" for fact in explained}
    faults = sorted(facts ^ noted)  # what is in one of the sets alone
    if faults:
        raise InputError(
            f"{RESULTS}/history.yaml: {'; '.join(faults)}: each fact needs a note, each note a fact"
        )
    return text


def page(rows: Sequence[Mapping], notes: Mapping[str, Mapping]) -> str:
    """The table of all studies, and their facts with notes, in Markdown."""
    heads = ["study", "protocol committed", "runs", "begun", "commits", "facts"]
    lines = []
    for row in rows:
        cells = [str(row[key]) for key in ("study", "protocol", "runs", "begun", "commits")]
        lines.append([*cells, ", ".join(row["facts"]) or "–"])
    parts = [HEAD + "\n" + markdown(heads, lines)]
    for row in rows:
        if not row["facts"]:
            continue
        explained = notes.get(row["study"], {})
        lines = [f"## {row['study']}\n"]
        for fact, finding in row["facts"].items():
            lines.append(f"* *{fact}*, {FACTS[fact]}: {finding}. {explained.get(fact, '')}")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def audit(root: Path, notes: Mapping[str, Mapping]) -> list[dict]:
    """Return a row for each folder of results: study, protocol, runs, begun, commits, facts (name -> finding).

    That runs were lost is the one fact that only the notes tell, because lost runs left no file.
    """
    environments, runs_here = _stored(root)
    folders: dict[Path, dict] = {}  # folder -> name of a run -> its environments
    for path in sorted(runs_here):
        folders.setdefault(path.parent, {})[path.name] = environments[path]
    rows = []
    for folder, runs in folders.items():
        row = _row(root, str(folder.relative_to(root / RESULTS)), runs)
        if "lost" in notes.get(row["study"], {}):
            row["facts"]["lost"] = "told by the note alone"
        rows.append(row)
    return rows


def _row(root: Path, study: str, stored: Mapping[str, Sequence[Mapping]]) -> dict:
    """Return the row of a folder of results, see `audit`.

    study: the folder, such as `main`, or a folder in it; stored: name of a run in it -> environments of the versions of
    its result, oldest first.
    """
    name = study.split("/")[0]
    last = {run: environments[-1] for run, environments in stored.items()}
    begun = sorted(run["date"] for run in last.values())
    facts = {
        "dirty": _count(stored, lambda environments: environments[-1]["git_dirty"]),
        "rerun": _count(
            stored, lambda environments: len({env["date"] for env in environments}) > 1
        ),
    }
    # As a path in the repository at `root`, which may be another one than that of this file.
    protocol = STUDIES.relative_to(Path(__file__).parents[2]) / f"{name}.yaml"
    versions = _versions(root, protocol)
    fixed = "none"
    if versions:
        first_date, first_commit, _, _ = versions[0]
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
    """Return the facts that compare runs with their protocol; a fact that does not hold is an empty text.

    Args:
        root: the repository.
        versions: the versions of the protocol, at least one, see `_versions`.
        stored: name of a run -> environments of the versions of its result, oldest first.
        is_whole_study: whether the runs are those of the study's own folder. A folder in it holds only some of the
            runs, so there none counts as missing.
    """
    dates, _, paths, texts = zip(*versions, strict=True)
    last = {run: environments[-1] for run, environments in stored.items()}
    # 1. What the protocol named when the first run began.
    dates_of_runs = []
    for environments in stored.values():
        dates_of_runs += [run["date"] for run in environments]
    first_run = min(dates_of_runs)
    # The last version before the first run. If there is none, the first version that was committed at all.
    versions_before_first_run = sum(date <= first_run for date in dates)
    then = yaml.safe_load(texts[max(versions_before_first_run - 1, 0)])
    planned = set()
    for name, method in then["methods"].items():
        for seed in method.get(
            "seeds", then["seeds"]
        ):  # earlier protocols gave a method fewer seeds
            planned.add(run_name(name, seed))
    # 2. The commits that runs were made from and that hold the protocol.
    commits = {run["git_commit"] for run in last.values()}
    holding = {commit for commit in commits if _holds(root, commit, paths)}
    return {
        "older": _count(stored, lambda environments: environments[-1]["date"] < dates[0]),
        "lacking": _count(
            stored, lambda environments: environments[-1]["git_commit"] not in holding
        ),
        "changed": _changes(dates, texts, first_run),
        "added": _listing(set(last) - planned),
        "missing": _listing(planned - set(last)) if is_whole_study else "",
        "order": _late(then["seeds"], last),
        "hardware": _mixed(last),
    }


def _count(stored: Mapping, has: Callable[[Sequence], bool]) -> str:
    """How many runs have something, as `3 of 24`; empty if none has.

    `has` gets the environments of a run, oldest first, and tells whether the run has it.
    """
    count = sum(bool(has(environments)) for environments in stored.values())
    return f"{count} of {len(stored)}" if count else ""


def _listing(runs: Iterable[str]) -> str:
    """The methods of these runs, with the number of runs of each, as `E1 (5)`; `runs` are their names."""
    counts = Counter(run.rsplit("-seed")[0] for run in sorted(runs))
    return ", ".join(f"{name} ({n})" for name, n in counts.items())


def _late(seeds: Sequence[int], last: Mapping[str, Mapping]) -> str:
    """The seeds with a run that began after the last run of a seed that is later in the protocol.

    seeds: in the protocol's order; last: name of a run -> its environment.
    """
    # seed -> when its last run began
    last_begin = {seed: max(run["date"] for run in runs) for seed, runs in _by_seed(last).items()}
    in_order = [seed for seed in seeds if seed in last_begin]
    late = []
    for place, seed in enumerate(in_order):
        if any(last_begin[later] < last_begin[seed] for later in in_order[place + 1 :]):
            late.append(str(seed))
    return ", ".join(late)


def _mixed(last: Mapping[str, Mapping]) -> str:
    """The seeds whose runs differ in `HARDWARE`, which random numbers of a seed depend on.

    What an older record lacks counts as None.
    """
    mixed = []
    for seed, runs in sorted(_by_seed(last).items()):
        kinds = {tuple(run.get(key) for key in HARDWARE) for run in runs}
        if len(kinds) > 1:
            mixed.append(str(seed))
    return ", ".join(mixed)


def _by_seed(last: Mapping[str, Mapping]) -> dict[int, list[Mapping]]:
    """Seed -> environments of its runs. The seed is read from the end of a run's name."""
    found: dict[int, list[Mapping]] = {}
    for name, run in last.items():
        found.setdefault(int(name.rsplit("-seed")[1]), []).append(run)
    return found


def _changes(dates: Sequence[str], texts: Sequence[str], first_run: str) -> str:
    """What each version changed that was committed after the first run began, as `methods, text (date)`.

    Keys of the protocol are named by themselves, and its comments as "text".
    """
    protocols = []
    for text in texts:
        # Comments are compared word by word, so that a line that is wrapped anew is no change.
        comments = " ".join(re.findall("^#.*", text, re.M))
        protocols.append(yaml.safe_load(text) | {"text": re.findall(r"[^\s#]+", comments)})
    changes = []
    for date, before, after in zip(dates[1:], protocols[:-1], protocols[1:], strict=True):
        keys_of_both = dict.fromkeys([*before, *after])
        keys = [key for key in keys_of_both if before.get(key) != after.get(key)]
        if date > first_run and keys:
            changes.append(f"{', '.join(keys)} ({_short(date)})")
    return "; ".join(changes)


def _short(date: str) -> str:
    return date[:16].replace("T", " ")


# Git


def _git(root: Path, *arguments: str, stdin: str = "") -> bytes:
    """What git prints. Raises `InputError` if it fails, as it does without the history."""
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    answer = subprocess.run(command, check=False, capture_output=True, input=stdin.encode())
    if answer.returncode:
        reason = answer.stderr.decode().strip()
        raise InputError(
            f"--audit: git {arguments[0]}: {reason}: run it in a clone with all its history"
        )
    return answer.stdout


def _versions(root: Path, path: Path) -> list[tuple[str, str, str, str]]:
    """(Date, commit, path, text) of each committed version of a file, oldest first, also under its former names."""
    # An entry: a line with commit and date, an empty line, and a line with status and path (two paths for a rename).
    # \0, which git writes for %x00, begins each entry.
    log = _git(
        root, "log", "--follow", "--name-status", "--format=%x00%H %aI", "--", str(path)
    ).decode()
    newest_first = []
    for entry in log.split("\0")[1:]:
        head, change = entry.strip().split("\n\n")
        commit, date = head.split()
        status, *paths = change.split()
        name_then = paths[-1]  # of a rename, the new name
        utc = datetime.datetime.fromisoformat(date).astimezone(datetime.UTC)
        text = _git(root, "show", f"{commit}:{name_then}").decode()
        newest_first.append((utc.isoformat(timespec="seconds"), commit, name_then, text))
        # The file was added or copied here: git would continue with the file that it was copied from.
        if status.startswith(("A", "C")):
            break
    return newest_first[::-1]


def _holds(root: Path, commit: str, paths: Sequence[str]) -> bool:
    """Whether a commit has a file at one of these paths."""
    # git answers each line; of a file it says that it is a blob.
    questions = "".join(f"{commit}:{path}\n" for path in set(paths))
    return b" blob " in _git(root, "cat-file", "--batch-check", stdin=questions)


def _stored(root: Path) -> tuple[dict[Path, list[dict]], set[Path]]:
    """Return the environments of all versions of each run, and the runs that have a result now.

    A run is written as folder / name. Its environments are those of its results in git's history, oldest first, and
    then that of its file now. One of them may be there several times: in the run's own file, and later in the file of
    the whole study.
    """
    # 1. Every version of a results file that history has, oldest first.
    log = _git(
        root, "log", "--reverse", "--raw", "--no-abbrev", "--no-renames", "--format=", "--", RESULTS
    ).decode()
    blobs = []
    paths = []
    for line in log.splitlines():
        if re.search(WRITTEN, line):
            change, path = line.split("\t")
            # Modes and blobs before and after the change, and a status; a blob is the content of a file.
            _, _, _, blob_after, _ = change.split()
            blobs.append(blob_after)
            paths.append(root / path)
    in_history = list(zip(paths, _contents(root, blobs), strict=True))
    # 2. The files that are there now.
    folders = sorted(path for path in (root / RESULTS).rglob("*") if path.is_dir())
    in_files = []
    for folder in folders:
        in_files += [(path, path.read_bytes()) for path in result_files(folder)]
    # 3. The environments of the runs in both.
    environments: dict[Path, list[dict]] = {}
    for path, content in in_history + in_files:
        for name, result in parse_results(path.name, content).items():
            environments.setdefault(path.parent / name, []).append(result["environment"])
    runs_here = set()
    for path, content in in_files:
        runs_here |= {path.parent / name for name in parse_results(path.name, content)}
    return environments, runs_here


def _contents(root: Path, blobs: Sequence[str]) -> list[bytes]:
    """The contents of these blobs, in their order."""
    # For each blob git prints a line with its name, kind and size, then its content and a line break.
    answer = io.BytesIO(_git(root, "cat-file", "--batch", stdin="\n".join(blobs)))
    contents = []
    for _ in blobs:
        _, _, size = answer.readline().split()
        contents.append(answer.read(int(size)))
        answer.read(1)  # the line break
    return contents
