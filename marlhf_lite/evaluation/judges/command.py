"""`marlhf judge`: stored answers of two methods in, verdicts and their counts out."""

from __future__ import annotations

from pathlib import Path

from marlhf_lite.config.options import DataConfig, EndpointConfig, InputConfig, JudgeConfig, ModelConfig
from marlhf_lite.evaluation.agreement import win_rate
from marlhf_lite.evaluation.compare import read_answers
from marlhf_lite.evaluation.judges.asking import judge_pairs
from marlhf_lite.evaluation.judges.counts import combine, summary
from marlhf_lite.evaluation.judges.criteria import CRITERIA
from marlhf_lite.evaluation.judges.endpoint import EndpointJudge
from marlhf_lite.evaluation.judges.human import HumanJudge, printable
from marlhf_lite.evaluation.judges.judge import Judge
from marlhf_lite.evaluation.judges.pairs import Verdict, draw_pairs, make_pairs
from marlhf_lite.evaluation.judges.store import file_name
from marlhf_lite.evaluation.responses import first_samples
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.jsonl import write_json
from marlhf_lite.utils.run_folder import check_writable

_FEW = 20  # rows of a task whose scorer alone is wanted
_LONG = 200  # characters of a verdict that is none


def run_judge(
    options: JudgeConfig,
    endpoint: EndpointConfig,
    *,
    seed: int = 0,
    model: ModelConfig | None = None,
    data: DataConfig | None = None,
    inputs: InputConfig | None = None,
) -> tuple[list[Verdict], dict]:
    """Judges what the options name, writes the counts beside the verdicts, if there are any, and prints them.

    `model`, `data` and `inputs` are for the judges gold, rm and local. All but the answers is loaded after these have
    been checked, and nothing is paid for before everything has been checked.

    Returns `(verdicts, counts)`; see `judge_pairs` and `summary`, to which the counts add `win_rate`, an interval.
    Raises `InputError` as they do.
    """
    methods = [name.strip() for name in options.judge_methods.split(",") if name.strip()]
    if len(methods) != 2:
        raise InputError(f"--judge_methods {options.judge_methods!r}: give two names, such as MA-PPO,PPO")
    pairs = draw_pairs(make_pairs(find_answers(options.judge_answers), *methods), options.judge_size, seed)
    folder = Path(options.judge_folder).expanduser()
    check_writable("--judge_folder", folder)
    judge = make_judge(options, endpoint, model or ModelConfig(), data or DataConfig(), inputs or InputConfig())
    verdicts = judge_pairs(judge, pairs, folder, options.judge_order, seed)
    counts = summary(verdicts) | {"criteria": judge.criteria, "order": options.judge_order, "seed": seed}
    if counts["judged"]:
        counts["win_rate"] = win_rate([verdict.winner for verdict in combine(verdicts)]).rate._asdict()
    if verdicts:  # what an earlier sitting counted stays
        name = "-".join(map(file_name, (judge.name, methods[0], "against", methods[1])))
        write_json(folder / f"{name}.json", counts)
        print(report(counts, verdicts))
    if counts["pairs"] < len(pairs):
        print(f"{judge.name}: {counts['pairs']} of {len(pairs)} pairs so far: the same command goes on")
    return verdicts, counts


def find_answers(places: str) -> list[dict]:
    """Rows of folders and files, comma-separated: the first answer of each method to each prompt; see `read_answers`.

    Methods are named with their temperature where there are several. Raises `InputError` for a place without answers.
    """
    names = [part.strip() for part in places.split(",") if part.strip()]
    if not names:
        raise InputError("--judge_answers: not given: name folders that `marlhf evaluate` wrote, or files of answers")
    return first_samples([row for name in names for row in read_answers(name)])


def make_judge(
    options: JudgeConfig, endpoint: EndpointConfig, model: ModelConfig, data: DataConfig, inputs: InputConfig
) -> Judge:
    """The judge that `--judge` names. Raises `InputError` where it lacks something."""
    criteria = CRITERIA[options.judge_criteria]
    kind = "human" if options.human else options.judge
    if kind == "human":
        return HumanJudge(options.annotator, criteria)
    if kind == "endpoint":
        return EndpointJudge(endpoint, criteria)
    return {"gold": _gold, "rm": _rm, "local": _local}[kind](options, model, data, inputs)


def _gold(options: JudgeConfig, model: ModelConfig, data: DataConfig, inputs: InputConfig) -> Judge:
    from marlhf_lite.evaluation.judges.scorers import ScoreJudge
    from marlhf_lite.tasks.loading import load_task
    from marlhf_lite.tasks.tiny_tldr.corpus import EMBEDDED

    gold = load_task(data.dataset, size=_FEW).gold if data.dataset in EMBEDDED else None
    if gold is None:
        raise InputError(f"--judge gold: {data.dataset} has no known truth: take another judge")
    return ScoreJudge(gold, "gold", options.judge_tie_margin)


def _rm(options: JudgeConfig, model: ModelConfig, data: DataConfig, inputs: InputConfig) -> Judge:
    from marlhf_lite.evaluation.judges.scorers import reward_judge
    from marlhf_lite.models.actor_critic import ScalarHeadModel
    from marlhf_lite.models.adapters import adapter
    from marlhf_lite.models.loading import load_base, load_score_model, load_tokenizer
    from marlhf_lite.training.rewards import ModelReward

    folder = adapter("rm", inputs.rm)
    reward = ModelReward(ScalarHeadModel(load_score_model(load_base(model), folder)))
    tokenizer, size = load_tokenizer(model.model), options.judge_batch_size
    return reward_judge(reward, tokenizer, data.max_response_length, options.judge_tie_margin, size)


def _local(options: JudgeConfig, model: ModelConfig, data: DataConfig, inputs: InputConfig) -> Judge:
    from marlhf_lite.evaluation.judges.local import LocalJudge
    from marlhf_lite.models.loading import load_base, load_tokenizer

    name = f"local-{Path(model.model).name}"
    criteria = CRITERIA[options.judge_criteria]
    return LocalJudge(load_base(model), load_tokenizer(model.model), criteria, name, options.judge_batch_size)


def report(counts: dict, verdicts: list[Verdict]) -> str:
    """The counts in a few lines, and why verdicts are missing."""
    first, second = counts["methods"]
    lines = [
        f"{counts['judge']}: {first} against {second}, {counts['pairs']} pairs: {counts['win']} won, "
        f"{counts['lose']} lost, {counts['tie']} ties, {counts['malformed']} malformed, {counts['skipped']} skipped"
    ]
    if "win_rate" in counts:
        rate = counts["win_rate"]
        lines.append(
            f"win rate, ties as half: {rate['mean']:.0%}, 95 % interval {rate['low']:.0%} to {rate['high']:.0%}"
        )
    place = counts["position"]
    if place["decided"]:
        lines.append(f"the response shown first won {place['first_shown_share']:.0%} of {place['decided']} decisions")
    if place["both_orders"]:
        lines.append(f"both orders agree on {place['consistency']:.0%} of {place['both_orders']} pairs")
    if counts["prompt_tokens"]:
        cost = f", cost {counts['cost']:.4g}" if counts["cost"] else ""
        used = f"{counts['prompt_tokens']} of prompts, {counts['completion_tokens']} of verdicts{cost}"
        lines.append(f"tokens, of stored verdicts too: {used}")
    for word in ("skipped", "malformed"):
        said = dict.fromkeys(printable(" ".join(v.raw.split())) for v in verdicts if v.winner == word and v.raw)
        lines += [f"{word}: {text if len(text) <= _LONG else text[:_LONG] + '...'}" for text in list(said)[:3]]
    return "\n".join(lines)
