"""Does MA-PPO make a policy less sensitive to the sampling temperature (paper: Figures 8 and 21)?

The second half of the study `temperature`, whose protocol says what is asked, what was predicted, and when it ends. The
first half trains the policies and keeps them in runs/study-temperature:

    marlhf study --name temperature
    python benchmarks/temperature.py

For each seed this program lets the SFT model and the three policies answer the first 48 held-out prompts eight times at
six temperatures, with `marlhf evaluate`. Its tables go to a log, so that no number is seen before all seeds are there,
and a record that lacks seeds says `"complete": false` and is not read. The same command continues after an
interruption, and answers that are there are not sampled again.
"""

import argparse
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from cells import RESULTS, Cells

from marlhf_lab.studies.results import rounded, t_interval
from marlhf_lab.studies.study import MARLHF, Study, load_study, plan
from marlhf_lite.evaluation.best_of_n import best_of_n
from marlhf_lite.evaluation.responses import read_responses
from marlhf_lite.utils.run_folder import MANIFEST

TEMPERATURES = (0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
SIZES = (1, 4, 8)  # the N of best of N
PROMPTS = 48
SAMPLES = 8
OURS = "MA-PPO"
CONTROLS = ("PPO", "PPO-0.99")
PRIMARY = "MA-PPO - PPO, 0.8 to 1.0"
SCORES = ("rm_score", "gold")


def answer_at_all_temperatures(
    study: Study, seed: int, work: Path, folder: Path, prompts: int, samples: int
) -> Path:
    """Let the SFT model and all policies of a seed answer, and return the folder with the answers.

    `work` is the folder in which the study keeps its runs; the answers go to a folder inside `folder`.
    """
    runs = plan(study, [seed])
    start = work / runs[0].start  # all runs of a seed start from the same SFT and reward model
    policies = []
    for run in runs:
        if run.command != "sft":
            policies.append(f"{run.method}={work / run.folder / 'training'}")
    answers = folder / f"seed{seed}"
    is_interrupted = (answers / MANIFEST).is_file()
    place = f"--resume={answers}" if is_interrupted else f"--output_dir={answers}"
    command = [
        *MARLHF,
        "evaluate",
        f"--sft={start / 'sft'}",
        f"--rm={start / 'rm'}",
        f"--policies={','.join(policies)}",
        f"--eval_temperatures={','.join(map(str, TEMPERATURES))}",
        f"--eval_prompts={prompts}",
        f"--eval_samples={samples}",
        f"--seed={seed}",
        place,
    ]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"seed{seed}.log", "a", encoding="utf-8") as log:
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)
    return answers


def means_by_temperature(answers: Path) -> dict:
    """Method -> temperature -> N -> score -> mean over prompts. The reward model picks the best of N answers."""
    means: dict = {}
    for cell in best_of_n(read_responses(answers), SIZES):
        of_method = means.setdefault(cell["method"], {})
        of_temperature = of_method.setdefault(f"{cell['temperature']:g}", {})
        of_temperature[str(cell["n"])] = {score: cell[score]["mean"] for score in SCORES}
    return rounded(means)


def measure_seed(study: Study, seed: int, args: argparse.Namespace) -> dict:
    """Return the means of a seed."""
    answers = answer_at_all_temperatures(
        study, seed, args.work, args.folder, prompts=args.prompts, samples=args.samples
    )
    return means_by_temperature(answers)


def change(means: Mapping, method: str, cooler: str, warmer: str, score: str) -> float:
    """A method's mean score of single answers at the warmer temperature minus that at the cooler."""
    of_method = means[method]
    return of_method[warmer]["1"][score] - of_method[cooler]["1"][score]


def differences_of_changes(seeds: Sequence[Mapping]) -> dict[str, dict]:
    """MA-PPO's change minus that of a control, from 0.8 to 1.0 and to 1.2: t-intervals over seeds, by score."""
    found = {}
    for control in CONTROLS:
        for warmer, name in (("1", "1.0"), ("1.2", "1.2")):
            by_score = {}
            for score in SCORES:
                gaps = []
                for means in seeds:
                    ours = change(means, OURS, "0.8", warmer, score)
                    theirs = change(means, control, "0.8", warmer, score)
                    gaps.append(ours - theirs)
                by_score[score] = t_interval(gaps)
            found[f"{OURS} - {control}, 0.8 to {name}"] = by_score
    return found


def means_over_seeds(seeds: Sequence[Mapping]) -> dict:
    """Method -> temperature -> N -> score -> t-interval over seeds."""
    means: dict = {}
    for method, of_method in seeds[0].items():
        for temperature, of_temperature in of_method.items():
            for n in of_temperature:
                for score in SCORES:
                    values = [means_of[method][temperature][n][score] for means_of in seeds]
                    place = means.setdefault(method, {}).setdefault(temperature, {})
                    place.setdefault(n, {})[score] = t_interval(values)
    return means


def found_in(cells: Mapping[str, Mapping]) -> dict:
    """Return the differences of changes, and all means with their intervals over seeds, from the means of each seed."""
    seeds = list(cells.values())
    return {"contrasts": differences_of_changes(seeds), "means": means_over_seeds(seeds)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("runs/study-temperature"),
        help="where the study's runs are",
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/temperature"), help="where the answers go"
    )
    parser.add_argument("--study", default="temperature", help="name or YAML file of the protocol")
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--out", type=Path, default=RESULTS / "benchmark_temperature.json")
    args = parser.parse_args()
    study = load_study(args.study)
    cells = Cells(args.out, args)
    for seed in study.seeds:
        cells.measure(f"seed {seed}", measure_seed, study, seed, args)
        print(f"seed {seed} done", flush=True)
    cells.finish(primary=PRIMARY, found=rounded(found_in(cells.cells)))


if __name__ == "__main__":
    main()
