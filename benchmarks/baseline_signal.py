"""Which baseline keeps how much of the signal, and how does a real critic react to a choice?

Nothing is trained but critics. In five settings the untrained policy answers, and its answers are taken in two halves.
The direction of a half is the gradient of the policy's adapter over it with lambda = 1 and the half's mean score as the
baseline. Each answer's gradient is projected on the direction of the OTHER half, by estimator: T: PPO, lambda 0.95. L:
PPO, lambda 0.95^(1/5). M: MA-PPO, five tokens. S: M with the value at the action's start. D: L with the mean of the
last five values as baseline. fitted: L with a baseline fitted on the other answers of its batch
(`examples/objectives.py`). All see the same answers and values. A signal is the mean of the projections over their
standard deviation, of one answer; a batch of 16 has four times as much. Answers are drawn from the policy itself
(temperature 1, all tokens), and there is no KL yet.

The critic of a half is trained on answers of the other half, towards the final score, and is the one that a user gets:

    umbrella, sees   L64-random-noise; head of zero, 6 passes over 8 batches of 32
    umbrella, blind  the same text; normal head, one pass over 5 batches of 32
    steps            tiny-steps; normal head, 6 passes over 8 batches of 32
    summaries        tiny-tldr, the reward model's score, where the critic starts; one pass over 8 batches of 32
    SmolLM2          the text of `sentiment_settle`; head of zero, two passes over 6 batches of 16

Fixed before the first run. PRIMARY OUTCOME: signal of S minus signal of M in SmolLM2; 95 % percentile interval of
10,000 bootstrap draws of answers, directions and critics held fixed. Predicted: above 0. The account, that the averaged
value takes away what an over-reacting critic says at once, is refuted in this setting where the interval lies at or
below 0. SECOND: D minus L and fitted minus L in each setting, predicted: not below 0. Also fixed: the critic's response
to a choice, h_k after k + 1 tokens, beside the credit that the choice has earned, and Var(Q - V) / Var(Q - fitted). All
other contrasts are exploration.

Size: what an hour of a shared processor core buys: 192 answers in SmolLM2, of which 96 make each direction and each
critic sees 96, and 512 in each small setting. An earlier measurement with 112 answers had M - L at -.09 with a half-
width of .035; so with 192 a difference of about .045 is found with 90 % power, if directions from 96 answers are as
good. One seed: what another critic or direction would give is not in the intervals. SmolLM2 runs first. If the hour
ends before all settings are there (2026-11-28 02:25 UTC by the machine's clock), those that are complete are told, and
no result is looked at before that.

    python benchmarks/baseline_signal.py --model FOLDER        # FOLDER: HuggingFaceTB/SmolLM2-135M-Instruct

2026-11-28, a note after the run: THE PRIMARY OUTCOME IS NOT EVIDENCE. Direction and critic come from the same half of
the answers, so a difference between S and M comes out although scores have no relation to the text: words that went
with high scores in that half by chance are what the direction raises and what the critic has learned to like. The
bootstrap holds two directions and two critics fixed, so it does not see this. `signal_apart.py` asks again, with three
disjoint parts and a placebo. This program stays as that of the record.

The program was tried on 64 answers with another seed. Parts are kept in `--folder`; an interrupted run goes on after
its last part.
"""

from functools import partial

import torch
from accelerate import Accelerator
from cells import Cells, arguments
from scored_answers import (
    SMOLLM2,
    UMBRELLA,
    UMBRELLA_WITH_TRAINED_CRITIC,
    ScoredAnswers,
    Setting,
    rows_per_pass,
    train_critic,
)

from marlhf_lab.credit.credit import token_values
from marlhf_lab.credit.critic_response import (
    critic_response,
    taken_away,
    true_credit,
    variance_saved,
)
from marlhf_lab.credit.gradient_signal import (
    difference_of_signals,
    signal_to_noise,
    slopes,
    token_advantages,
)
from marlhf_lab.studies.results import rounded
from marlhf_lite.models.actor_critic import trainable
from marlhf_lite.training.critic_metrics import diagnose_critic
from marlhf_lite.training.rollout import Rollout, concatenate

SEED = 950
LAM = 0.95
N = 5
LAGS = 32
STEP = 0.02
ESTIMATORS = {
    "T": {"n": 1, "lam": LAM},
    "L": {"n": 1, "lam": LAM ** (1 / N)},
    "M": {"n": N, "lam": LAM},
    "S": {"n": N, "lam": LAM, "sigma": "start"},
    "D": {"n": 1, "lam": LAM ** (1 / N), "objective": "examples.objectives:PastMean"},
    "fitted": {"n": 1, "lam": LAM ** (1 / N), "objective": "examples.objectives:Fitted"},
}
CONTRASTS = [("S", "M"), ("D", "L"), ("fitted", "L"), ("M", "L"), ("S", "L"), ("T", "L")]
PRIMARY = "SmolLM2"
SETTINGS = {
    PRIMARY: SMOLLM2,
    "umbrella, sees": UMBRELLA_WITH_TRAINED_CRITIC,
    "umbrella, blind": Setting(UMBRELLA, 72, updates=5),
    "steps": Setting({"dataset": "tiny-steps"}, 96, passes=6, rate=3e-3),
    "summaries": Setting({"dataset": "tiny-tldr", "size": 2000}, 96, reward="rm", rate=3e-3),
}


class TwoHalves:
    """One setting, whose answers are taken in two halves: 0 and 1."""

    def __init__(self, answers: ScoredAnswers):
        self.answers = answers
        number_of_batches = answers.answers // answers.setting.batch
        self.batches_of_half = number_of_batches // 2

    def half(self, which: int) -> list[Rollout]:
        """The scored answers of half 0 or 1, batch by batch."""
        first = self.batches_of_half * which
        numbers = range(first, first + self.batches_of_half)
        return [self.answers.batch(number) for number in numbers]

    def gradient(self, which: int, number: int, baseline: float) -> torch.Tensor:
        """[W] the gradient of Σ (score − baseline) log π over all tokens of a batch, for W weights of the adapter."""

        def make() -> torch.Tensor:
            rollout = self.half(which)[number]
            total = 0.0
            for rows in rows_per_pass(rollout):
                part = rollout.select(rows).trim()
                weighted = self.answers.logprobs(part) * (part.scores - baseline)[:, None]
                grads = torch.autograd.grad(weighted[part.mask].sum(), self.answers.parameters)
                total = total + torch.cat([grad.flatten() for grad in grads])
            return total

        return self.answers.kept(f"gradient-{which}-{number:02}", make)

    def direction(self, which: int) -> torch.Tensor:
        """[W] the unit vector of a half's gradient, with the half's mean score as the baseline."""
        baseline = float(torch.cat([rollout.scores for rollout in self.half(which)]).mean())
        total = 0.0
        for number in range(self.batches_of_half):
            total = total + self.gradient(which, number, baseline).double()
        return (total / total.norm()).float()

    def slopes(self, which: int, number: int, direction: torch.Tensor) -> torch.Tensor:
        """[B, T] slopes of the tokens' log π along a direction [W], for a batch of a half."""
        rollout = self.half(which)[number]

        def make() -> torch.Tensor:
            return slopes(
                lambda: self.answers.all_logprobs(rollout), self.answers.parameters, direction, STEP
            )

        return self.answers.kept(f"slopes-{which}-{number:02}", make)

    def critic(self, which: int):
        """The critic of a half, which has learned from the answers of the other half."""
        critic = self.answers.new_critic()
        parameters = trainable(critic)

        def make() -> list[torch.Tensor]:
            batches = self.half(1 - which)[: self.answers.setting.updates]
            train_critic(critic, batches, self.answers.setting)
            return [p.detach().clone() for p in parameters]

        weights = self.answers.kept(f"critic-{which}", make)
        with torch.no_grad():
            for p, value in zip(parameters, weights, strict=True):
                p.copy_(value)
        return critic

    def measure(self) -> dict:
        """Projections of each answer by estimator, the critic's response, and what the critic knows.

        In the names below, v are values of the critic, d slopes along the direction, and a advantages: [B, T] each.
        """
        # 1. For each half its answers, values of its critic, and slopes along the direction of the OTHER half.
        rollouts = []
        values = []
        slope = []
        for which in (0, 1):
            direction = self.direction(1 - which)
            critic = self.critic(which)
            for number, rollout in enumerate(self.half(which)):
                rollouts.append(rollout)
                slope.append(self.slopes(which, number, direction))
                name = f"values-{which}-{number:02}"
                values.append(self.answers.kept(name, partial(token_values, critic, rollout)))
        # 2. An answer's projection is the sum over its tokens of advantage times slope.
        advantages = {name: [] for name in ESTIMATORS}
        projections = {name: [] for name in ESTIMATORS}
        for name, how in ESTIMATORS.items():
            for rollout, v, d in zip(rollouts, values, slope, strict=True):
                a = token_advantages(rollout, v, **how)
                advantages[name].append(a)
                projections[name] += (a.double() * d * rollout.mask).sum(1).tolist()
        # 3. The critic's numbers, on all answers of both halves at once.
        whole = concatenate(rollouts, self.answers.tokenizer.pad_token_id)
        scores = torch.cat([rollout.scores for rollout in rollouts])
        width = whole.mask.shape[1]
        v = padded_to_one_width(values, width)
        d = padded_to_one_width(slope, width)
        ours = padded_to_one_width(advantages["L"], width)
        fitted = padded_to_one_width(advantages["fitted"], width)
        response = critic_response(v, d, whole.mask, LAGS)
        found = {
            "projections": projections,
            "response": [h._asdict() for h in response],
            "credit": true_credit(v, d, whole.mask, scores)._asdict(),
            "taken_away": taken_away([h.mean for h in response], N),
            "variance_saved": variance_saved(ours, fitted, whole.mask)._asdict(),
            "critic": diagnose_critic(v, scores, whole.mask, Accelerator()),
            "score": {"mean": float(scores.mean()), "deviation": float(scores.std())},
            "tokens": float(whole.lengths.float().mean()),
        }
        return rounded(found)


def padded_to_one_width(parts: list[torch.Tensor], width: int) -> torch.Tensor:
    """[ΣB, width] rows of several batches [B, T], padded with zeros on the right."""
    return torch.cat([torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in parts])


def found(cell: dict) -> dict:
    """Signals and contrasts of a setting."""
    rows = {}
    for name, projections in cell["projections"].items():
        rows[name] = torch.tensor(projections, dtype=torch.double).numpy()
    contrasts = {}
    for ours, theirs in CONTRASTS:
        difference = difference_of_signals(rows[ours], rows[theirs])
        contrasts[f"{ours} - {theirs}"] = difference._asdict()
    signals = {name: signal_to_noise(x) for name, x in rows.items()}
    return {"signal": signals, "contrasts": contrasts}


def main() -> None:
    parser = arguments(__doc__, "baseline_signal")
    parser.add_argument(
        "--answers", type=int, default=0, help="of each setting; 0: as many as it says"
    )
    parser.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args()
    cells = Cells(args.out, args)

    def measure(name: str, setting: Setting) -> dict:
        folder = args.folder / name.replace(", ", "-")
        count = args.answers or setting.answers
        return TwoHalves(ScoredAnswers(setting, folder, args.model, count, args.seed)).measure()

    for name, setting in SETTINGS.items():
        cells.measure(name, measure, name, setting)
        print(name, "done", flush=True)
    cells.finish(primary=PRIMARY, found={name: found(cell) for name, cell in cells.cells.items()})


if __name__ == "__main__":
    main()
