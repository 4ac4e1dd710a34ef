"""What `marlhf evaluate` adds to its table: distributions, shifts, text measures, best-of-N, and their figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib import pyplot as plt

from marlhf_lite.evaluation.best_of_n import best_of_n
from marlhf_lite.evaluation.distributions import distributions, score_tables, shift_summary
from marlhf_lite.evaluation.plan import Plan
from marlhf_lite.evaluation.responses import label
from marlhf_lite.evaluation.scores import table
from marlhf_lite.evaluation.text_metrics import COLUMNS, text_metrics
from marlhf_lite.plotting import evaluation as plots
from marlhf_lite.plotting.training import save
from marlhf_lite.utils.jsonl import write_json

_HEADINGS = {"method": "method", "mean": "mean", "std": "std", "median": "median", "low tail": "5 % quantile"}


def details(path: Path, rows: Sequence[dict], plan: Plan, figures: Path, baseline: str = "SFT") -> str:
    """Write details.json and details.md to `path` and figures to `figures`; the text of details.md.

    `rows` are those of `evaluate_checkpoints`. At each temperature, where there are scores: distributions, shares below
    shifts against the baseline; always text measures; for `plan.best_of` the grid of best-of-N.
    """
    matplotlib.use("Agg")  # files only: no window, no display needed
    several = len({row["temperature"] for row in rows}) > 1
    named = [row | {"method": label(row, several)} for row in rows]
    found: dict = {"text": text_metrics(named)}
    parts = [("Text measures", table(found["text"], COLUMNS))]
    drawn = {}
    if "rm_score" in rows[0]:
        for temperature in dict.fromkeys(row["temperature"] for row in rows):
            here = [row for row in rows if row["temperature"] == temperature]
            _scores(here, f"T={temperature:g}", plan, baseline, found, parts, drawn)
        _over_temperatures(rows, plan, several, found, parts, drawn)
    text = "\n\n".join(f"### {title}\n\n{body}" for title, body in parts)
    write_json(path / "details.json", found)
    (path / "details.md").write_text(text + "\n", encoding="utf-8")
    for name, axes in drawn.items():
        save(axes, figures / f"{name}.png")
        plt.close(np.ravel(axes)[0].figure)
    return text


def _scores(rows: Sequence[dict], at: str, plan: Plan, baseline: str, found: dict, parts: list, drawn: dict) -> None:
    """One temperature: how RM scores are distributed and where they moved."""
    tables = score_tables(rows)
    spread = distributions(tables, baseline)
    found.setdefault("distributions", {})[at] = spread
    parts.append((f"RM scores at {at}", _spread_table(spread)))
    drawn[f"rm_score_quantiles_{at}"] = plots.score_quantiles(
        {name: values.ravel() for name, values in tables.items()}, [x["threshold"] for x in spread[0]["below"]]
    )
    if len(tables) > 1:
        found.setdefault("shifts", {})[at] = shift_summary(tables, baseline)
        drawn[f"rm_score_shift_{at}"] = plots.shift_histogram(tables, baseline)


def _spread_table(spread: Sequence[dict]) -> str:
    lines = []
    for row in spread:
        line = {"method": row["method"], "mean": row["mean"], "std": row["std"]}
        line |= {"median": row["quantiles"][0.5], "low tail": row["quantiles"][0.05]}
        lines.append(line | {f"below {x['threshold']:.2f}": x["share"] for x in row["below"]})
    below = {name: f"share {name}" for name in lines[0] if name.startswith("below")}
    return table(lines, _HEADINGS | below)


def _over_temperatures(rows: Sequence[dict], plan: Plan, several: bool, found: dict, parts: list, drawn: dict) -> None:
    scores = [name for name in ("rm_score", "gold") if name in rows[0]]
    if several:
        drawn |= {f"{name}_over_temperature": plots.temperature_sweep(rows, name) for name in scores}
    if not plan.best_of:
        return
    found["best_of_n"] = cells = best_of_n(rows, plan.best_of)
    headings = {"method": "method", "temperature": "temperature", "n": "N"} | {s: plots.NAMES[s] for s in scores}
    parts.append(("Best of N", table(cells, headings)))
    if any(cell["temperature"] != 0 for cell in cells):
        drawn |= {f"best_of_n_{name}": plots.best_of_n_map(cells, name) for name in scores}
