"""Macro actions: pure tensor functions, vectorised over a batch with a different segmentation for each response.

actions      what a macro action is                          §3.1, §3.2
termination  ζ, where one ends; by a number of tokens         §3.2.1
lengths      ζ by a list of lengths, also in a random order   §3.2.1
turns        each turn as a row, if an environment speaks in between
perplexity   ζ by the reference model's perplexity           §3.2.1, Appendix B.4
largest_change  ζ where the critic or the policy is least sure  arXiv 2505.23564
summary      lengths of a segmentation, agreement of two
values       its value (σ) and its reward                    §3.2.2, Appendix D.1
advantages   GAE over macro actions, λ per step              Appendix E
lambdas      λ as SAE and VAPO choose it
losses       policy and value loss                           §3.2.2, Algorithm 1, Appendix E

Functions raise `InputError` (a ValueError), which names the argument, for a wrong shape, and for an unknown option or
one out of range.
"""

from marlhf_lite.macro.actions import MacroActions
from marlhf_lite.macro.advantages import gae, whiten
from marlhf_lite.macro.lambdas import adaptive_lam, border_lam
from marlhf_lite.macro.largest_change import LargestChange
from marlhf_lite.macro.lengths import Listed, RandomizedNGram, Shuffled
from marlhf_lite.macro.losses import average, policy_loss, value_loss
from marlhf_lite.macro.perplexity import Perplexity
from marlhf_lite.macro.summary import boundary_f1, describe
from marlhf_lite.macro.termination import (
    FixedNGram,
    TerminationRule,
    Turn,
    Whole,
    as_rule,
    check_segmentation,
)
from marlhf_lite.macro.values import kl_per_token, kl_rewards, macro_rewards, macro_values
