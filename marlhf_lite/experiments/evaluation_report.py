"""What `marlhf evaluate` adds to its table: distributions, shifts, text measures, best-of-N, and their figures."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib import pyplot as plt

from marlhf_lite.evaluation.best_of_n import best_of_n
from marlhf_lite.evaluation.distributions import distributions, score_table, shift_summary
from marlhf_lite.evaluation.pass_at_k import pass_rates, pass_table
from marlhf_lite.evaluation.scores import SCORES, name_temperatures, table
from marlhf_lite.evaluation.text_metrics import COLUMNS, text_metrics
from marlhf_lite.plotting import evaluation as plots
from marlhf_lite.plotting.training import save
from marlhf_lite.tasks.splits import Task
from marlhf_lite.utils.jsonl import write_json


def caption(responses: pd.DataFrame, asked: int) -> str:
    """What stands above the table of `summarise`; `asked` is the number of prompts that were asked for."""
    count = responses["id"].nunique()
    prompts = f"{count} held-out prompts" + f" ({asked} asked for: the task has no more)" * (count < asked)
    base = name_temperatures(responses)["method"].iloc[0]  # SFT, with its temperature where there are several
    always = ", at every temperature" * (responses["temperature"].nunique() > 1)
    return f"{prompts}; behind scores: gain over {base}{always} [95 % interval]"


def details(path: Path, responses: pd.DataFrame, sizes: Sequence[int], figures: Path) -> str:
    """Write details.json and details.md to `path` and figures to `figures`; the text of details.md.

    `responses` are those of `evaluate_checkpoints`. At each temperature, where there are scores: distributions, shares
    in low tails and shifts against SFT; always text measures; for `sizes` the grid of best-of-N.
    """
    results: dict = {"text": text_metrics(name_temperatures(responses))}
    sections = {"Text measures": table(results["text"], COLUMNS)}
    scores = [name for name in SCORES if name in responses]
    tables = {}
    if "rm_score" in responses:
        tables = {f"T={t:g}": score_table(rows) for t, rows in responses.groupby("temperature", sort=False)}
        results["distributions"] = {at: distributions(x) for at, x in tables.items()}
        results["shifts"] = {at: shift_summary(x) for at, x in tables.items() if x.shape[1] > 1}
        sections |= {f"RM scores at {at}": _tails(rows) for at, rows in results["distributions"].items()}
        if sizes:
            results["best_of_n"] = best_of_n(responses, sizes)
            headings = {"method": "method", "temperature": "temperature", "n": "N"}
            sections["Best of N"] = table(results["best_of_n"], headings | {name: plots.NAMES[name] for name in scores})
    text = "\n\n".join(f"### {title}\n\n{body}" for title, body in sections.items())
    write_json(path / "details.json", results)
    (path / "details.md").write_text(text + "\n", encoding="utf-8")
    matplotlib.use("Agg")  # files only: no window, no display needed
    for name, axes in _figures(responses, tables, results):
        save(axes, figures / f"{name}.png")
        plt.close(np.ravel(axes)[0].figure)
    return text


def _tails(rows: Sequence[dict]) -> str:
    """One temperature's `distributions` as a Markdown table."""
    lines, headings = [], {name: name for name in ("method", "mean", "std", "median", "5 % quantile")}
    for row in rows:
        tails = {f"below {tail['threshold']:z.2f}": tail["share"] for tail in row["below"]}
        headings |= {name: f"share {name}" for name in tails}
        quantiles = {"median": row["quantiles"][0.5], "5 % quantile": row["quantiles"][0.05]}
        lines.append(row | quantiles | tails)
    return table(lines, headings)


def _figures(responses: pd.DataFrame, tables: dict, results: dict) -> Iterator[tuple]:
    """File names and axes, drawn one at a time."""
    for at, scores in tables.items():
        thresholds = [tail["threshold"] for tail in results["distributions"][at][0]["below"]]
        yield f"rm_score_quantiles_{at}", plots.score_quantiles(dict(scores.items()), thresholds)
        if at in results["shifts"]:
            yield f"rm_score_shift_{at}", plots.shift_histogram(scores)
    scores = [name for name in SCORES if tables and name in responses]
    if len(tables) > 1:
        yield from ((f"{name}_over_temperature", plots.temperature_sweep(responses, name)) for name in scores)
    cells = results.get("best_of_n", [])
    if any(cell["temperature"] != 0 for cell in cells):
        yield from ((f"best_of_n_{name}", plots.best_of_n_map(cells, name)) for name in scores)


def pass_report(path: Path, responses: pd.DataFrame, task: Task) -> str:
    """Write pass.json to `path` where the task has unit tests; the table of pass@k by difficulty, as in Table 3."""
    if task.tests is None:
        return ""
    problems = task.splits["test"]
    difficulty = dict(zip(problems["prompt"], problems["difficulty"], strict=True))
    rows = pass_rates(responses, difficulty)
    write_json(path / "pass.json", rows)
    return f"{pass_table(rows)}\n\n"


def example_answers(rows: pd.DataFrame, count: int) -> str:
    """Show the first answers of all methods side by side, with their scores."""
    firsts, lines = name_temperatures(rows[rows["sample"] == 0]), []
    for prompt, answers in list(firsts.groupby("prompt", sort=False))[:count]:
        lines.append(f"prompt: ...{' '.join(prompt.split())[-100:]}")
        for row in answers.to_dict("records"):
            score = f" [{row['rm_score']:z.2f}]" if "rm_score" in row else ""
            if "\n" in (text := row["response"].strip()):  # a program keeps its lines
                lines += [f"{row['method']}{score}:", textwrap.indent(text[:300], "  ")]
                continue
            text = textwrap.shorten(text, 300, placeholder=" ...")
            lines.append(textwrap.fill(f"{row['method']}{score}: {text}", 100, subsequent_indent="  "))
        lines.append("")
    return "".join(f"{line}\n" for line in lines)
