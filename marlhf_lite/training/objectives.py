"""Objectives by name: equations of other methods, each one change of MA-PPO's, and your own.

sae       every token has its own value, and λ counts at the bounds of macro actions      arXiv 2601.07320
vapo      λ of the advantages grows with the number of macro actions                      arXiv 2504.05118
vc_ppo    the critic learns from returns with a separate λ                                arXiv 2503.01491
released  losses are means over each response first                                       the released code
k3        the KL penalty uses an estimate that is always at least 0                       joschu.net/blog/kl-approx

Each changes another equation, so you can combine them: `--objective vapo,vc_ppo` is VAPO's estimator.
"""

from contextlib import suppress

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
    """Steps are tokens; λ counts at the last token of a macro action and is 1 before it (`macro.border_lam`)."""

    def batch(self, rollout: Rollout, macro_actions: macro.MacroActions) -> Batch:
        return Batch(rollout, macro_actions, macro_actions.single_tokens)

    def gae(
        self, rewards: Tensor, values: Tensor, batch: Batch, lam: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        of_tokens = macro.border_lam(batch.macro_actions, lam)
        return super().gae(rewards, values, batch, batch.steps.sum(of_tokens))  # [B, S]


class VAPO(Objective):
    """λ = 1 − 1 / (α · macro actions) of each response, at least 0 (`macro.adaptive_lam`)."""

    alpha = 0.05

    def lam(self, batch: Batch) -> Tensor:
        return macro.adaptive_lam(batch.macro_actions.mask, self.alpha)


class VCPPO(Objective):
    """Returns, to which the critic regresses, have a separate λ; with 1 they are the plain sum of rewards."""

    critic_lam = 1.0

    def estimate(self, rewards: Tensor, values: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        advantages, _ = super().estimate(rewards, values, batch)
        _, returns = self.gae(rewards, values, batch, self.critic_lam)
        return advantages, returns


class Released(Objective):
    """Long and short responses count the same: losses are means over each response, then over responses."""

    mean = "response"


class K3(Objective):
    """The KL penalty of a token is exp(−d) − 1 + d of its log-ratio d, instead of d."""

    kl_estimator = "k3"


OBJECTIVES: dict[str, type[Objective]] = {
    "released": Released,
    "sae": SAE,
    "vapo": VAPO,
    "vc_ppo": VCPPO,
    "k3": K3,
}
# Of name=number: the attribute, and which numbers it takes.
NUMBERS = {"vapo": ("alpha", lambda x: x > 0), "vc_ppo": ("critic_lam", lambda x: 0 <= x <= 1)}
# Options without effect: steps of one token need no pooling, and vapo sets λ.
UNUSED = {"sae": ("sigma", "rho", "ratio", "value_target", "reward_pooling"), "vapo": ("lam",)}


def make_objective(config: PPOTrainerConfig) -> Objective:
    """Make the objective that `config.objective` names (see `combined`).

    Raises `InputError` also for an option that has no effect beside it.
    """
    kind = combined(config.objective)
    for name in _words(config.objective):
        for option in UNUSED.get(name.partition("=")[0], ()):
            value, default = getattr(config, option), getattr(PPOTrainerConfig, option)
            if value != default:
                fix = f"give {default}, the default, or another objective"
                raise InputError(
                    f"--{option} {value}: it has no effect beside --objective {name}: {fix}"
                )
    with named_errors("objective", config.objective):
        return kind(config)


@check
def check_objectives(options) -> None:
    """Raise `InputError` for an `--objective` that cannot be used; see `make_objective`."""
    for method in options.methods.values():
        make_objective(method)


def combined(names: str) -> type[Objective]:
    """Combine these comma-separated names into one class; without a name it is MA-PPO's `Objective`.

    Of two that change the same equation, or give the same name another number, the later one counts. Raises
    `InputError` for an unknown name, a number out of range, code that does not change `Objective`, and for `released`
    beside a custom loss, which would be divided by the number of responses.
    """
    kinds = tuple(_objective(name) for name in reversed(_words(names))) or (Objective,)
    for kind in kinds if Released in kinds else ():
        for name in ("policy_loss", "value_loss"):
            if getattr(kind, name) is not getattr(Objective, name):
                what = f"{name} divides by the number of terms, released by that of responses"
                raise InputError(f"--objective {kind.user_name}: {what}: leave one of them out")
    with named_errors("objective", names):
        return type(kinds[0].__name__, kinds, {})


def check_first_update(
    objective: Objective, batch: Batch, old: Experience, losses: dict[str, Tensor]
) -> None:
    """Raise `InputError` if a custom objective makes numbers that are not finite, or needs the entropy's gradient.

    If the models' outputs are not finite, the objective is not to blame.
    """
    name = objective.user_name or type(objective).__name__
    given = (old.logprobs, old.values, batch.rollout.ref_logprobs, batch.rollout.scores)
    named = {"advantages": old.advantages, "returns": old.returns} | losses
    wrong = [made for made, x in named.items() if not x.isfinite().all()]
    if wrong and all(x.isfinite().all() for x in given):
        raise InputError(
            f"--objective {name}: {', '.join(wrong)} of the first update are not finite: correct it"
        )
    outputs = ModelOutputs(old.logprobs, old.entropy.clone().requires_grad_(), old.values)
    loss, _ = objective.losses(batch, outputs, old, objective.counts(batch))
    if loss.requires_grad:
        fix = "leave it out, or write outputs.entropy.detach() if it is a weight"
        raise InputError(
            f"--objective {name}: a loss uses outputs.entropy, which has no gradient: {fix}"
        )


def _words(names: str) -> list[str]:
    """The names, each once."""
    words = [name.strip() for name in names.split(",") if name.strip()]
    return list({word.partition("=")[0]: word for word in words}.values())


def _objective(name: str) -> type[Objective]:
    known = f"{', '.join(OBJECTIVES)} (comma-separated)"
    if is_user_code(name):
        kind = import_user_code("objective", name, known)
        if not (isinstance(kind, type) and issubclass(kind, Objective)):
            raise InputError(
                f"--objective {name}: give a subclass of marlhf_lite.training.objective.Objective"
            )
        named = {
            word for ours in kind.__mro__ if not issubclass(Objective, ours) for word in vars(ours)
        }
        if not named & {word for word in vars(Objective) if not word.startswith("__")}:
            equations = "rewards, estimate, policy_loss or value_loss"
            raise InputError(f"--objective {name}: changes no equation: name a method {equations}")
        return type(kind.__name__, (kind,), {"user_name": name})
    word, _, number = name.partition("=")
    if word not in OBJECTIVES:
        raise InputError(f"--objective {name}: unknown: give {known}, or package.module:Class")
    if not number:
        return OBJECTIVES[word]
    with suppress(KeyError, ValueError):
        attribute, is_valid = NUMBERS[word]
        if is_valid(float(number)):
            return type(OBJECTIVES[word].__name__, (OBJECTIVES[word],), {attribute: float(number)})
    fix = "give vapo an alpha above 0, vc_ppo a lambda from 0 to 1, and the others no number"
    raise InputError(f"--objective {name}: {fix}")
