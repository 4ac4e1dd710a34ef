"""The command `marlhf judge`: a judge compares the stored answers of two methods."""

import random
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from marlhf_lite.config.commands import JudgeCommand
from marlhf_lite.evaluation.responses import read_responses
from marlhf_lite.evaluation.scores import name_temperatures, to_records
from marlhf_lite.evaluation.statistics import win_rate
from marlhf_lite.extras.judges.judges import EndpointJudge
from marlhf_lite.extras.judges.judgments import check_verdicts, combine, file_name, judge_pairs, make_pairs, summary
from marlhf_lite.extras.judges.prompts import CRITERIA
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.jsonl import write_json
from marlhf_lite.utils.printable import printable
from marlhf_lite.utils.run_folder import CONFIG, RunFolder, RunLock, check_writable, split_paths


def run_judge(options: JudgeCommand) -> tuple[list[dict], dict]:
    """Judge the answers that the options name, and print the counts.

    Return the rows of `judge_pairs` and the counts of `summary` with `win_rate`, an interval; the counts are also
    written beside the judgments. Options and answers are checked before the first request.
    """
    names = [name.strip() for name in options.judge_methods.split(",") if name.strip()]
    if len(names) != 2 or names[0] == names[1]:
        raise InputError(f"--judge_methods {options.judge_methods!r}: give two names, such as MA-PPO,PPO")
    rows, first, second = find_answers(options.judge_answers, *names)
    pairs = make_pairs(rows, first, second)
    drawn = random.Random(options.seed).sample(range(len(pairs)), min(options.size or len(pairs), len(pairs)))
    pairs = [pairs[i] for i in sorted(drawn)]
    folder = Path(options.output_dir or "runs/judging").expanduser()
    check_writable("--output_dir", folder)
    judge = EndpointJudge(options, CRITERIA[options.judge_criteria])
    with RunLock() as lock:
        lock.take(folder)  # two processes would pay for the same pairs
        judgments = judge_pairs(judge, pairs, folder, seed=options.seed)
    counts = summary(judgments) | {"criteria": judge.criteria, "seed": options.seed}
    if counts["judged"]:
        counts["win_rate"] = win_rate([row["winner"] for row in combine(judgments)]).rate._asdict()
    if judgments:  # else the counts of an earlier run stay
        write_json(folder / f"{file_name(f'{judge.name}-{first}-against-{second}')}.json", counts)
        print(f"{report(counts, judgments)}\njudgments: {folder}")
    if counts["pairs"] < len(pairs):
        print(f"{judge.name}: {counts['pairs']} of {len(pairs)} pairs so far: give the same command to continue")
    check_verdicts(judge.name, judgments)
    return judgments, counts


def find_answers(places: str, *methods: str) -> tuple:
    """Return the first answer of every method to each prompt, as rows, and the name of each of `methods` in the rows.

    `places` are folders and files, comma-separated; see `read_responses`. If there are several temperatures, the names
    have them, such as "SFT T=0.4"; a method asked for without a temperature is taken at the training temperature, which
    the evaluation's config holds. Raises `InputError` for a place without answers.
    """
    paths = [Path(part).expanduser() for part in split_paths(places)]
    if not paths:
        raise InputError("--judge_answers: not given: name folders that `marlhf evaluate` wrote, or files of answers")
    answers = pd.concat([read_responses(path) for path in paths], ignore_index=True)
    rows = to_records(name_temperatures(answers[answers["sample"] == 0]))
    folders = [path if path.is_dir() else path.parent for path in paths]
    training = [RunFolder.open(folder).config.get("temperature") for folder in folders if (folder / CONFIG).is_file()]
    there = {row["method"] for row in rows}
    full_names = [next((n for n in (m, *(f"{m} T={t}" for t in training)) if n in there), m) for m in methods]
    return rows, *full_names


def report(counts: Mapping, judgments: Sequence[Mapping]) -> str:
    """Format the counts in a few lines, with reasons for missing judgments."""
    first, second = counts["methods"]
    numbers = ", ".join(f"{counts[name]} {name}" for name in ("win", "lose", "tie", "malformed", "skipped"))
    numbers += f"; {counts['identical']} pairs of the same text were ties without asking" * bool(counts["identical"])
    lines = [f"{counts['judge']}: {first} against {second}, {counts['pairs']} pairs: {numbers}"]
    if rate := counts.get("win_rate"):
        interval = f"95 % interval {rate['low']:.0%} to {rate['high']:.0%}"
        lines.append(f"win rate, ties as half: {rate['mean']:.0%}, {interval}")
    place = counts["position"]
    if place["decided"]:
        lines.append(f"the response shown first won {place['first_shown_share']:.0%} of {place['decided']} decisions")
    for word in ("skipped", "malformed"):
        raw = dict.fromkeys(row["raw"] for row in judgments if row["winner"] == word and row["raw"])
        lines += [f"{word}: {textwrap.shorten(printable(text), 200, placeholder=' ...')}" for text in list(raw)[:3]]
    return "\n".join(lines)
