"""Your own termination rule. With this file in the current folder: marlhf run --termination my_rule:halves"""

from marlhf_lite.macro import MacroActions


def halves(mask, **context):
    """Make two macro actions per response, its halves; mask [B, T] is True on its tokens."""
    lengths = [[n - n // 2, n // 2] if n > 1 else [1] * n for n in mask.sum(1).tolist()]
    return MacroActions.from_lengths(lengths, mask.shape[1])
