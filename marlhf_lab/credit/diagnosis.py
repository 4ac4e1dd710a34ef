"""Why do two methods differ, or not? What critic and estimators keep of the credit, at a few moments of two short runs.

    python -m marlhf_lab.credit.diagnosis --sft runs/sft --rm runs/rm --seed 0

Token-level PPO and MA-PPO (n = 5) train with the options of the study `main`. Before, while and after this, a sample of
held-out prompts measures what share of the credit the critic predicts, and how far each estimator's gradient is from an
unbiased one. Nothing else is trained. One JSON file per seed goes to data/results/diagnosis.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from transformers import set_seed

from marlhf_lab.credit import credit, gradients, monte_carlo
from marlhf_lab.credit.ranking import rank_next_tokens
from marlhf_lab.studies.results import RESULT, rounded, write_result
from marlhf_lab.studies.study import load_study
from marlhf_lite.config.commands import PPOCommand, option_names
from marlhf_lite.config.parser import parse
from marlhf_lite.experiments.context import RunContext, join_processes
from marlhf_lite.experiments.named_rewards import text_reward
from marlhf_lite.experiments.named_rules import make_rule
from marlhf_lite.experiments.pipeline import make_reward
from marlhf_lite.models.adapters import resolve_adapter_dir
from marlhf_lite.models.loading import build_models, load_base, load_tokenizer
from marlhf_lite.tasks.loading import load_task
from marlhf_lite.training.ppo import PPOTrainer
from marlhf_lite.training.rewards import FunctionReward
from marlhf_lite.training.rollout import Rollout, prompt_batches
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.run_folder import environment

RUNS = {"PPO": "1", "MA-PPO": "5"}  # name -> tokens of a macro action
# presets of estimators, explained in `gradients`
LADDER = ("E0", "E1", "E2", "E3", "E4", "E5", "MC")
# metrics of each update that are stored
CURVE = ("update", "score_mean", "gold_mean", "kl_k1", "explained_variance", "response_length")


@dataclass(frozen=True)
class Sizes:
    """When we measure, and how much we sample then: small enough for a CPU."""

    moments: tuple[int, ...] = (0, 30)  # updates done
    prompts: int = 24
    places: int = 1  # pairs of neighbouring cuts in a response; its start is one more cut
    continuations: int = 6  # of each cut, and of each alternative token
    alternatives: int = 5
    ranked: int = 12  # responses in which next tokens are ranked
    replicates: int = 6  # answers to each prompt, for gradients


def main(argv: Sequence[str] | None = None) -> int:
    """Run with the words of a command line; an error is one line on stderr, and status 2."""
    try:
        options = read_options(sys.argv[1:] if argv is None else argv)
        sft = resolve_adapter_dir("sft", options.sft)
        rm = resolve_adapter_dir("rm", options.rm)
        run(options, sft, rm, Path(options.output_dir or "data/results/diagnosis"))
    except InputError as error:
        print(f"diagnosis: {error}", file=sys.stderr)
        return 2
    return 0


def read_options(argv: Sequence[str]) -> PPOCommand:
    """The options of the study `main`, and over them those of `argv`."""
    known = option_names(PPOCommand)
    of_study = []
    for name, value in load_study("main").shared.items():
        if name in known:  # a study also has options of other stages
            of_study.append(f"--{name}={value}")
    return parse("diagnosis", [*of_study, *argv], PPOCommand)


def run(options: PPOCommand, sft: Path, rm: Path, folder: Path, sizes: Sizes | None = None) -> dict:
    """Train both runs, measure them at each of `sizes.moments`, and write the result to `folder` after each moment.

    sft, rm: folders of adapters or models, which the runs start from. Returns the result.
    """
    sizes = sizes or Sizes()
    seed = options.seed
    context = open_context(options)
    result = {
        "method": "diagnosis",
        "seed": seed,
        "config": asdict(options),
        "environment": environment(),
        "runs": RUNS,
        "sizes": asdict(sizes),
        "moments": [],
        "curves": {},
    }
    different_prompts = list(dict.fromkeys(context.task.splits["test"]["prompt"]))
    prompts = different_prompts[: sizes.prompts]
    for name, n in RUNS.items():
        trainer = _trainer(context, sft, rm, replace(options, termination="fixed", n=n), name)
        batches = prompt_batches(trainer.prompts, trainer.config, trainer.accelerator, seed)
        for updates_done in range(trainer.total_updates + 1):
            is_moment = updates_done in sizes.moments
            # Both runs begin with the same models, so only the first run measures this common start. If there is a
            # moment already, this is the second run.
            was_measured = updates_done == 0 and len(result["moments"]) > 0
            if is_moment and not was_measured:
                moment = {"run": name, "update": updates_done}
                result["moments"].append(moment | measure(trainer, prompts, sizes, seed))
            if updates_done < trainer.total_updates:
                trainer.update(next(batches))
            # The curve so far, because the result is also written before the run ends.
            result["curves"][name] = [
                {key: row[key] for key in CURVE if key in row} for row in trainer.history
            ]
            if is_moment:
                write_result(folder / f"diagnosis-seed{seed}{RESULT}", rounded(result))
    return result


def open_context(options: PPOCommand) -> RunContext[PPOCommand]:
    """Load the data and the base model that the options name. The context has no run folder."""
    join_processes()
    task = load_task(options.dataset, size=options.size, bad_rows=options.bad_rows)
    base = load_base(options)
    function = text_reward(options.reward, task)
    return RunContext(
        options=options,
        run=None,
        task=task,
        tokenizer=load_tokenizer(options.model),
        load=lambda: base,
        reward=FunctionReward(function, options.reward) if function else None,
    )


# -- one moment -------------------------------------------------------------------------------------------------------


def measure(trainer: PPOTrainer, prompts: Sequence[str], sizes: Sizes, seed: int = 0) -> dict:
    """What the trainer's critic predicts, and its policy's gradient under each estimator; nothing is trained.

    Returns numbers and intervals by name: `score` and `tokens`, means over responses; the results of `measure_critic`;
    and `gradients`, a comparison for each estimator.
    """
    # After this, training draws the random numbers that it would have drawn without a measurement.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1_000_003 + seed)
        rollout = gradients.sample_replicates(trainer, prompts, sizes.replicates)
        measured = {
            "score": rollout.scores.mean().item(),
            "tokens": rollout.lengths.cpu().double().mean().item(),
        }
        measured |= measure_critic(trainer, rollout, len(prompts), sizes)
        measured["gradients"] = measure_gradients(trainer, rollout, sizes.replicates, len(prompts))
    return measured


def measure_critic(trainer: PPOTrainer, rollout: Rollout, count: int, sizes: Sizes) -> dict:
    """The part of `measure` that asks the critic.

    Of the first `count` responses, those with at least two tokens are cut, and continued from the cuts.

    Returns numbers and intervals by name (see `credit`): `credit_seen`, the share of the credit since the start of a
    response that the critic predicts, and `token_credit_seen`, that of a single token; `explained` variance by quarter
    of the responses; `explainable`, the highest possible at each cut, and `cuts`, where the cuts are, in shares of a
    response; `noise` of V and of V*; `ranking` of next tokens.
    """
    # 1. The critic's values of all responses, and scores of continuations from the cuts of the chosen ones.
    models = trainer.models
    values = credit.token_values(models.critic, rollout)
    rows = (rollout.lengths[:count] > 1).nonzero().flatten().cpu()
    chosen = rollout.select(rows)
    cuts = monte_carlo.even_cuts(rollout.lengths[rows], sizes.places)  # [rows, 1 + 2·places]
    scores = monte_carlo.state_scores(
        models.policy,
        trainer.tokenizer,
        chosen,
        cuts,
        reward=trainer.reward,
        sampling=trainer.sampling,
        continuations=sizes.continuations,
        progress="cuts",
    )
    values_at_cuts = values[rows].gather(1, cuts)
    # 2. After the first cut, which is the start, come pairs of neighbours (t, t + 1). With each pair as a separate row,
    # what happens between the two cuts of a row is one token's credit.
    values_in_pairs = values_at_cuts[:, 1:].unflatten(1, (-1, 2)).flatten(0, 1)
    scores_in_pairs = scores[:, 1:].unflatten(1, (-1, 2)).flatten(0, 1)
    # 3. Next tokens are ranked at one place of each of a few responses: response i takes place i modulo their number.
    places = cuts[:, 1::2]  # the first cut of each pair
    place_of_response = torch.arange(len(rows), device=cuts.device)[:, None] % places.shape[1]
    places = places.gather(1, place_of_response)
    few = torch.arange(min(sizes.ranked, len(rows)))
    noise_of_critic, noise_of_truth = credit.token_noise(values_at_cuts[:, 1:], scores[:, 1:])
    return {
        "cuts": (cuts / chosen.lengths[:, None]).cpu().double().mean(0).tolist(),
        "credit_seen": credit.credit_seen(values_at_cuts, scores),
        "token_credit_seen": credit.credit_seen(values_in_pairs, scores_in_pairs),
        "explained": credit.explained_by_quarter(values, rollout.scores, rollout.mask),
        "explainable": credit.explainable(scores),
        "noise": {"critic": noise_of_critic, "truth": noise_of_truth},
        "ranking": vars(
            rank_next_tokens(
                models.policy,
                models.critic,
                trainer.tokenizer,
                chosen.select(few),
                places[few],
                reward=trainer.reward,
                sampling=trainer.sampling,
                alternatives=sizes.alternatives,
                continuations=sizes.continuations,
                progress="next tokens",
            )
        ),
    }


def measure_gradients(trainer: PPOTrainer, rollout: Rollout, replicates: int, prompts: int) -> dict:
    """Compare the gradient of each estimator of `LADDER`, and RLOO's own, with RLOO's, for the trainer's batch size.

    `prompts` is the number of prompts, each of which has `replicates` answers in the rollout.
    """
    estimators = {
        name: gradients.preset_estimator(name, trainer.config, trainer.seed) for name in LADDER
    }
    estimates = gradients.policy_gradients(trainer, rollout, replicates, estimators)
    reference = estimates[gradients.REFERENCE]
    # A replicate has one response to each prompt.
    batch_share = trainer.config.batch_size / prompts
    return {
        name: vars(gradients.compare_gradients(estimate, reference, batch_share))
        for name, estimate in estimates.items()
    }


def _trainer(
    context: RunContext[PPOCommand], sft: Path, rm: Path, options: PPOCommand, name: str
) -> PPOTrainer:
    """A trainer with new models, as a run with these options and this seed starts."""
    set_seed(options.seed)
    models = build_models(
        context.base, sft, rm, options.critic_init, critic_head_init=options.critic_head_init
    )
    return PPOTrainer(
        models,
        context.tokenizer,
        prompts=context.task.splits["ppo"]["prompt"],
        reward=make_reward(context, rm, models.reward),
        termination=make_rule(options, options.seed),
        config=options,
        gold=context.task.gold,
        name=name,
    )


if __name__ == "__main__":
    raise SystemExit(main())
