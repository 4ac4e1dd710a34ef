"""Write tables, summary and figures to a run's folder, and tell what they show."""

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib import pyplot as plt

from marlhf_lite.evaluation.pass_at_k import pass_rates, pass_table
from marlhf_lite.evaluation.scores import (
    HEADINGS,
    OTHER_COLUMNS,
    heading_of,
    name_temperatures,
    score_columns,
    summarise,
    table,
)
from marlhf_lite.evaluation.statistics import few_prompts, final_score, updates_to_reach
from marlhf_lite.plotting import evaluation, training
from marlhf_lite.tasks.splits import Task
from marlhf_lite.utils.jsonl import write_json
from marlhf_lite.utils.run_folder import environment
from marlhf_lite.utils.tables import interval


def run_report(
    path: Path, rows: pd.DataFrame, histories: Mapping[str, Sequence], figures: Path, config: dict
) -> str:
    """Write summary.json and table.md to `path` and figures to `figures`. Returns the table.

    `rows` are the answers of all methods (see `evaluate_checkpoints`), `histories` the metrics of each method that
    trained. The figures are reward curves, score distributions and L2 norms.
    """
    summary = summarise(rows)
    curves = {}
    for name, history in histories.items():
        curves[name] = [row["score_mean"] for row in history]
    if "PPO" in curves:  # after how many updates each method has the score that PPO has at its end
        target = final_score(curves["PPO"])
        for row in summary:
            if row["method"] in curves:
                row["updates_to_ppo"] = updates_to_reach(curves[row["method"]], target)
    columns = ["method", *score_columns(rows), *OTHER_COLUMNS]
    headings = {name: heading_of(name) for name in columns}
    headings |= _headings_of_what_was_trained_on(config)
    text = table(summary, {name: headings[name] for name in columns})
    write_json(
        path / "summary.json", {"methods": summary, "config": config, "environment": environment()}
    )
    (path / "table.md").write_text(text + "\n", encoding="utf-8")
    _save(_run_figures(rows, histories, config), figures)
    return text


# The true score of a task in tables and figures if the policy was trained on it: it is no check then.
TRAINED_ON = {
    "gold": "gold score, trained on",
    "tests": "share of tests passed, trained on",
    "all_tests": "share of tests passed, trained on",
}


def _headings_of_what_was_trained_on(config: Mapping) -> dict[str, str]:
    """Return a heading for the column `gold` that says so if the policy was trained on that score, else nothing."""
    reward = config.get("reward", "rm")
    return {"gold": TRAINED_ON[reward]} if reward in TRAINED_ON else {}


def _label_of_reward(config: Mapping) -> str:
    """Return what figures call the score that the policy was trained on; "" for that of a reward model."""
    reward = config.get("reward", "rm")
    if reward in ("rm", ""):
        return ""
    if reward == "environment":
        return config["environment"]
    labels = {
        "gold": "gold score",
        "tests": "reward of tests",
        "all_tests": "reward of tests",
    }
    return labels.get(reward, reward)  # a user's function has its own name


def _run_figures(
    rows: pd.DataFrame, histories: Mapping[str, Sequence], config: Mapping
) -> Iterator[tuple]:
    """Yield the name of the file and the axes of each figure of a run; `config` are the run's options."""
    # 1. Curves of training. The plots take several runs of a method; here each has one.
    histories = {name: history for name, history in histories.items() if history}
    runs = {name: [history] for name, history in histories.items()}
    if runs:
        axes = training.reward_curves(runs)
        label = _label_of_reward(config)
        if label:
            axes.set_ylabel(label)
        yield "reward_curves", axes
        yield "l2_norms", training.l2_norms(runs)
        if all("gold_mean" in history[-1] for history in histories.values()):
            axes = training.reward_curves(runs, "gold_mean")
            headings = _headings_of_what_was_trained_on(config)
            if "gold" in headings:
                axes.set_ylabel(headings["gold"])
            yield "gold_curves", axes

    # 2. Distributions of the scores of the answers, by method and temperature.
    answers_by_method = list(name_temperatures(rows).groupby("method", sort=False))
    for column in score_columns(rows):
        scores = {method: answers[column].tolist() for method, answers in answers_by_method}
        # A user's function may have a name that no file can have.
        name_of_file = column if column in HEADINGS else "reward"
        yield f"{name_of_file}_distribution", evaluation.score_quantiles(scores, label=column)


def _save(drawn: Iterable[tuple], figures: Path) -> None:
    """Save figures, drawn one at a time, as PNG files to look at and PDF files to print."""
    matplotlib.use("Agg")  # writes files without a display
    # else a dollar sign in a method's name begins a formula
    with plt.rc_context({"text.parse_math": False}):
        for name, axes in drawn:
            training.save_to_see_and_to_print(axes, figures, name)
            plt.close(np.ravel(axes)[0].figure)


def caption(responses: pd.DataFrame, asked: int) -> str:
    """Return the caption of the table of `summarise`; `asked` is the number of prompts that were asked for."""
    count = responses["id"].nunique()
    prompts = f"{count} held-out prompts"
    if count < asked:
        prompts += f" ({asked} asked for: the task has no more)"
    methods = responses["method"].unique().tolist()
    baseline = "SFT" if "SFT" in methods else methods[0]
    has_several_temperatures = responses["temperature"].nunique() > 1
    if has_several_temperatures and len(methods) > 1:
        baseline += " at the same temperature"
    elif has_several_temperatures:
        # A single method is compared with its own answers at the first temperature.
        baseline = name_temperatures(responses)["method"].iloc[0]
    return f"{prompts}; after scores: gain over {baseline} [95 % interval]{few_prompts(count)}"


def differences(rows: pd.DataFrame, methods: Sequence[str]) -> str:
    """Return a sentence for each two of these methods: how much higher the later one scores, paired by prompt.

    The text is empty if there is only one method, or if there are several temperatures. The score is the gold score if
    there is one, else that of the reward.
    """
    if len(methods) < 2 or rows["temperature"].nunique() > 1:
        return ""
    name = "gold" if "gold" in rows else score_columns(rows)[0]
    count = rows["id"].nunique()
    sentences = []
    for base, method in combinations(methods, 2):
        rows_of_both = rows[rows["method"].isin([base, method])]
        # The summaries are in the order of `rows`: that of the base is the first.
        _, summary_of_method = summarise(rows_of_both, base)
        sentences.append(_difference(method, base, summary_of_method[f"{name}_gain"]))
    text = f"What you saw. {' '.join(sentences)}"
    what = f"brackets: 95 % over {count} held-out prompts, {heading_of(name)}"
    return f"{text}\nHow sure. One seed: a demonstration, not a result ({what}).\n\n"


def _difference(method: str, base: str, gain: Mapping) -> str:
    """Return a sentence on a gain over `base`, which has its `mean` and the ends of its interval, `low` and `high`."""
    if gain["low"] == gain["high"] == 0:
        return f"{method} scored the same as {base}."
    if gain["low"] <= 0 <= gain["high"]:
        return f"{method} could not be told apart from {base}: {interval(gain, '+.2f')}."
    if gain["low"] > 0:
        return f"{method} scored {interval(gain)} higher than {base}."
    loss = {"mean": -gain["mean"], "low": -gain["high"], "high": -gain["low"]}
    return f"{method} scored {interval(loss)} lower than {base}."


def pass_report(path: Path, responses: pd.DataFrame, task: Task) -> str:
    """Write pass.json to `path` if the task has unit tests; return the table of pass@k by difficulty, as in Table 3."""
    if task.tests is None:
        return ""
    problems = task.splits["test"]
    difficulty = dict(zip(problems["prompt"], problems["difficulty"], strict=True))
    rows = pass_rates(responses, difficulty)
    write_json(path / "pass.json", rows)
    return f"{pass_table(rows)}\n\n"


def example_answers(rows: pd.DataFrame, count: int) -> str:
    """Return the first answer of each method to the first `count` prompts, as text.

    If the rows have a score of a reward, and not only the gold score, it stands beside the answer.
    """
    first_samples = name_temperatures(rows[rows["sample"] == 0])
    other_scores = [name for name in score_columns(rows) if name != "gold"]
    shown_score = other_scores[0] if other_scores else ""
    by_prompt = list(first_samples.groupby("prompt", sort=False))
    lines = []
    for prompt, answers in by_prompt[:count]:
        lines.append(f"prompt: ...{' '.join(prompt.split())[-100:]}")
        for row in answers.to_dict("records"):
            head = row["method"]
            if shown_score:
                head += f" [{row[shown_score]:z.2f}]"  # z: without the sign of -0.00
            answer = row["response"].strip()
            if "\n" in answer:  # a program keeps its lines
                lines.append(f"{head}:")
                lines.append(textwrap.indent(answer[:300], "  "))
            else:
                short = textwrap.shorten(answer, 300, placeholder=" ...")
                lines.append(textwrap.fill(f"{head}: {short}", 100, subsequent_indent="  "))
        lines.append("")
    return "".join(f"{line}\n" for line in lines)
