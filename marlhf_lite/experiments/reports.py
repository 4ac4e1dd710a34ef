"""The report of a run: a table, a summary file and figures."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import pandas as pd

from marlhf_lite.evaluation.scores import name_temperatures, summarise, table
from marlhf_lite.evaluation.statistics import final_score, updates_to_reach
from marlhf_lite.plotting import training as plots
from marlhf_lite.plotting.evaluation import score_quantiles
from marlhf_lite.utils.jsonl import write_json
from marlhf_lite.utils.run_folder import environment


def run_report(path: Path, rows: pd.DataFrame, histories: dict[str, list[dict]], figures: Path, config: dict) -> str:
    """Write summary.json and table.md to `path` and figures to `figures`. Returns the table.

    `rows` are the answers of all methods (see `evaluate_checkpoints`), `histories` the metrics of
    each method that trained.
    """
    summary = summarise(rows)
    curves = {name: [row["rm_score_mean"] for row in history] for name, history in histories.items()}
    if "PPO" in curves:
        target = final_score(curves["PPO"])
        for row in summary:
            if row["method"] in curves:
                row["updates_to_ppo"] = updates_to_reach(curves[row["method"]], target)
    text = table(summary)
    write_json(path / "summary.json", {"methods": summary, "config": config, "environment": environment()})
    (path / "table.md").write_text(text + "\n", encoding="utf-8")
    run_figures(rows, histories, figures)
    return text


def run_figures(rows: pd.DataFrame, histories: dict[str, list[dict]], figures: Path) -> list[Path]:
    """Draw reward curves, score distributions and L2 norms as PNG files. Returns their paths."""
    matplotlib.use("Agg")  # files only: no window, no display needed
    runs = {name: [history] for name, history in histories.items() if history}
    methods = dict(list(name_temperatures(rows).groupby("method", sort=False)))
    drawn = {}
    if runs:
        drawn["reward_curves"] = plots.reward_curves(runs)
        drawn["l2_norms"] = plots.l2_norms(runs)
        if all("gold_mean" in history[-1] for (history,) in runs.values()):
            drawn["gold_curves"] = plots.reward_curves(runs, "gold_mean")
    for name, label in (("rm_score", "reward model score"), ("gold", "gold score")):
        if name in rows:
            scores = {method: answers[name].tolist() for method, answers in methods.items()}
            drawn[f"{name}_distribution"] = score_quantiles(scores, label=label)
    return [plots.save(axes, figures / f"{name}.png") for name, axes in drawn.items()]
