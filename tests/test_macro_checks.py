"""What the functions of macro actions refuse, each by the name of its argument, in one line."""

import pytest
import torch
from conftest import fails

from marlhf_lite.macro import (
    FixedNGram,
    LargestChange,
    Listed,
    MacroActions,
    Perplexity,
    RandomizedNGram,
    as_rule,
    boundary_f1,
    check_segmentation,
    kl_rewards,
    macro_rewards,
    macro_values,
    policy_loss,
    value_loss,
)
from marlhf_lite.utils.errors import InputError

MASK = torch.tensor([[True, True, True], [True, True, False]])
MACRO = MacroActions.from_lengths([[2, 1], [2]])
X, Y = torch.zeros(2, 3), torch.zeros(2, 2)
HOLE = torch.tensor([[True, True, True], [True, False, True]])

REFUSED = [
    (lambda: MacroActions.from_ids(torch.tensor([[0, 0], [0, 2]])), "ids: response 1, token 1"),
    (lambda: MacroActions.from_ids(torch.tensor([[0, 1, 0]])), "ids: response 0, token 2"),
    (lambda: MacroActions.from_ids(torch.tensor([[1, 1]])), "response 0, token 0"),
    (lambda: MacroActions.from_ids(torch.tensor([[0, -2]])), "response 0, token 1"),
    (lambda: MacroActions.from_ids(torch.tensor([[0, -1, 0]])), "ids: response 0, token 2"),
    (lambda: MacroActions.from_ids(torch.tensor([[0, -1, 2]])), "ids: response 0, token 2"),
    (lambda: MacroActions.from_ids(torch.tensor([[0.0, 1.0]])), "ids"),
    (lambda: MacroActions.from_ids(torch.tensor([0, 1])), "ids"),
    (lambda: MacroActions.from_lengths([[1], [2, 0]], 4), "lengths: response 1, macro action 1"),
    (lambda: MacroActions.from_lengths([[1.5]]), "lengths: response 0, macro action 0"),
    (lambda: MacroActions.from_lengths([[1], [3, 2]], 4), "lengths: response 1"),
    (lambda: MacroActions.from_starts(MASK[:, :2], MASK), "starts"),
    (lambda: MacroActions.from_starts(MASK, MASK.long()), "mask"),
    (lambda: check_segmentation(MACRO.ids, MASK), "termination rule"),
    (
        lambda: check_segmentation(MacroActions.from_lengths([[3], [1]]), MASK),
        "response 1 has 2 tokens",
    ),
    (
        lambda: check_segmentation(MacroActions.from_lengths([[3], [1, 2]]), MASK),
        "response 1 has 2 tokens",
    ),
    (lambda: check_segmentation(MacroActions.from_lengths([[3]]), MASK), "ids"),
    (lambda: MACRO.sum(torch.zeros(2, 4)), "x"),
    (lambda: MACRO.pool(X, "mean"), "sigma"),
    (lambda: MACRO.broadcast(MACRO.ids), "y"),
    (lambda: macro_values(X, MACRO, "last"), "sigma"),
    (lambda: macro_rewards(X, Y[:1], MACRO), "scores: expected 2 responses"),
    (lambda: macro_rewards(X, Y[:1, 0], MACRO), "scores"),
    (lambda: macro_rewards(X, Y[:, :1], FixedNGram(5)(HOLE)), "up to 2 turns"),
    (lambda: FixedNGram(5)(HOLE.long()), "mask"),
    (lambda: as_rule(lambda mask, **context: MACRO)(HOLE), "termination rule: ids"),
    (lambda: macro_rewards(X, Y[:, 0], MACRO, "max"), "pooling"),
    (lambda: kl_rewards(X, X, MASK, 0.1, "k2"), "estimator"),
    (lambda: policy_loss(X, X[:1], Y, MACRO), "old_logprobs"),
    (lambda: policy_loss(X, X, X, MACRO), "advantages"),
    (lambda: policy_loss(X, X, Y, MACRO, ratio="both"), "ratio"),
    (lambda: policy_loss(X, X, Y, MACRO, mean="all"), "mean"),
    (lambda: value_loss(X, X, X, MACRO), "returns"),
    (lambda: value_loss(X, X, Y, MACRO, target="both"), "target"),
    (lambda: FixedNGram(0), "n"),
    (lambda: FixedNGram(2.5), "n"),
    (lambda: LargestChange("values", 0), "n"),
    (lambda: RandomizedNGram(()), "lengths"),
    (lambda: RandomizedNGram((2, 0)), "lengths[1]"),
    (lambda: Listed((2, 0)), "lengths[1]"),
    (lambda: Perplexity("ppl"), "rule"),
    (lambda: Perplexity()(MASK), "ref_logprobs"),
    (lambda: LargestChange("entropy"), "of"),
    (lambda: LargestChange()(MASK), "values"),
    (lambda: boundary_f1(MACRO, MacroActions.from_lengths([[3], [1]])), "b: it covers"),
    (lambda: boundary_f1(MACRO, MacroActions.from_lengths([[3], [2]], 4)), "b"),
]


@pytest.mark.parametrize("call, named", REFUSED)
def test_what_is_refused(call, named):
    fails(call, named)


def test_wider_macro_actions_than_needed_will_do():
    assert check_segmentation(MacroActions(MACRO.ids, width=3), MASK).spans() == MACRO.spans()
    with pytest.raises(InputError, match="termination rule: ids: response 0, token 1"):
        check_segmentation(MacroActions(torch.tensor([[0, 2, 2], [0, 0, -1]])), MASK)
