"""How much signal has the gradient of one batch, by estimator, in a language model that has learned nothing yet?

1,024 answers of SmolLM2-135M-Instruct, untrained, to the training questions of `data/sentiment`, sampled once as in the
study `sentiment_settle`: 64 tokens each, and the clipped valence of the first 12 words as the reward. They are 64
batches of 16, in two halves. The reference of a half is the gradient of the policy's adapter over its 512 answers with
lambda = 1 and the half's mean reward as the baseline. Each batch's gradient is projected on the reference of the OTHER
half. Four estimators see the same answers and the same critic: PPO (lambda 0.95), MA-PPO (n = 5, lambda 0.95),
PPO lam^(1/5), and PPO lam=1.

The critic is one that began with a value head of zero and was trained as PPO's is, at the rate of 0.003, for 16
updates on the first 16 batches of the other half, towards the final score (lambda = 1). Beside it stand the zero head
before training, a constant (the other half's mean reward), and a normal head before and after the same training.

Fixed before the first run. PRIMARY OUTCOME: signal-to-noise ratio of MA-PPO over that of PPO, with the critic whose
head began at zero, trained: mean over standard deviation of the 64 projections; 95 % percentile interval of 10,000
bootstrap draws of batches, the reference directions held fixed. Predicted: 4 to 6. The mechanism, that macro actions
let the first words' credit through, is refuted where the interval lies below 1.5. SECOND: the same for lam^(1/5) over
PPO, predicted: near MA-PPO's. All other ratios are exploration.

Also fixed: the critic's noise (root mean square of V(s_t+1) − V(s_t)) and explained variance of the score on the half
that it was not trained on, head of zero against normal head, before and after training. The default for new heads can
become zero if its noise is lower and the embedded tasks lose nothing.

    marlhf sft --model FOLDER --dataset data/sentiment --sft_epochs 0 --lora_r 4 --lora_alpha 8 --output_dir SFT
    python benchmarks/gradient_signal.py --model FOLDER --sft SFT

The program was tried on eight answers with another seed. Each batch is kept in `--folder`, so an interrupted run goes
on where it stopped; `--half 0` and `--half 1` may run side by side, and the last call without `--half` writes the
record. `--afterwards` looks for the reason of what was found, in the same parts, and writes a record of its own:
MA-PPO whose value of a macro action is that of its first token (`--sigma start`), which has not read the macro action's
own words; how far the trained critic's values move with the score, token by token; and the projection of an advantage
of 1 for every token, which is 0 on average only if answers are sampled from the policy itself (here at a temperature of
0.8, among 50 tokens).

`--paid last` pays the last 12 words in place of the first, as the study `sentiment_near` does; give it a `--folder` and
an `--out` of its own. It was added on 2026-11-27, when that study was known: exploration, to see whether the first
gradient says why macro actions earn less there. Fixed before its run: the number is signal-to-noise of MA-PPO over that
of PPO. Predicted: below 1 with the constant critic, where a formula for independent tokens and a critic that sees
nothing says 0.70, and below 1 with the trained head of zero. The reason given in `docs/results.md`, credit for words
that did not earn it, is refuted where the constant critic's interval lies above 1.
"""

import os
import time
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator
from cells import Cells, arguments

from marlhf_lab.corpora.sentiment import first_valence, last_valence
from marlhf_lab.credit.credit import token_values
from marlhf_lab.credit.gradient_signal import (
    projection,
    ratio_of_signals,
    signal_to_noise,
    slopes,
    token_advantages,
)
from marlhf_lite.config.options import ModelConfig
from marlhf_lite.models.actor_critic import trainable
from marlhf_lite.models.adapters import resolve_adapter_dir
from marlhf_lite.models.loading import build_models, load_base, load_tokenizer
from marlhf_lite.tasks.chats import chat_writer, expect_chats
from marlhf_lite.tasks.loading import load_task
from marlhf_lite.training.critic_metrics import critic_metrics, critic_numbers
from marlhf_lite.training.metrics import moments
from marlhf_lite.training.rollout import (
    Rollout,
    Sampling,
    concatenate,
    generate,
    generate_in_batches,
    prompt_stream,
)

DATA = Path(__file__).parents[1] / "data" / "sentiment"
SEED = 850_000
SIZE = 16
BATCHES = 64
UPDATES = 16
RATE = 3e-3
SAMPLING = Sampling(64, temperature=0.8, top_k=50, min_new_tokens=64)
LAM = 0.95
ESTIMATORS = {
    "PPO": (1, LAM),
    "MA-PPO": (5, LAM),
    "PPO lam^(1/5)": (1, LAM**0.2),
    "PPO lam=1": (1, 1.0),
}
HEADS = ("zero", "normal")
AFTERWARDS = {  # estimators of `--afterwards`
    "PPO": (1, LAM),
    "MA-PPO": (5, LAM),
    "MA-PPO, first value": (5, LAM, "start"),
    "PPO lam^(1/5)": (1, LAM**0.2),
}
# Length of a step along a unit vector of the adapter's weights: log-probabilities change by some hundredths.
STEP = 0.02
PAID = {"first": first_valence, "last": last_valence}  # which 12 words
CHECKED = 2  # batches of each half whose gradient is also taken directly


class Signal:
    """The measurement of both halves, with a file in `--folder` for each of its parts."""

    def __init__(self, args):
        self.folder = args.folder
        self.batches = args.batches
        self.size = args.size
        self.reward = PAID[args.paid]
        self.tokenizer = load_tokenizer(args.model)
        self.base = load_base(ModelConfig(model=args.model))
        expect_chats(self.tokenizer)
        task = load_task(str(DATA), chat=chat_writer(self.tokenizer, "auto"))
        prompts = prompt_stream(list(task.splits["ppo"]["prompt"]), SEED)
        self.prompts = list(islice(prompts, self.batches * self.size))
        self.sft = resolve_adapter_dir("sft", args.sft)
        self.policy = build_models(self.base, self.sft, None, "sft").policy
        self.policy.eval()
        self.parameters = trainable(self.policy)
        self.folder.mkdir(parents=True, exist_ok=True)

    def half(self, which: int) -> range:
        """The numbers of the batches of half 0 or 1."""
        middle = self.batches // 2
        return range(middle * which, middle * (which + 1))

    def kept(self, name: str, make):
        """What `make()` returns; if the part's file is there already, it is read instead."""
        path = self.folder / f"{name}.pt"
        if not path.exists():
            begin = time.time()
            found = make()
            # Under another name until it is whole: another process may wait for it, or make it, too.
            new = path.with_suffix(f".{os.getpid()}.tmp")
            torch.save(found, new)
            os.replace(new, path)
            print(f"{time.strftime('%H:%M:%S')} {name}: {time.time() - begin:.0f} s", flush=True)
        return torch.load(path, weights_only=False)

    def waited(self, name: str):
        """A part that another process may still have to make: wait until its file is there, and read it."""
        while not (self.folder / f"{name}.pt").exists():
            time.sleep(5)
        return self.kept(name, None)  # with its file there, nothing is made

    # -- parts --------------------------------------------------------------------------------------------------------

    def answers(self, batch: int) -> Rollout:
        """A batch of scored answers."""

        def make():
            torch.manual_seed(SEED + batch)
            prompts = self.prompts[batch * self.size : (batch + 1) * self.size]
            rollout = generate_in_batches(
                generate, 0, self.policy.model, self.tokenizer, prompts, SAMPLING
            )[0]
            scores = torch.tensor(self.reward(rollout.prompts, rollout.responses))
            return vars(rollout) | {"scores": scores}

        return Rollout(**self.kept(f"answers-{batch:02}", make))

    def of_half(self, which: int) -> list[Rollout]:
        """The scored answers of a half, batch by batch."""
        return [Rollout(**self.waited(f"answers-{batch:02}")) for batch in self.half(which)]

    def logprobs(self, rollout: Rollout):
        """[B, T] log-probabilities of the answers' tokens."""
        return self.policy(rollout.tokens, rollout.attention_mask, rollout.mask.shape[1])[0]

    def gradient(self, rollout: Rollout, advantages) -> torch.Tensor:
        """[W] gradient of the mean over tokens of Â log π, with W weights of the adapter and advantages Â [B, T]."""
        total = 0.0
        for rows in torch.arange(len(rollout)).split(8):
            part = rollout.select(rows).trim()
            weights = advantages[rows][:, : part.mask.shape[1]]
            loss = (self.logprobs(part) * weights)[part.mask].sum() / rollout.mask.sum()
            grads = torch.autograd.grad(loss, self.parameters)
            total = total + torch.cat([grad.flatten() for grad in grads])
        return total

    def reference(self, batch: int, baseline: float) -> torch.Tensor:
        """[W] a batch's part of its half's reference: the gradient with score − baseline as advantage of all tokens."""

        def make():
            rollout = self.answers(batch)
            above_baseline = (rollout.scores - baseline)[:, None]
            return self.gradient(rollout, above_baseline.expand(rollout.mask.shape))

        return self.kept(f"reference-{batch:02}", make)

    def direction(self, which: int) -> torch.Tensor:
        """[W] the unit vector of the reference gradient of a half, which is the sum over its batches."""
        total = sum(self.waited(f"reference-{batch:02}").double() for batch in self.half(which))
        return (total / total.norm()).float()

    def slopes(self, batch: int, direction) -> torch.Tensor:
        """[B, T] slopes of the tokens' log-probabilities along a direction [W] of the adapter's weights."""

        def make():
            rollout = self.answers(batch)
            return slopes(lambda: self._all_logprobs(rollout), self.parameters, direction, STEP)

        return self.kept(f"slopes-{batch:02}", make)

    def _all_logprobs(self, rollout: Rollout) -> torch.Tensor:
        """`logprobs` of many answers, eight rows at a time."""
        parts = [rollout.select(rows).trim() for rows in torch.arange(len(rollout)).split(8)]
        return torch.cat([rollout.widen(self.logprobs(part)) for part in parts])

    def critic(self, head: str, which: int):
        """The critic of a half, trained on answers of the other half; `head` says how its value head begins."""
        critic = build_models(self.base, self.sft, None, "sft", critic_head_init=head).critic
        parameters = trainable(critic)

        def make():
            optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)
            others = self.of_half(1 - which)
            for update, rollout in enumerate(others[:UPDATES]):
                optimizer.param_groups[0]["lr"] = RATE * min(1, (update + 1) / 5)  # warm-up
                for rows in torch.arange(len(rollout)).split(8):
                    part = rollout.select(rows).trim()
                    values = part.before_tokens(critic(part.tokens, part.attention_mask))
                    errors = (values - part.scores[:, None])[part.mask]
                    loss = 0.5 * errors.square().sum() / rollout.mask.sum()
                    loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                optimizer.zero_grad()
                now = time.strftime("%H:%M:%S")
                print(f"{now} critic {head} {which}: update {update + 1}", flush=True)
            return [p.detach().clone() for p in parameters]

        weights = self.kept(f"critic-{head}-{which}", make)
        with torch.no_grad():
            for p, value in zip(parameters, weights, strict=True):
                p.copy_(value)
        return critic

    def values(self, name: str, batch: int, critic) -> torch.Tensor:
        """[B, T] values V(s_t) of a batch by a critic; `name` is the critic's in the names of parts."""
        part = f"values-{name}-{batch:02}"
        return self.kept(part, lambda: token_values(critic, self.answers(batch)))

    # -- the halves ---------------------------------------------------------------------------------------------------

    def run_half(self, which: int) -> None:
        """Make all parts of one half. For the other half's reference, wait until it is there."""
        rollouts = [self.answers(batch) for batch in self.half(which)]
        baseline = float(torch.cat([rollout.scores for rollout in rollouts]).mean())
        for batch in self.half(which):
            self.reference(batch, baseline)
        other = self.direction(1 - which)
        for batch in self.half(which):
            self.slopes(batch, other)
        for batch in list(self.half(which))[:CHECKED]:
            self.kept(f"check-{batch:02}", lambda batch=batch: self.check(batch, other))
        for head in HEADS:
            trained = self.critic(head, which)
            for batch in self.half(which):
                self.values(f"{head}-trained", batch, trained)
        start = build_models(self.base, self.sft, None, "sft").critic
        for batch in self.half(which):
            self.values("normal-start", batch, start)

    def check(self, batch: int, direction) -> tuple[float, float]:
        """The projection of PPO's gradient on a direction, computed twice: from slopes and from the gradient itself.

        The values are 0 at every token.
        """
        rollout = self.answers(batch)
        slope = self.slopes(batch, direction)
        advantages = token_advantages(rollout, torch.zeros(rollout.mask.shape), *ESTIMATORS["PPO"])
        direct = self.gradient(rollout, advantages).double() @ direction.double()
        return projection(advantages, slope, rollout.mask), float(direct)

    # -- the record ---------------------------------------------------------------------------------------------------

    def critics(self, which: int) -> dict[str, list[torch.Tensor]]:
        """Name of a critic -> its values [B, T] on each batch of a half.

        A value head of zero gives 0 everywhere before training. The constant is the other half's mean score.
        """
        rollouts = self.of_half(which)
        mean = float(torch.cat([rollout.scores for rollout in self.of_half(1 - which)]).mean())
        found = {"zero, start": [torch.zeros(rollout.mask.shape) for rollout in rollouts]}
        found["constant"] = [torch.full(rollout.mask.shape, mean) for rollout in rollouts]
        for name in ("zero-trained", "normal-start", "normal-trained"):
            values = [self.waited(f"values-{name}-{batch:02}") for batch in self.half(which)]
            found[name.replace("-", ", ")] = values
        return found

    def projections(self, estimators=ESTIMATORS) -> dict[str, dict[str, list[float]]]:
        """Critic -> estimator -> the projection of each batch."""
        found: dict[str, dict[str, list[float]]] = {}
        for which in (0, 1):
            for critic, values in self.critics(which).items():
                rows = found.setdefault(critic, {name: [] for name in estimators})
                for batch, rollout, value in zip(
                    self.half(which), self.of_half(which), values, strict=True
                ):
                    slope = self.waited(f"slopes-{batch:02}")
                    for name, how in estimators.items():
                        advantages = token_advantages(rollout, value, *how)
                        rows[name].append(projection(advantages, slope, rollout.mask))
        return found

    def critic_rows(self) -> dict[str, dict[str, float]]:
        """Critic -> its metrics on all answers: what it knows of the final score, and its noise."""
        first = self.critics(0)
        second = self.critics(1)
        rollouts = [*self.of_half(0), *self.of_half(1)]
        rollout = concatenate(rollouts, self.tokenizer.pad_token_id)
        scores = torch.cat([part.scores for part in rollouts])
        rows = {}
        for name in first:
            values = torch.cat(first[name] + second[name])
            numbers = critic_numbers(values, scores, rollout.mask)
            rows[name] = critic_metrics(moments(numbers, Accelerator()))
        return rows

    def correlations(self) -> dict[str, list[float]]:
        """Critic -> the correlation of its value before each token with the final score, over all answers."""
        first = self.critics(0)
        second = self.critics(1)
        rollouts = [*self.of_half(0), *self.of_half(1)]
        scores = torch.cat([rollout.scores for rollout in rollouts])
        found = {}
        for name in first:
            if name in ("constant", "zero, start"):  # their values do not vary
                continue
            values = torch.cat(first[name] + second[name])  # [answers, T]
            found[name] = []
            for before_token in values.T:
                pair = torch.stack([before_token, scores])
                found[name].append(float(torch.corrcoef(pair)[0, 1]))
        return found

    def ones(self) -> list[float]:
        """The projection of each batch for an advantage of 1 for every token."""
        found = []
        for which in (0, 1):
            for batch, rollout in zip(self.half(which), self.of_half(which), strict=True):
                slope = self.waited(f"slopes-{batch:02}")
                ones = torch.ones(rollout.mask.shape)
                found.append(projection(ones, slope, rollout.mask))
        return found


def summarise(projections: dict) -> dict:
    """Signal-to-noise of each estimator with each critic, and their ratios over PPO."""
    found = {}
    for critic, rows in projections.items():
        signals = {}
        over_ppo = {}
        for name, projections_of_batches in rows.items():
            signals[name] = signal_to_noise(projections_of_batches)
            if name != "PPO":
                over_ppo[name] = ratio_of_signals(rows, name, "PPO")._asdict()
        found[critic] = {"signal_to_noise": signals, "over_PPO": over_ppo}
    return found


def main() -> None:
    parser = arguments(__doc__, "gradient_signal")
    parser.add_argument("--sft", required=True, help="folder that `marlhf sft` wrote")
    parser.add_argument(
        "--half", type=int, choices=(0, 1), help="measure one half alone, and write no record"
    )
    parser.add_argument("--batches", type=int, default=BATCHES)
    parser.add_argument("--size", type=int, default=SIZE, help="answers of a batch")
    parser.add_argument("--paid", choices=PAID, default="first", help="the 12 words that are paid")
    parser.add_argument(
        "--afterwards", action="store_true", help="from the parts: the reason of what was found"
    )
    args = parser.parse_args()
    signal = Signal(args)
    if args.afterwards:
        cells = Cells(args.out.with_stem(f"{args.out.stem}_afterwards"), args)
        projections = cells.measure("projections", signal.projections, AFTERWARDS)
        cells.measure("correlations", signal.correlations)
        ones = cells.measure("ones", signal.ones)
        cells.finish(
            primary="zero, trained", found=summarise(projections), ones=signal_to_noise(ones)
        )
        return
    if args.half is not None:
        signal.run_half(args.half)
        return
    cells = Cells(args.out, args)
    # Both references come first: `run_half` waits for that of the other half, which nobody else would make.
    for which in (0, 1):
        rollouts = [signal.answers(batch) for batch in signal.half(which)]
        baseline = float(torch.cat([rollout.scores for rollout in rollouts]).mean())
        for batch in signal.half(which):
            signal.reference(batch, baseline)
    for which in (0, 1):
        signal.run_half(which)
    projections = cells.measure("projections", signal.projections)
    critics = cells.measure("critics", signal.critic_rows)
    checks = []
    scores_of_batches = []
    for which in (0, 1):
        for batch in list(signal.half(which))[:CHECKED]:
            checks.append(signal.waited(f"check-{batch:02}"))
        scores_of_batches += [rollout.scores for rollout in signal.of_half(which)]
    scores = torch.cat(scores_of_batches)
    rewards = {"mean": float(scores.mean()), "deviation": float(scores.std())}
    found = summarise(projections)
    cells.finish(primary="zero, trained", found=found, rewards=rewards, checks=checks)
    for critic, row in found.items():
        signals = {name: round(x, 3) for name, x in row["signal_to_noise"].items()}
        print(f"{critic:<16}", signals, row["over_PPO"])
        print(f"{'':<16}", critics[critic])


if __name__ == "__main__":
    main()
