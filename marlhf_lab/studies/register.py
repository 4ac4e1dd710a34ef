"""The register of studies in `docs/results.md`: predictions, outcomes, and the effects that could have been seen."""

import json
from importlib.resources import files
from pathlib import Path

import yaml

from marlhf_lab.studies.could_be_seen import seen
from marlhf_lab.studies.numbers_in_texts import NUMBER, fill
from marlhf_lab.studies.other_sign import studies_with_the_other_sign
from marlhf_lab.studies.results import stored_results
from marlhf_lab.studies.study import load_study
from marlhf_lite.utils.shipped import shipped
from marlhf_lite.utils.tables import interval, markdown

ROWS = Path(str(files("marlhf_lab"))) / "studies" / "register.yaml"
HEADS = ["study", "seeds", "predicted", "primary outcome, or first question", "could have seen"]
# Study that a program in benchmarks/ measures, without a protocol file and seeds -> its primary outcome, from its
# record.
MEASURED = {
    "gradient_signal": lambda record: record["found"][record["primary"]]["over_PPO"]["MA-PPO"],
    "baseline_signal": lambda record: record["found"][record["primary"]]["contrasts"]["S - M"],
    "signal_apart": lambda record: record["found"]["SmolLM2"]["contrasts"]["S - M"],
    "temperature": lambda record: record["found"]["contrasts"][record["primary"]]["rm_score"],
}
NOT_YET = "not there yet"


def register_table() -> str:
    """Return all studies as a Markdown table, each with a link to its table, or to the program that measures it."""
    rows = yaml.safe_load(ROWS.read_text(encoding="utf-8"))
    lines = []
    for study, (predicted, outcome) in rows.items():
        if study in MEASURED:
            line = line_of_measurement(study, predicted, outcome)
        else:
            line = line_of_study(study, predicted, outcome)
        lines.append(line)
    return markdown(HEADS, lines)


def line_of_measurement(study: str, predicted: str, outcome: str) -> list[str]:
    """Return the line of a measurement without seeds, whose protocol is the docstring of a program."""
    value = measured(study).replace("-", "−")
    # In the outcome, {NAME OF THE STUDY} stands for its number.
    text = outcome.replace(f"{{{study}}}", value)
    return [f"[{study}](../benchmarks/{study}.py)", "-", predicted, text, "-"]


def line_of_study(study: str, predicted: str, outcome: str) -> list[str]:
    """Return the line of a study that has a protocol file.

    Seeds are those of stored runs. Until the study has its table, the line links to the protocol, and has no outcome.
    """
    folder = shipped("results") / study
    runs = stored_results(study) if folder.is_dir() else []
    seeds = len({run["seed"] for run in runs})
    planned = len(load_study(study).seeds)
    count = str(seeds) if seeds == planned else f"{seeds} of {planned}"
    if (folder / "table.md").is_file():
        link = f"[{study}](../data/results/{study}/table.md)"
        text = fill(outcome, study)
        others = studies_with_the_other_sign(study)
        if others:
            text += f" (the other sign: {', '.join(others)})"
        return [link, count, predicted, text, seen(study)]
    link = f"[{study}](../marlhf_lab/studies/protocols/{study}.yaml)"
    return [link, count, predicted, NUMBER.sub(NOT_YET, outcome), "-"]


def measured(study: str) -> str:
    """Return the primary outcome of a measurement as text, or `NOT_YET` if it has no complete record."""
    path = shipped(f"results/benchmark_{study}.json")
    if not path.is_file():
        return NOT_YET
    record = json.loads(path.read_text(encoding="utf-8"))
    if not record["complete"]:  # nobody looks at an outcome before all of it is there
        return NOT_YET
    return interval(MEASURED[study](record), ".2f")
