"""Macro actions that begin where the critic's value or the policy's certainty changes most."""

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from marlhf_lite.macro import FixedNGram, LargestChange, check_segmentation


def starts_by_loop(signal, n, of):
    """Rank all places but the first by the change there, and take the first ⌈length / n⌉ − 1."""
    change = [abs(b - a) for a, b in itertools.pairwise(signal)] if of == "values" else [-x for x in signal[1:]]
    order = sorted(range(1, len(signal)), key=lambda t: -change[t - 1])
    return sorted([0, *order[: max(math.ceil(len(signal) / n) - 1, 0)]]) if signal else []


@given(data=st.data(), n=st.sampled_from([1, 2, 3, 5, 8, math.inf]), of=st.sampled_from(["values", "logprobs"]))
def test_against_a_loop(data, n, of):
    lengths = data.draw(st.lists(st.integers(0, 17), min_size=1, max_size=4))
    seed = data.draw(st.integers(0, 2**31))
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    signal = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed))
    macro = LargestChange(of, n)(mask, **{of: signal.masked_fill(~mask, math.nan)})
    check_segmentation(macro, mask)
    for spans, row, length in zip(macro.spans(), signal, lengths):
        assert [a for a, _ in spans] == starts_by_loop(row[:length].tolist(), n, of)
    assert torch.equal(macro.mask.sum(1), FixedNGram(n)(mask).mask.sum(1))  # as many as n-grams


def test_the_token_that_moves_the_value_ends_its_macro_action():
    """V(s_t) is the value before token t: token 2 raises it from 0 to 1, so the next one begins at token 3."""
    values, mask = torch.tensor([[0.0, 0.0, 0.0, 1.0, 1.0, 1.0]]), torch.ones(1, 6, dtype=torch.bool)
    assert LargestChange("values", 3)(mask, values=values).spans() == [[(0, 3), (3, 6)]]
    logprobs = torch.tensor([[-9.0, -0.1, -0.2, -0.1, -4.0, -0.1]])
    assert LargestChange("logprobs", 3)(mask, logprobs=logprobs).spans() == [[(0, 4), (4, 6)]]
