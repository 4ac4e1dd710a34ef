"""Does averaging the critic's values take signal away, if direction, critic and evaluation share no answers?

`baseline_signal.py` found that MA-PPO's signal rises by 0.149 in SmolLM2 if a macro action is judged by the value at
its start (S) and not by its mean (M). But its direction and its critic came from the same half of the answers, and then
such a difference comes out without any relation between text and score. This program measures it again, with three
disjoint parts of the answers and a placebo.

Nothing is trained but critics. The untrained policy answers (temperature 1, all tokens; there is no KL yet). Eight
times the answers are split at random into three parts of equal size:

    direction    the gradient of the policy's adapter over it, with lambda = 1 and its mean score as the baseline
    critic       a new critic is trained on it towards the final score, as a user's critic is
    evaluation   each of its answers' gradients is projected on the direction, by estimator, with the critic's values

Estimators: T: PPO, lambda 0.95. L: PPO, lambda 0.95^(1/5). M: MA-PPO, five tokens. S: M with the value at the action's
start. SAE: lambda between actions alone. A signal is the mean of the projections over their standard deviation, of one
answer. THE PLACEBO does all of this a second time in each split, with the scores permuted among all answers: the same
texts, parts and random numbers, and no relation between text and score.

    SmolLM2         the text of `sentiment_settle`; 96 answers; head of zero, two passes over 6 batches of 5 or 6
    umbrella, sees  L64-random-noise; 768 answers; head of zero, 6 passes over 8 batches of 32

Fixed before the first run. PRIMARY OUTCOME: (S - M) - placebo in SmolLM2, mean over the eight splits, with a 95 %
interval over answers and splits (`marlhf_lab.credit.apart.difference_over_placebo` says how). Margin: 0.05. Predicted:
inside -0.05 to 0.05. Read as: inside the margin if the whole interval is; the averaged value takes signal away if the
whole interval lies above 0.05; all else is "undecided". POSITIVE CONTROL: the same number in umbrella, where a trained
critic sees the deciding word, must lie above 0.05 with its whole interval; if it does not, the measure cannot find what
is there, and the primary outcome is not read. SECOND: SAE - S less placebo, predicted: inside the margin in both
settings, because they have the same expected gradient (the identity in docs/results.md). All else is exploration.

Size: with 96 answers one split of SmolLM2 takes 170 seconds of an idle processor core, sampling and gradients 160 once;
a split of umbrella takes 7. On a core that is shared with others the whole takes somewhat more than an hour, which is
what there is. The record of `baseline_signal` has a half-width of 0.072 (192 evaluated answers, direction and critic
held fixed), so one of 0.12 to 0.16 is expected in SmolLM2. This size finds a difference of 0.2 to 0.25 with 90 % power.
It CANNOT show that a difference is inside the margin: that takes some 1,000 answers and five idle hours (`--answers
1000` with another seed is a study of its own). "Undecided" is the likeliest verdict.

The estimate of the interval was tried on simulated studies without any relation between text and score. The program was
tried on other seeds with few answers, to see that it runs and what it costs. No number of the study's seed is looked at
before all splits of both settings are there; the program prints none before. A record that lacks splits says
`"complete": false` and is not read.

    python benchmarks/signal_apart.py --model FOLDER        # FOLDER: HuggingFaceTB/SmolLM2-135M-Instruct

Parts are kept in `--folder`, so the same command continues after an interruption. Whole splits are in the record.
"""

from dataclasses import replace

import numpy as np
import torch
from accelerate import Accelerator
from cells import Cells, arguments
from scored_answers import (
    SMOLLM2,
    UMBRELLA_WITH_TRAINED_CRITIC,
    ScoredAnswers,
    train_critic,
)

from marlhf_lab.credit.apart import (
    ApartSplit,
    SplitProjections,
    difference_over_placebo,
    placebo_scores,
    split_apart,
    verdict,
)
from marlhf_lab.credit.credit import token_values
from marlhf_lab.credit.gradient_signal import signal_to_noise, slopes, token_advantages
from marlhf_lab.studies.results import rounded
from marlhf_lite.training.critic_metrics import diagnose_critic
from marlhf_lite.training.rollout import Rollout, concatenate

SEED = 970
SPLITS = 8
MARGIN = 0.05
STEP = 0.02  # along the unit vector of a direction: log-probabilities change by some hundredths
LAM = 0.95
N = 5
ESTIMATORS = {
    "T": {"n": 1, "lam": LAM},
    "L": {"n": 1, "lam": LAM ** (1 / N)},
    "M": {"n": N, "lam": LAM},
    "S": {"n": N, "lam": LAM, "sigma": "start"},
    "SAE": {"n": N, "lam": LAM, "objective": "sae"},
}
PRIMARY = ("SmolLM2", "S - M")
POSITIVE_CONTROL = ("umbrella, sees", "S - M")
CONTRASTS = [("S", "M"), ("SAE", "S"), ("M", "L"), ("S", "L"), ("SAE", "L"), ("T", "L")]
SETTINGS = {
    "SmolLM2": replace(SMOLLM2, answers=96, batch=8),
    "umbrella, sees": replace(UMBRELLA_WITH_TRAINED_CRITIC, answers=768),
}
ARMS = ("score", "placebo")


class Apart:
    """The eight splits of one setting."""

    def __init__(self, answers: ScoredAnswers):
        self.answers = answers
        self.batches = range(answers.answers // answers.setting.batch)
        parts = [answers.batch(number) for number in self.batches]
        scores = torch.cat([part.scores for part in parts])
        joined = concatenate(parts, answers.tokenizer.pad_token_id)
        self.rollout = Rollout(**vars(joined) | {"scores": scores})

    def split(self, number: int) -> ApartSplit:
        """Return the parts of a split."""
        return split_apart(len(self.rollout), self._seed(number))

    def scored(self, number: int, arm: str) -> Rollout:
        """Return all answers with their scores, or with those of the split's placebo."""
        if arm == "score":
            return self.rollout
        permuted = placebo_scores(self.rollout.scores.numpy(), self._seed(number))
        return Rollout(**vars(self.rollout) | {"scores": torch.as_tensor(permuted)})

    def gradients(self, number: int) -> torch.Tensor:
        """[B, W] for each answer of a batch, the gradient of its log-probability, Σ_t log π(a_t | s_t)."""
        first = number * self.answers.setting.batch

        def make() -> torch.Tensor:
            rows = []
            for row in range(first, first + self.answers.setting.batch):
                part = self.rollout.select(torch.tensor([row])).trim()
                logprob = self.answers.logprobs(part)[part.mask].sum()
                grads = torch.autograd.grad(logprob, self.answers.parameters)
                rows.append(torch.cat([grad.flatten() for grad in grads]))
            return torch.stack(rows)

        return self.answers.kept(f"gradients-{number:02}", make)

    def directions(self) -> dict[tuple[int, str], torch.Tensor]:
        """Split and arm -> [W] the unit vector of Σ (score − mean score) ∇ log π over the split's direction part."""

        def make() -> dict:
            # 1. Each direction is a weighted sum of all answers' gradients; answers of the other parts have weight 0.
            weights = {}
            for number in range(SPLITS):
                rows = torch.as_tensor(self.split(number).direction)
                for arm in ARMS:
                    scores = self.scored(number, arm).scores[rows]
                    weight = torch.zeros(len(self.rollout))
                    weight[rows] = scores - scores.mean()
                    weights[number, arm] = weight
            stacked = torch.stack(list(weights.values()))  # [directions, answers]
            # 2. So the gradients of a batch are read once for all directions.
            total = 0.0
            for batch in self.batches:
                size = self.answers.setting.batch
                total = total + stacked[:, batch * size : (batch + 1) * size] @ self.gradients(
                    batch
                )
            units = total / total.norm(dim=1, keepdim=True)
            return dict(zip(weights, units, strict=True))

        return self.answers.kept("directions", make)

    def measure_arm(self, number: int, arm: str, direction: torch.Tensor) -> dict:
        """Measure one arm of a split: the projections of its evaluated answers, and what its critic knows.

        `direction` [W] is that of this split and arm.
        """
        split = self.split(number)
        scored = self.scored(number, arm)
        learned_from = scored.select(torch.as_tensor(split.critic))
        evaluated = scored.select(torch.as_tensor(split.evaluation))

        def make() -> dict:
            setting = self.answers.setting
            torch.manual_seed(1000 * self._seed(number))  # for the head of the new critic
            critic = self.answers.new_critic()
            groups = torch.arange(len(learned_from)).tensor_split(setting.updates)
            train_critic(critic, [learned_from.select(rows) for rows in groups], setting)
            values = token_values(critic, evaluated)
            slope = slopes(
                lambda: self.answers.all_logprobs(evaluated),
                self.answers.parameters,
                direction,
                STEP,
            )
            projections = {}
            for name, how in ESTIMATORS.items():
                advantages = token_advantages(evaluated, values, **how)
                by_answer = (advantages.double() * slope * evaluated.mask).sum(1)
                projections[name] = by_answer.tolist()
            known = diagnose_critic(values, evaluated.scores, evaluated.mask, Accelerator())
            return {"projections": projections, "critic": known}

        return self.answers.kept(f"split-{number}-{arm}", make)

    def measure_split(self, number: int) -> dict:
        """Measure both arms of a split."""
        directions = self.directions()
        found = {arm: self.measure_arm(number, arm, directions[number, arm]) for arm in ARMS}
        return rounded({"evaluation": self.split(number).evaluation.tolist(), **found})

    def _seed(self, number: int) -> int:
        return 100 * self.answers.seed + number


def projections_of(cell: dict) -> SplitProjections:
    """Read a split back from the record."""
    arms = {}
    for arm in ARMS:
        stored = cell[arm]["projections"]
        arms[arm] = {name: np.array(rows) for name, rows in stored.items()}
    return SplitProjections(evaluation=np.array(cell["evaluation"]), **arms)


def found_in(cells: dict[str, dict], setting: str, answers: int) -> dict:
    """Signals of one setting, mean over splits, and contrasts less placebo with their intervals and verdicts."""
    splits = [projections_of(cells[cell_name(setting, number)]) for number in range(SPLITS)]
    signals = {}
    for arm in ARMS:
        signals[arm] = {}
        for name in ESTIMATORS:
            rows = [signal_to_noise(getattr(split, arm)[name]) for split in splits]
            signals[arm][name] = float(np.mean(rows))
    contrasts = {}
    for ours, theirs in CONTRASTS:
        interval = difference_over_placebo(splits, ours, theirs, answers)
        verdict_of_margin = verdict(interval, MARGIN)
        contrasts[f"{ours} - {theirs}"] = interval._asdict() | {"verdict": verdict_of_margin}
    return {"signal": signals, "contrasts": contrasts}


def cell_name(setting: str, number: int) -> str:
    """Return the name of a split in the record."""
    return f"{setting}: split {number}"


def main() -> None:
    parser = arguments(__doc__, "signal_apart")
    parser.add_argument(
        "--answers", type=int, default=0, help="of each setting; 0: as many as it says"
    )
    parser.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args()
    cells = Cells(args.out, args)
    counts = {}
    for name, setting in SETTINGS.items():
        counts[name] = args.answers or setting.answers
        todo = [i for i in range(SPLITS) if cell_name(name, i) not in cells.cells]
        if not todo:
            continue
        folder = args.folder / name.replace(", ", "-")
        measured = Apart(ScoredAnswers(setting, folder, args.model, counts[name], args.seed))
        for number in todo:
            cells.measure(cell_name(name, number), measured.measure_split, number)
            print(f"{cell_name(name, number)} done", flush=True)
    found = {name: found_in(cells.cells, name, counts[name]) for name in SETTINGS}
    cells.finish(primary=PRIMARY, positive_control=POSITIVE_CONTROL, margin=MARGIN, found=found)


if __name__ == "__main__":
    main()
