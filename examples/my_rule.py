"""Your own termination rule. With this file in the current folder: marlhf run --termination my_rule:halves"""

from marlhf_lite.macro import MacroActions


def halves(mask, **context):
    """Make two macro actions per response, its halves; mask [B, T] is True on its tokens."""
    lengths = []
    for tokens in mask.sum(1).tolist():
        second = tokens // 2
        halves_of_response = [tokens - second, second]
        lengths.append([length for length in halves_of_response if length > 0])
    return MacroActions.from_lengths(lengths, mask.shape[1])
