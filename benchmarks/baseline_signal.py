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

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator
from cells import Cells, arguments

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
from marlhf_lite.config.embedded import EMBEDDED_MODELS
from marlhf_lite.config.options import ModelConfig
from marlhf_lite.experiments.named_rewards import text_reward
from marlhf_lite.models.actor_critic import trainable
from marlhf_lite.models.adapters import resolve_adapter_dir
from marlhf_lite.models.loading import build_models, load_base, load_tokenizer
from marlhf_lite.tasks.chats import chat_writer
from marlhf_lite.tasks.loading import load_task
from marlhf_lite.training.critic_metrics import diagnose_critic
from marlhf_lite.training.rewards import FunctionReward, ModelReward
from marlhf_lite.training.rollout import (
    Rollout,
    Sampling,
    concatenate,
    generate,
    generate_in_batches,
    prompt_stream,
)

ROOT = Path(__file__).parents[1]
SEED, LAM, N, LAGS, STEP = 950, 0.95, 5, 32, 0.02
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


@dataclass(frozen=True)
class Setting:
    """What is asked of which model, and how its critic came about."""

    data: dict  # options of `marlhf sft` and `marlhf rm`
    length: int  # of an answer, in tokens
    reward: str = "gold"
    least: int = 0  # tokens that an answer has at least
    answers: int = 512
    batch: int = 32
    head: str = "normal"
    updates: int = 8  # of the critic
    passes: int = 1  # over each of its batches
    rate: float = 6e-3
    sft: list[str] = field(default_factory=list)  # more options of `marlhf sft`


UMBRELLA = {"dataset": "tiny-umbrella", "part": "L64-random-noise", "size": 600}
SETTINGS = {
    PRIMARY: Setting(
        {"dataset": str(ROOT / "data" / "sentiment")},
        64,
        reward="marlhf_lab.corpora.sentiment:first_valence",
        least=64,
        answers=192,
        batch=16,
        head="zero",
        updates=6,
        passes=2,
        rate=3e-3,
        sft=["--sft_epochs=0", "--lora_r=4", "--lora_alpha=8"],
    ),
    "umbrella, sees": Setting(UMBRELLA, 72, head="zero", passes=6),
    "umbrella, blind": Setting(UMBRELLA, 72, updates=5),
    "steps": Setting({"dataset": "tiny-steps"}, 96, passes=6, rate=3e-3),
    "summaries": Setting({"dataset": "tiny-tldr", "size": 2000}, 96, reward="rm", rate=3e-3),
}


class Measured:
    """One setting, with a file for each of its parts."""

    def __init__(self, name: str, args):
        self.setting = setting = SETTINGS[name]
        self.folder = args.folder / name.replace(", ", "-")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.answers, self.seed = args.answers or setting.answers, args.seed
        model = [f"--model={args.model}"] if name == PRIMARY else []
        self.sft = self._stage("sft", model, setting.sft)
        self.rm = (
            self._stage("rm", model, [f"--sft={self.folder / 'sft'}"])
            if setting.reward == "rm"
            else None
        )
        stored = (
            ModelConfig(model=args.model)
            if model
            else ModelConfig(model=_embedded(setting.data["dataset"]))
        )
        self.base, self.tokenizer = load_base(stored), load_tokenizer(stored.model)
        chat = chat_writer(self.tokenizer, "auto") if model else None
        self.task = load_task(**setting.data, **({"chat": chat} if chat else {}))
        self.models = build_models(self.base, self.sft, self.rm, "sft")
        function = text_reward(setting.reward, self.task)
        self.reward = (
            FunctionReward(function, setting.reward)
            if function
            else ModelReward(self.models.reward)
        )
        self.policy, self.parameters = self.models.policy.eval(), trainable(self.models.policy)
        self.halves = self.answers // setting.batch // 2

    def _stage(self, name: str, model: list[str], more: list[str]) -> Path:
        """The adapter that `marlhf sft` or `marlhf rm` trains on the setting's data."""
        folder, data = (
            self.folder / name,
            [f"--{key}={value}" for key, value in self.setting.data.items()],
        )
        if not any(folder.rglob("adapter_model.safetensors")):
            words = [*data, *model, *more, f"--seed={self.seed}", f"--output_dir={folder}"]
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run(
                [sys.executable, "-m", "marlhf_lite", name, *words],
                check=True,
                stdout=subprocess.DEVNULL,
            )
        return resolve_adapter_dir(name, str(folder))

    def kept(self, name: str, make):
        """What `make()` returns, from its file where it is there already."""
        path = self.folder / f"{name}.pt"
        if not path.exists():
            begin, found, new = time.time(), make(), path.with_suffix(".tmp")
            torch.save(found, new)
            os.replace(new, path)
            print(
                f"{time.strftime('%H:%M:%S')} {path.parent.name} {name}: {time.time() - begin:.0f} s",
                flush=True,
            )
        return torch.load(path, weights_only=False)

    # -- parts --------------------------------------------------------------------------------------------------------

    def batch(self, number: int) -> Rollout:
        """A batch of scored answers; the first half of the batches are the first half of the answers."""

        def make():
            wanted = list(
                islice(
                    prompt_stream(list(self.task.splits["ppo"]["prompt"]), self.seed), self.answers
                )
            )
            torch.manual_seed(1000 * self.seed + number)
            prompts = wanted[number * self.setting.batch :][: self.setting.batch]
            sampling = Sampling(self.setting.length, 1.0, 0, min_new_tokens=self.setting.least)
            rollout = generate_in_batches(
                generate, 0, self.policy.model, self.tokenizer, prompts, sampling
            )[0]
            return vars(rollout) | {"scores": torch.as_tensor(self.reward(rollout)).float()}

        return Rollout(**self.kept(f"answers-{number:02}", make))

    def half(self, which: int) -> list[Rollout]:
        return [
            self.batch(number) for number in range(self.halves * which, self.halves * (which + 1))
        ]

    def logprobs(self, part: Rollout):
        return self.policy(part.tokens, part.attention_mask, part.mask.shape[1])[0]

    def gradient(self, which: int, number: int, baseline: float) -> torch.Tensor:
        """[W] of Σ (score − baseline) log π over a batch."""

        def make():
            total, rollout = 0.0, self.half(which)[number]
            for some in torch.arange(len(rollout)).split(8):
                part = rollout.select(some).trim()
                loss = (self.logprobs(part) * (part.scores - baseline)[:, None])[part.mask].sum()
                total = total + torch.cat(
                    [g.flatten() for g in torch.autograd.grad(loss, self.parameters)]
                )
            return total

        return self.kept(f"gradient-{which}-{number:02}", make)

    def direction(self, which: int) -> torch.Tensor:
        """[W] the unit vector of a half's gradient."""
        baseline = float(torch.cat([rollout.scores for rollout in self.half(which)]).mean())
        total = sum(
            self.gradient(which, number, baseline).double() for number in range(self.halves)
        )
        return (total / total.norm()).float()

    def slopes(self, which: int, number: int, direction) -> torch.Tensor:
        """[B, T] slopes of log π along a direction."""
        rollout = self.half(which)[number]

        def logprobs():
            parts = [rollout.select(some).trim() for some in torch.arange(len(rollout)).split(8)]
            return torch.cat([rollout.widen(self.logprobs(part)) for part in parts])

        return self.kept(
            f"slopes-{which}-{number:02}",
            lambda: slopes(logprobs, self.parameters, direction, STEP),
        )

    def critic(self, which: int):
        """The critic of a half, trained on the other one."""
        setting, start = self.setting, "rm" if self.rm else "sft"
        critic = build_models(
            self.base, self.sft, self.rm, start, critic_head_init=setting.head
        ).critic
        parameters = trainable(critic)

        def make():
            optimizer = torch.optim.AdamW(parameters, lr=setting.rate, weight_decay=0.0)
            batches = self.half(1 - which)[: setting.updates]
            for update, rollout in enumerate(batches):
                optimizer.param_groups[0]["lr"] = setting.rate * min(1, (update + 1) / 5)
                for _ in range(setting.passes):
                    for some in torch.arange(len(rollout)).split(8):
                        part = rollout.select(some).trim()
                        values = part.before_tokens(critic(part.tokens, part.attention_mask))
                        errors = (values - part.scores[:, None])[part.mask]
                        (0.5 * errors.square().sum() / rollout.mask.sum()).backward()
                    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
            return [p.detach().clone() for p in parameters]

        weights = self.kept(f"critic-{which}", make)
        with torch.no_grad():
            for p, value in zip(parameters, weights, strict=True):
                p.copy_(value)
        return critic

    # -- what is found ------------------------------------------------------------------------------------------------

    def measure(self) -> dict:
        """Projections of each answer by estimator, the critic's response, and what it knows."""
        rollouts, values, slope = [], [], []
        for which in (0, 1):
            direction, critic = self.direction(1 - which), self.critic(which)
            for number, rollout in enumerate(self.half(which)):
                rollouts.append(rollout)
                slope.append(self.slopes(which, number, direction))
                name = f"values-{which}-{number:02}"
                values.append(
                    self.kept(name, lambda r=rollout, critic=critic: token_values(critic, r))
                )
        advantages = {
            name: [
                token_advantages(rollout, v, **how)
                for rollout, v in zip(rollouts, values, strict=True)
            ]
            for name, how in ESTIMATORS.items()
        }
        projections = {
            name: torch.cat(
                [
                    (a.double() * d * r.mask).sum(1)
                    for a, d, r in zip(rows, slope, rollouts, strict=True)
                ]
            )
            for name, rows in advantages.items()
        }
        whole = concatenate(rollouts, self.tokenizer.pad_token_id)
        width, scores = whole.mask.shape[1], torch.cat([rollout.scores for rollout in rollouts])
        wide = [
            torch.cat([torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in rows])
            for rows in (values, slope, advantages["L"], advantages["fitted"])
        ]
        v, d, ours, fitted = wide
        response = critic_response(v, d, whole.mask, LAGS)
        return rounded(
            {
                "projections": {name: rows.tolist() for name, rows in projections.items()},
                "response": [h._asdict() for h in response],
                "credit": true_credit(v, d, whole.mask, scores)._asdict(),
                "taken_away": taken_away([h.mean for h in response], N),
                "variance_saved": variance_saved(ours, fitted, whole.mask)._asdict(),
                "critic": diagnose_critic(v, scores, whole.mask, Accelerator()),
                "score": {"mean": float(scores.mean()), "deviation": float(scores.std())},
                "tokens": float(whole.lengths.float().mean()),
            }
        )


def _embedded(dataset: str) -> str:
    """The model that belongs to an embedded corpus."""
    name = "tiny-gemma" + dataset.removeprefix("tiny").removesuffix("-tldr")
    return name if name in EMBEDDED_MODELS else "tiny-gemma"


def found(cell: dict) -> dict:
    """Signals and contrasts of a setting."""
    rows = {
        name: torch.tensor(x, dtype=torch.double).numpy() for name, x in cell["projections"].items()
    }
    contrasts = {
        f"{a} - {b}": difference_of_signals(rows[a], rows[b])._asdict() for a, b in CONTRASTS
    }
    return {
        "signal": {name: signal_to_noise(x) for name, x in rows.items()},
        "contrasts": contrasts,
    }


def main() -> None:
    parser = arguments(__doc__, "baseline_signal")
    parser.add_argument(
        "--answers", type=int, default=0, help="of each setting; 0: as many as it says"
    )
    parser.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args()
    cells = Cells(args.out, args)
    for name in SETTINGS:
        cells.measure(name, lambda name=name: Measured(name, args).measure())
        print(name, "done", flush=True)
    cells.finish(primary=PRIMARY, found={name: found(cell) for name, cell in cells.cells.items()})


if __name__ == "__main__":
    main()
