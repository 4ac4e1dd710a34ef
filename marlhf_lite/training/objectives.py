"""Objectives by name: equations of other methods, each one change of MA-PPO's, and your own.

sae       every token has its own value, and λ counts at the bounds of macro actions      arXiv 2601.07320
vapo      λ of the advantages grows with the number of macro actions                      arXiv 2504.05118
vc_ppo    the critic learns from returns with a separate λ                                arXiv 2503.01491
released  losses are means over each response first                                       the released code
k3        the KL penalty uses an estimate that is always at least 0                       joschu.net/blog/kl-approx

Each changes another equation, so you can combine them: `--objective vapo,vc_ppo` is VAPO's estimator.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from marlhf_lite.config.method import PPOTrainerConfig
from marlhf_lite.training.experience import Batch, Experience, ModelOutputs
from marlhf_lite.training.objective import Objective, Variant
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.user_code import import_user_code, is_user_code, named_errors

# What a name changes in `Variant`.
CHANGES_OF_VARIANT: dict[str, dict[str, Any]] = {
    "released": {"loss_mean": "response"},
    "sae": {"steps_are_tokens": True},
    "vapo": {"alpha_of_lam": 0.05},
    "vc_ppo": {"lam_of_returns": 1.0},
    "k3": {"kl_estimator": "k3"},
}
# Which numbers name=number takes.
IS_VALID_NUMBER: dict[str, Callable[[float], bool]] = {
    "vapo": lambda alpha: alpha > 0,
    "vc_ppo": lambda lam: 0 <= lam <= 1,
}
# Options without effect beside a name: steps of one token need no pooling, and vapo sets λ.
OPTIONS_WITHOUT_EFFECT = {
    "sae": ("sigma", "rho", "ratio", "value_target", "reward_pooling"),
    "vapo": ("lam",),
}


def make_objective(config: PPOTrainerConfig) -> Objective:
    """Make the objective that `config.objective` names (see `build_objective`).

    Also raises `InputError` if an option was changed that has no effect with this objective.
    """
    objective = build_objective(config.objective, config)
    for word in _each_name_once(config.objective):
        name, _, _ = word.partition("=")
        for option in OPTIONS_WITHOUT_EFFECT.get(name, ()):
            value = getattr(config, option)
            default = getattr(PPOTrainerConfig, option)
            if value != default:
                fix = f"give {default}, the default, or another objective"
                raise InputError(
                    f"--{option} {value}: it has no effect beside --objective {word}: {fix}"
                )
    return objective


def check_objectives(methods: dict[str, PPOTrainerConfig]) -> None:
    """Raise `InputError` for an `--objective` of these PPO runs that cannot be used; see `make_objective`."""
    for method in methods.values():
        make_objective(method)


def build_objective(names: str, config: PPOTrainerConfig) -> Objective:
    """Combine these comma-separated names; without a name it is MA-PPO's `Objective`.

    If a name comes twice, the later one counts. If a user's class changes an equation, that equation counts, whatever
    the names say.

    Raises `InputError` for an unknown name, a number out of range, code that does not change `Objective`, a second
    class, and for `released` beside a user's own loss: `released` gives a loss the number of responses as its divisor,
    and a user's loss expects the number of its terms.
    """
    kind = Objective
    user_name = ""
    changes: dict[str, Any] = {}
    for word in _each_name_once(names):
        if not is_user_code(word):
            changes |= _changes_of_variant(word)
        elif not user_name:
            kind = _user_class(word)
            user_name = word
        else:
            fix = f"write one class that inherits from both, in place of {user_name}"
            raise InputError(f"--objective {word}: a second class: {fix}")
    variant = Variant(**changes)
    if variant.loss_mean == "response":
        _check_losses_are_ours(kind, user_name)
    with named_errors("objective", names):
        return kind(config, variant, user_name)


def check_first_update(
    objective: Objective, batch: Batch, old: Experience, losses: dict[str, Tensor]
) -> None:
    """Raise `InputError` if a custom objective makes numbers that are not finite, or needs the entropy's gradient.

    If the models' outputs are not finite already, the objective is not to blame, and nothing is raised for that.
    `losses` are the losses and stats of the first optimizer step, as the objective gave them.
    """
    name = objective.user_name or type(objective).__name__
    outputs_of_models = (
        old.logprobs,
        old.values,
        batch.rollout.ref_logprobs,
        batch.rollout.scores,
    )
    # 1. Numbers that are not finite.
    are_outputs_finite = all(bool(x.isfinite().all()) for x in outputs_of_models)
    results = {"advantages": old.advantages, "returns": old.returns} | losses
    nonfinite = [what for what, x in results.items() if not x.isfinite().all()]
    if nonfinite and are_outputs_finite:
        what = f"{', '.join(nonfinite)} of the first update are not finite"
        raise InputError(f"--objective {name}: {what}: correct it")

    # 2. The entropy's gradient, which no pass of the models computes. The outputs here have no gradient except the
    # entropy, so the loss has one exactly if it uses the entropy.
    entropy = old.entropy.clone().requires_grad_()
    outputs = ModelOutputs(old.logprobs, entropy, old.values)
    loss, _ = objective.losses(batch, outputs, old, objective.counts(batch))
    if loss.requires_grad:
        fix = "leave it out, or write outputs.entropy.detach() if it is a weight"
        raise InputError(
            f"--objective {name}: a loss uses outputs.entropy, which has no gradient: {fix}"
        )


def _each_name_once(names: str) -> list[str]:
    """The comma-separated names, each once: `vapo=0.1` takes the place of an earlier `vapo`."""
    words = {}
    for word in names.split(","):
        name, _, _ = word.strip().partition("=")
        if name:
            words[name] = word.strip()
    return list(words.values())


def _text_of_known_names() -> str:
    return f"{', '.join(CHANGES_OF_VARIANT)} (comma-separated)"


def _changes_of_variant(word: str) -> dict[str, Any]:
    """What `name` or `name=number` changes in `Variant`."""
    name, _, number = word.partition("=")
    if name not in CHANGES_OF_VARIANT:
        raise InputError(
            f"--objective {word}: unknown: give {_text_of_known_names()}, or package.module:Class"
        )
    if not number:
        return CHANGES_OF_VARIANT[name]
    fix = "give vapo an alpha above 0, vc_ppo a lambda from 0 to 1, and the others no number"
    try:
        value = float(number)
    except ValueError:
        raise InputError(f"--objective {word}: {fix}") from None
    if name not in IS_VALID_NUMBER or not IS_VALID_NUMBER[name](value):
        raise InputError(f"--objective {word}: {fix}")
    (field,) = CHANGES_OF_VARIANT[name]  # each of these names changes one field
    return {field: value}


def _user_class(word: str) -> type[Objective]:
    """The subclass of `Objective` that package.module:Class names."""
    kind = import_user_code("objective", word, _text_of_known_names())
    if not (isinstance(kind, type) and issubclass(kind, Objective)):
        raise InputError(
            f"--objective {word}: give a subclass of marlhf_lite.training.objective.Objective"
        )
    methods = [name for name in vars(Objective) if not name.startswith("__")]
    if all(getattr(kind, name) is getattr(Objective, name) for name in methods):
        equations = "rewards, estimate, policy_loss or value_loss"
        raise InputError(f"--objective {word}: changes no equation: name a method {equations}")
    return kind


def _check_losses_are_ours(kind: type[Objective], user_name: str) -> None:
    """Raise `InputError` if a user's class has its own loss, because `released` would divide it by a wrong number."""
    for name in ("policy_loss", "value_loss"):
        if getattr(kind, name) is not getattr(Objective, name):
            what = f"{name} divides by the number of terms, released by that of responses"
            raise InputError(f"--objective {user_name}: {what}: leave one of them out")
