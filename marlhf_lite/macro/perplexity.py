"""ζ by perplexity: a macro action ends before the token that raises it (§3.2.1, Appendix B.4)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from marlhf_lite.macro._checks import check_choice, clean
from marlhf_lite.macro.actions import MacroActions
from marlhf_lite.macro.termination import TerminationRule
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.precision import exact


@dataclass(frozen=True)
class Perplexity(TerminationRule):
    """Runs of tokens in which a perplexity does not rise; the token that raises it begins the next macro action.

    It reads the context value ``ref_logprobs`` [B,T], each token's log-probability under the reference model, which a
    rollout holds already. As exp is monotone, perplexities are compared by their mean negative log-probabilities (NLL).

    Args:
        rule: "macro" (§3.2.1): the perplexity of the macro action so far; a token joins unless its NLL exceeds their
            mean. "prefix" (Appendix B.4): the perplexity of the response so far, y≤t. "token" (the released code): the
            token's own perplexity.
        early: every macro action begins one token before the one that raised the perplexity, as in the released code.

    Raises:
        InputError: ref_logprobs are missing.
    """

    rule: str = "macro"
    early: bool = False

    def __post_init__(self) -> None:
        check_choice("rule", self.rule, tuple(_RISES))

    def segment(
        self, mask: Tensor, *, ref_logprobs: Tensor | None = None, **context: Any
    ) -> MacroActions:
        if ref_logprobs is None:
            raise InputError(
                "ref_logprobs: termination by perplexity needs each token's log-probability under the reference model: "
                "pass ref_logprobs [B,T]"
            )
        # Sums of float32 numbers are exact in float64 unless they differ widely, so equal tokens never count as a rise.
        nll = -exact(clean("ref_logprobs", ref_logprobs.detach(), mask))
        starts = _RISES[self.rule](nll).to(mask.device) & mask
        if self.early:  # each one token before
            starts = torch.nn.functional.pad(starts, (0, 1))[:, 1:]
        return MacroActions.from_starts(starts, mask)


def _macro_rises(nll: Tensor) -> Tensor:
    """[B,T] bool: NLL above the mean of its macro action so far. A scan, since that mean starts anew at each rise."""
    rises = torch.zeros_like(nll, dtype=torch.bool)
    total, count = torch.zeros_like(nll[:, :1]), torch.zeros_like(nll[:, :1])
    for t in range(nll.shape[1]):
        now = nll[:, t : t + 1]
        # Above the mean total / count; the first token of a response (count 0) never is.
        rises[:, t : t + 1] = rise = now * count > total
        total = total.masked_fill(rise, 0.0) + now
        count = count.masked_fill(rise, 0.0) + 1
    return rises


def _prefix_rises(nll: Tensor) -> Tensor:
    """[B,T] bool: NLL above the mean of all tokens before, which is when the mean over y≤t rises."""
    count = torch.arange(nll.shape[1], device=nll.device)
    return nll * count > nll.cumsum(1) - nll


def _token_rises(nll: Tensor) -> Tensor:
    """[B,T] bool: NLL above that of the token before."""
    return nll.diff(dim=1, prepend=nll[:, :1]) > 0


_RISES = {"macro": _macro_rises, "prefix": _prefix_rises, "token": _token_rises}
