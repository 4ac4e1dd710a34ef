"""What a study leaves to look at: tables, a summary file and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from marlhf_lite.experiments.results import COSTS, SCORES, by_method, study_table
from marlhf_lite.plotting import training as plots
from marlhf_lite.utils.jsonl import write_json


def markdown(rows: Sequence[Mapping], baseline: str = "SFT", goal: str = "PPO") -> str:
    """Scores, and what they cost, as Markdown: in brackets 95 % intervals, in parentheses the seeds one by one."""
    heads = {"method": "method"} | SCORES
    for word, other in (("gain", f"gain over {baseline}"), ("lead", f"lead over {goal}")):
        heads |= {f"{key}_{word}": f"{text}: {other}" for key, text in SCORES.items()}
    costs = {"method": "method"} | {name: f"{text} to {goal}'s final RM score" for name, text in COSTS.items()}
    costs |= {f"spent_{name}": f"{text} in all" for name, text in COSTS.items()}
    parts = [_table(rows, heads | {"kl": "KL (nats)", "tokens": "length"})]
    trained = [row for row in rows if "spent_updates" in row]
    return "\n\n".join(parts + ([_table(trained, costs)] if trained else []))


def _table(rows: Sequence[Mapping], heads: Mapping[str, str]) -> str:
    names = [name for name in heads if any(name in row for row in rows)]
    lines = [[heads[name] for name in names], ["---"] * len(names)]
    lines += [[_cell(row.get(name), name) for name in names] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value, name: str) -> str:
    whole = name.removeprefix("spent_") in COSTS
    if not isinstance(value, Mapping):
        return "-" if value is None else value if isinstance(value, str) else f"{value:.{0 if whole else 1}f}"
    form = "{:.0f}" if whole else "{:.2f}"
    seeds = "; ".join("never" if x is None else form.format(x) for x in value["by_seed"])
    if value["mean"] is None:
        return f"({seeds})"
    text = form.format(value["mean"])
    text += f" ± {value['std']:.2f}" if value.get("std") is not None else ""
    text += f" [{form.format(value['low'])}, {form.format(value['high'])}]" if value.get("low") is not None else ""
    return f"{text} ({seeds})"


def study_report(study, results: Sequence[Mapping], folder: Path, figures: Path) -> str:
    """Write table.md and summary.json to `folder` and figures to `figures`; the table. `study` is a `Study`."""
    rows = study_table(results, study.baseline, study.goal)
    text = markdown(rows, study.baseline, study.goal)
    write_json(folder / "summary.json", {"study": study.name, "methods": rows})
    (folder / "table.md").write_text(text + "\n", encoding="utf-8")
    draw(study, results, rows, figures)
    return text


def draw(study, results: Sequence[Mapping], rows: Sequence[Mapping], figures: Path) -> list[Path]:
    """Final scores, leads, costs, curves and L2 norms as PNG files, for each group of methods that the study names."""
    matplotlib.use("Agg")  # files only: no window, no display needed
    runs = by_method(results)
    drawn: dict[str, Axes | np.ndarray] = {}
    for group, names in (study.figures or {"": list(runs)}).items():
        mark = f"{group}_" * bool(group)
        chosen = [row for row in rows if row["method"] in names]
        drawn[f"{mark}final_scores"] = final_scores(chosen, study.baseline)
        if any("rm_score_lead" in row or "gold_lead" in row for row in chosen):
            drawn[f"{mark}leads"] = final_scores(chosen, study.goal, "lead")
        if any(name in row for row in chosen for name in COSTS):
            drawn[f"{mark}costs"] = costs(chosen, study.goal)
        drawn |= {f"{mark}{name}": axes for name, axes in _curves(runs, names, study.baseline).items()}
    paths = [plots.save(axes, figures / f"{name}.png") for name, axes in drawn.items()]
    plt.close("all")
    return paths


def _curves(runs: Mapping, names: Sequence[str], baseline: str) -> dict:
    drawn = {}
    for metric, score in (("rm_score_mean", "rm_score"), ("gold_mean", "gold")):
        shown = {name: gain_curves(runs[name], runs.get(baseline, {}), score) for name in names}
        shown = {name: some for name, some in shown.items() if _has(some, metric)}
        if shown:
            axes = drawn[metric] = plots.reward_curves(shown, metric)
            if baseline in runs:
                axes.set_ylabel(f"{SCORES[score]}, gain over {baseline}")
    curves = {name: [run["curve"] for run in runs[name].values()] for name in names}
    normed = {name: some for name, some in curves.items() if _has(some, "advantage_norm")}
    return drawn | ({"l2_norms": plots.l2_norms(normed)} if normed else {})


def _has(curves: Sequence[Sequence[Mapping]], metric: str) -> bool:
    return all(any(row.get(metric) is not None for row in curve) for curve in curves)


def gain_curves(found: Mapping[int, Mapping], base: Mapping[int, Mapping], score: str) -> list[list[dict]]:
    """Curves with the baseline's mean on the held-out prompts taken off, of the same seed; as they are without one."""
    out = []
    for seed, run in sorted(found.items()):
        zero = float(np.mean(base[seed]["final"][score])) if seed in base and score in base[seed]["final"] else 0.0
        metric = {"rm_score": "rm_score_mean", "gold": "gold_mean"}[score]
        out.append([row | {metric: row[metric] - zero} for row in run["curve"] if row.get(metric) is not None])
    return out


def final_scores(rows: Sequence[Mapping], other: str = "SFT", kind: str = "gain") -> np.ndarray:
    """Gains over the baseline, or leads over the goal, on the held-out prompts; [1 or 2] Axes, RM and gold score.

    Mean and interval, and every seed. `rows` are those of `study_table`, `kind` is "gain" or "lead". Where no row has
    any: the scores themselves, with ±1 std over seeds.
    """
    keys = {f"{score}_{kind}": f"{text},\n{kind} over {other}" for score, text in SCORES.items()}
    keys = keys if any(key in row for row in rows for key in keys) else SCORES
    found = any(key not in SCORES for key in keys)
    bars = "95 % interval over seeds and prompts" if found else "±1 std over seeds"
    text = f"Held-out prompts. Dot: mean; bar: {bars}; small dots: each seed. Further right is better."
    axes = _dots(rows, keys, text)
    for ax in axes if found else ():
        ax.axvline(0, color="0.6", linewidth=0.8, zorder=0)
    return axes


def costs(rows: Sequence[Mapping], goal: str = "PPO") -> np.ndarray:
    """What each method spends to reach the goal's final RM score: updates, tokens and seconds; [3] Axes."""
    text = f"Spent in training when the RM score first is the final one of {goal} with the same seed. Dot: mean; bar: "
    text += "95 % t-interval over seeds; small dots: each seed. 'never': seeds that do not get there. Left is better."
    axes = _dots([row for row in rows if "updates" in row], COSTS, text)
    for ax in axes:
        ax.set_xlim(left=0)
        ax.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}k" if x >= 1000 else f"{x:g}")
    return axes


@plt.rc_context(plots.STYLE)
def _dots(rows: Sequence[Mapping], keys: Mapping[str, str], text: str) -> np.ndarray:
    """A panel for each key that rows have, a line for each row that has one of them."""
    keys = {key: label for key, label in keys.items() if any(key in row for row in rows)}
    shown = [row for row in rows if any(key in row for key in keys)]
    size = (plots.WIDTH, (0.14 + 0.055 * len(shown)) * plots.WIDTH)
    figure, axes = plt.subplots(1, len(keys), figsize=size, layout="constrained", sharey=True, squeeze=False)
    styles = plots.method_styles([row["method"] for row in rows])
    for ax, (key, label) in zip(axes[0], keys.items(), strict=True):
        for place, row in enumerate(shown):
            _point(ax, row.get(key), place, styles[row["method"]]["color"])
        ax.set(xlabel=label, ylim=(len(shown) - 0.5, -0.5))
        ax.set_yticks(range(len(shown)), [row["method"] for row in shown])
        ax.grid(axis="x", alpha=0.3, linewidth=0.5)
    axes[0, 0].set_ylabel("method")
    plots.caption(figure, text)
    return axes[0]


def _point(ax: Axes, value: Mapping | None, place: int, colour: str) -> None:
    if value is None:
        return
    seeds = [x for x in value["by_seed"] if x is not None]
    ax.plot(seeds, [place + 0.25] * len(seeds), ".", color=colour, markersize=3)
    if value["mean"] is None:
        never = f"never: {len(value['by_seed']) - len(seeds)} of {len(value['by_seed'])}"
        ax.annotate(
            never, (0.98, place - 0.12), xycoords=("axes fraction", "data"), ha="right", va="center", fontsize=6
        )
        return
    half = value.get("std") or 0.0
    known = [value.get(end) for end in ("low", "high")]
    ends = [value["mean"] + way * half if end is None else end for end, way in zip(known, (-1, 1), strict=True)]
    ax.plot(ends, [place, place], color=colour, linewidth=1.6)
    ax.plot(value["mean"], place, "o", color=colour, markersize=4.5)
