"""Objectives by name: equations of other methods, each a change of MA-PPO's, and the user's own.

sae       every token has its own value, and λ stands at the borders of macro actions    arXiv 2601.07320
vapo      λ of the advantages grows with the number of macro actions                      arXiv 2504.05118
vc_ppo    the critic learns from returns with a λ of its own                              arXiv 2503.01491
released  losses are means over each response first                                       the released code
k3        the KL penalty is the estimate that is never negative                            joschu.net/blog/kl-approx

Each changes another equation, so several of them go together: `--objective vapo,vc_ppo` is VAPO's estimator.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from marlhf_lite import macro
from marlhf_lite.config.method import PPOTrainerConfig
from marlhf_lite.training.experience import Batch, Experience, ModelOutputs
from marlhf_lite.training.objective import Objective
from marlhf_lite.training.rollout import Rollout
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.preflight import check
from marlhf_lite.utils.user_code import import_user_code, is_user_code, named_errors


class SAE(Objective):
    """Steps are tokens; λ counts at the last token of a macro action and is 1 inside (`macro.border_lam`)."""

    def batch(self, rollout: Rollout, macro_actions: macro.MacroActions) -> Batch:
        return Batch(rollout, macro_actions, macro_actions.single_tokens)

    def gae(self, rewards: Tensor, values: Tensor, batch: Batch, lam: float | Tensor) -> tuple[Tensor, Tensor]:
        of_tokens = macro.border_lam(batch.macro_actions, lam)
        return super().gae(rewards, values, batch, batch.steps.sum(of_tokens))  # [B, S], without what others said


class VAPO(Objective):
    """λ = 1 − 1 / (α · macro actions) of each response, at least 0 (`macro.adaptive_lam`)."""

    alpha = 0.05

    def lam(self, batch: Batch) -> Tensor:
        return macro.adaptive_lam(batch.macro_actions.mask, self.alpha)


class VCPPO(Objective):
    """Returns, to which the critic regresses, have their own λ; 1 is the plain sum of rewards."""

    critic_lam = 1.0

    def estimate(self, rewards: Tensor, values: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        advantages, _ = super().estimate(rewards, values, batch)
        _, returns = self.gae(rewards, values, batch, self.critic_lam)
        return advantages, returns


class Released(Objective):
    """A response counts the same however long it is: losses are means over each response, then over responses."""

    mean = "response"


class K3(Objective):
    """The KL penalty of a token is exp(−d) − 1 + d of its log-ratio d, not d itself."""

    kl_estimator = "k3"


OBJECTIVES: dict[str, type[Objective]] = {"released": Released, "sae": SAE, "vapo": VAPO, "vc_ppo": VCPPO, "k3": K3}
NUMBERS = {"vapo": ("alpha", math.inf), "vc_ppo": ("critic_lam", 1.0)}  # name=number: what it sets, and its upper bound
# Options that have no effect: steps of one token need no pooling, and λ is vapo's own.
UNUSED = {"sae": ("sigma", "rho", "ratio", "value_target", "reward_pooling"), "vapo": ("lam",)}


def make_objective(config: PPOTrainerConfig) -> Objective:
    """The objective that `config.objective` names (see `combined`).

    Raises `InputError` also for an option that has no effect beside it.
    """
    kind = combined(config.objective)
    for name in _words(config.objective):
        _check_used(config, name)
    with named_errors("objective", config.objective):
        return kind(config)


@check
def check_objectives(options) -> None:
    """Raise `InputError` for an `--objective` that cannot be used; see `make_objective`."""
    for method in options.methods.values():
        make_objective(method)


def combined(names: str) -> type[Objective]:
    """The class of these names, comma-separated: MA-PPO's own where there are none.

    Several make one class of all of them; of two that change the same equation, or give the same name another number,
    the later one counts. Raises `InputError` that names the option, for an unknown name, a number out of range, and for
    what is no `Objective`, and for `released` beside a loss of the user's own.
    """
    kinds = tuple(_objective(name) for name in reversed(_words(names))) or (Objective,)
    if Released in kinds:
        _check_losses(kinds)
    with named_errors("objective", names):
        return type(kinds[0].__name__, kinds, {})


def check_first_update(objective: Objective, batch: Batch, old: Experience, losses: dict[str, Tensor]) -> None:
    """Raise `InputError` where a user's objective makes no finite numbers, or needs a gradient that there is not."""
    name = objective.user_name or type(objective).__name__
    if wrong := _nonfinite(batch, old, losses):
        raise InputError(f"--objective {name}: {', '.join(wrong)} of the first update are not finite: correct it")
    outputs = ModelOutputs(old.logprobs, old.entropy.clone().requires_grad_(), old.values)
    loss, _ = objective.losses(batch, outputs, old, objective.counts(batch))
    if loss.requires_grad:
        fix = "leave it out, or write outputs.entropy.detach() where it is a weight"
        raise InputError(f"--objective {name}: a loss uses outputs.entropy, which has no gradient: {fix}")


def _nonfinite(batch: Batch, old: Experience, losses: dict[str, Tensor]) -> list[str]:
    """What is not finite of advantages, returns and losses; nothing where the models' outputs are at fault."""
    outputs = (old.logprobs, old.values, batch.rollout.ref_logprobs, batch.rollout.scores)
    if not all(x.isfinite().all() for x in outputs):
        return []
    named = {"advantages": old.advantages, "returns": old.returns} | losses
    return [name for name, x in named.items() if not x.isfinite().all()]


def _check_losses(kinds: Sequence[type[Objective]]) -> None:
    """Raise `InputError` where a loss of the user's own would be divided by the number of responses."""
    for kind in kinds:
        for name in ("policy_loss", "value_loss"):
            if getattr(kind, name) is not getattr(Objective, name):
                what = f"{name} divides by the number of terms, released by that of responses"
                raise InputError(f"--objective {kind.user_name}: {what}: leave one of them out")


def _words(names: str) -> list[str]:
    """The names, each once."""
    words = [name.strip() for name in names.split(",") if name.strip()]
    return list({word.partition("=")[0]: word for word in words}.values())


def _check_used(config: PPOTrainerConfig, name: str) -> None:
    """Raise `InputError` where an option has another value than its default, and no effect beside this objective."""
    for option in UNUSED.get(name.partition("=")[0], ()):
        value, default = getattr(config, option), getattr(PPOTrainerConfig, option)
        if value != default:
            fix = f"give {default}, which is the default, or another objective"
            raise InputError(f"--{option} {value}: it has no effect beside --objective {name}: {fix}")


def _objective(name: str) -> type[Objective]:
    known = f"{', '.join(OBJECTIVES)} (comma-separated)"
    if is_user_code(name):
        kind = import_user_code("objective", name, known)
        if not (isinstance(kind, type) and issubclass(kind, Objective)):
            raise InputError(f"--objective {name}: no subclass of marlhf_lite.training.objective.Objective: give one")
        named = {word for ours in kind.__mro__ if not issubclass(Objective, ours) for word in vars(ours)}
        if not named & {word for word in vars(Objective) if not word.startswith("__")}:
            equations = "rewards, estimate, policy_loss or value_loss"
            raise InputError(f"--objective {name}: changes no equation: name a method {equations}")
        return type(kind.__name__, (kind,), {"user_name": name})
    word, _, number = name.partition("=")
    if word not in OBJECTIVES:
        raise InputError(f"--objective {name}: unknown: give {known}, or package.module:Class")
    return _with_number(word, number) if number else OBJECTIVES[word]


def _with_number(word: str, text: str) -> type[Objective]:
    """The objective with another number than its own: α of vapo, λ of vc_ppo."""
    attribute, most = NUMBERS.get(word, ("", -1.0))
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= most or (word == "vapo" and number == 0):
        fix = "give vapo an alpha above 0, vc_ppo a lambda from 0 to 1, and the others no number"
        raise InputError(f"--objective {word}={text}: {fix}")
    kind = OBJECTIVES[word]
    return type(kind.__name__, (kind,), {attribute: number})
