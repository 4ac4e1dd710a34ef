"""Two or more sets of stored answers to the same prompts, side by side: `marlhf compare A B ...`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from marlhf_lite.evaluation.agreement import wilson
from marlhf_lite.evaluation.responses import SETTINGS, check_rows, label, matrix, prompt_ids, sample_means
from marlhf_lite.evaluation.scores import table
from marlhf_lite.evaluation.statistics import paired_bootstrap
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.jsonl import read_lines
from marlhf_lite.utils.run_folder import SAMPLES

SCORES = ("rm_score", "gold")
NUMBERS = (*SCORES, "kl", "tokens", "ended")
COLUMNS = {
    "method": "answers",
    "prompts": "prompts",
    "samples": "samples",
    "rm_score": "RM score",
    "rm_score_wins": "wins by RM score",
    "gold": "gold score",
    "gold_wins": "wins by gold score",
    "kl": "KL (nats)",
    "tokens": "tokens",
    "ended": "share with EOS",
}


def read_answers(path: str | Path) -> list[dict]:
    """The responses in a file of answers, in a result folder (samples.jsonl), or in a folder of stored responses.

    Rows get an `id`, from their prompt, where they have none. Raises `InputError` where there are no answers, a row is
    none, a score is no finite number, or a response is there twice.
    """
    path = Path(path).expanduser()
    files = [path] if path.is_file() else _files(path)
    rows = []
    for file in files:
        found = read_lines(file)
        check_rows(found, str(file))
        _check_numbers(found, str(file))
        rows += [row | {"method": _bare(row)} for row in found]
    if not rows:
        what = "no answers in it" if path.exists() else "no such file or folder"
        raise InputError(f"{path}: {what}: give a folder that `marlhf evaluate` wrote, or its {SAMPLES}")
    _name_prompts(rows)
    check_rows(rows, str(path))  # over all files
    return rows


def _files(folder: Path) -> list[Path]:
    if (folder / SAMPLES).is_file():
        return [folder / SAMPLES]
    stores = sorted(folder.glob(f"*/{SETTINGS}")) or sorted(folder.glob(f"*/*/{SETTINGS}"))
    return [path.with_name(SAMPLES) for path in stores]


def _check_numbers(rows: Sequence[Mapping], source: str) -> None:
    for number, row in enumerate(rows, 1):
        for name in NUMBERS:
            value = row.get(name)
            if value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
                raise InputError(
                    f"{source}, row {number}: {name} {value!r} is no finite number: mend it or leave it out"
                )


def _bare(row: Mapping) -> str:
    """The method without the temperature that a run's samples.jsonl has put behind it: `label` puts it there again."""
    return str(row["method"]).removesuffix(f" T={row.get('temperature')}")


def _name_prompts(rows: Sequence[dict]) -> None:
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        if row.get("id") is None:
            groups.setdefault((row["method"], row.get("temperature"), row.get("sample", 0)), []).append(row)
    for group in groups.values():
        for row, name in zip(group, prompt_ids([row["prompt"] for row in group]), strict=True):
            row["id"] = name


def compare(paths: Sequence[str | Path], baseline: str = "", level: float = 0.95) -> list[dict]:
    """All methods in these files or folders against one of them, paired by prompt.

    Methods that stand in several are told apart as "path: method". Several samples of a prompt count by their mean.

    Args:
        paths: two or more, or one that holds several methods; see `read_answers`.
        baseline: a method; by default SFT, else the first.
        level: of the intervals.

    Returns:
        For each method: prompts, samples, means of rm_score, gold, kl (nats), tokens and ended; and against the
        `baseline` <score>_gain (bootstrap over prompts) and <score>_wins, the share of prompts where the method scores
        higher, ties as half (Wilson interval). `comparison_table` makes a table of it.

    Raises:
        InputError: fewer than two methods, different prompts, scores of different reward models, no such baseline, or
            as `read_answers`.
    """
    entries = _entries({str(path): read_answers(path) for path in dict.fromkeys(map(str, paths))})
    if len(entries) < 2:
        raise InputError(f"compare: one set of answers, {', '.join(entries)}: give two or more")
    if baseline and baseline not in entries:
        raise InputError(f"--baseline {baseline}: no such answers; there are: {', '.join(entries)}")
    base = baseline or ("SFT" if "SFT" in entries else next(iter(entries)))
    for name in entries:
        _check_alike(base, entries[base], name, entries[name])
    return [
        {"baseline": base} | _summary(name, rows, None if name == base else entries[base], level)
        for name, rows in entries.items()
    ]


def comparison_table(summary: Sequence[dict]) -> str:
    """The comparison as a Markdown table: behind scores the gain over the baseline with its interval."""
    return table(summary, COLUMNS)


def _entries(sources: Mapping[str, list[dict]]) -> dict[str, list[dict]]:
    """Name to rows, by source and method."""
    found: dict[tuple[str, str], list[dict]] = {}
    for source, rows in sources.items():
        several = len({row.get("temperature") for row in rows}) > 1
        for row in rows:
            found.setdefault((source, label(row, several)), []).append(row)
    count = Counter(name for _, name in found)
    return {name if count[name] == 1 else f"{source}: {name}": rows for (source, name), rows in found.items()}


def _check_alike(base: str, ours: Sequence[dict], name: str, theirs: Sequence[dict]) -> None:
    prompts, others = ({row["id"]: row["prompt"] for row in rows} for rows in (ours, theirs))
    for a, b, one, other in ((base, name, prompts, others), (name, base, others, prompts)):
        gone = [text for key, text in one.items() if other.get(key) != text]
        if gone:
            words = " ".join(gone[0].split())[:60]
            raise InputError(f"{b} lacks {len(gone)} of {a}'s prompts, such as {words!r}: answer the same prompts")
    marks = [{row.get("rm") for row in rows if row.get("rm_score") is not None} for rows in (ours, theirs)]
    if all(marks) and len(set.union(*marks) - {None}) > 1:
        raise InputError(f"{base} and {name}: scored by different reward models: evaluate both with the same --rm")


def _summary(name: str, rows: Sequence[dict], base: Sequence[dict] | None, level: float) -> dict:
    means = sample_means(rows)
    out = {"method": name, "prompts": len(means), "samples": len(rows) // len(means)}
    for column in NUMBERS:
        if all(row.get(column) is not None for row in means):
            out[column] = float(np.mean([row[column] for row in means]))
    for score in SCORES:
        if base is not None and score in out and all(row.get(score) is not None for row in base):
            out |= _against(score, rows, base, level)
    return out


def _against(score: str, rows: Sequence[dict], base: Sequence[dict], level: float) -> dict:
    ids, ours = matrix(rows, score)
    others, theirs = matrix(base, score)
    place = {name: i for i, name in enumerate(others)}
    theirs = theirs[[place[name] for name in ids]]
    wins = (np.sign(ours[:, :, None] - theirs[:, None, :]) / 2 + 0.5).mean((1, 2))
    gain = paired_bootstrap(ours.mean(1), theirs.mean(1), level)
    return {f"{score}_gain": gain._asdict(), f"{score}_wins": wilson(float(wins.sum()), len(wins), level)._asdict()}
