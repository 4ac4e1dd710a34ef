"""What a finished run leaves to look at: a table, a summary file and figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

from marlhf_lite.evaluation.scores import column, summarise, table
from marlhf_lite.evaluation.statistics import final_score, updates_to_reach
from marlhf_lite.plotting import training as plots
from marlhf_lite.utils.jsonl import write_json
from marlhf_lite.utils.run_folder import environment


def report(path: Path, rows: Sequence[dict], histories: dict[str, list[dict]], figures: Path, config: dict) -> str:
    """Write summary.json and table.md to `path`, figures to `figures`; the table.

    `rows` are answers of every method (see `evaluation.answers.answer`), `histories` the metrics of each that trained.
    """
    summary = summarise(rows)
    curves = {name: [row["rm_score_mean"] for row in history] for name, history in histories.items()}
    if "PPO" in curves:
        goal = final_score(curves["PPO"])
        for row in summary:
            if row["method"] in curves:
                row["updates_to_ppo"] = updates_to_reach(curves[row["method"]], goal)
    text = table(summary)
    write_json(path / "summary.json", {"methods": summary, "config": config, "environment": environment()})
    (path / "table.md").write_text(text + "\n", encoding="utf-8")
    draw(rows, histories, figures)
    return text


def draw(rows: Sequence[dict], histories: dict[str, list[dict]], figures: Path) -> list[Path]:
    """Reward curves, score distributions and L2 norms as PNG files."""
    matplotlib.use("Agg")  # files only: no window, no display needed
    runs = {name: [history] for name, history in histories.items() if history}
    methods = list(dict.fromkeys(row["method"] for row in rows))
    drawn = {}
    if runs:
        drawn["reward_curves"] = plots.reward_curves(runs)
        drawn["l2_norms"] = plots.l2_norms(runs)
        if all("gold_mean" in history[-1] for (history,) in runs.values()):
            drawn["gold_curves"] = plots.reward_curves(runs, "gold_mean")
    for name, label in (("rm_score", "reward model score"), ("gold", "gold score")):
        if rows and name in rows[0]:
            scores = {method: column(rows, name, method) for method in methods}
            drawn[f"{name}_distribution"] = plots.score_distribution(scores, label=label)
    return [plots.save(axes, figures / f"{name}.png") for name, axes in drawn.items()]
