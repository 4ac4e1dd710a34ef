"""How much of a token's credit its advantage keeps, in closed form.

A token earns the score c, which comes after the last token. The critic predicts the share s of c: its values are 0
before that token and s·c after it, and the rest of c comes as a surprise at the end. Then δ = s·c when the token is
chosen and (1 − s)·c at the last step, and GAE gives a token k steps before the last s·c + (1 − s)·λ^k·c. A macro
action's value with equal weights is a mean over its tokens, also over those after the token, so only the part (i + 1)/n
of the first δ is left for token i = 0 … n−1 of n (section 3.2.2, Appendix D.1).

Adam removes the scale of an advantage, so a share means little by itself: compare it with the rest of the advantage.
Noise that arrives with the score is kept like credit that the critic does not predict, λ^k (`seen` = 0).
"""

import math

from marlhf_lite.tasks.tiny_umbrella.stories import parse_part


def signal_kept(
    index: int, length: int, n: float, lam: float, seen: float, sigma: str = "equal"
) -> float:
    """Return the share of a token's credit that its advantage keeps, with macro actions of `n` tokens from the start.

    Args:
        index: position of the token in the response, from 0.
        length: tokens in the response, EOS included.
        n: tokens in a macro action; 1 is token-level PPO, `math.inf` the whole response.
        lam: GAE's λ per macro action; γ is 1.
        seen: the share s of the credit that the critic predicts, 0 to 1.
        sigma: weights of a macro action's value: "equal" (MA-PPO), or "start", the value at its first token. The latter
            holds for segmental advantage estimation too (λ = 1 inside a segment, arXiv 2601.07320).
    """
    share_of_mean, actions_after = _place(index, length, n)
    if sigma == "equal":
        kept_of_predicted = share_of_mean
    else:
        # The value at the first token does not depend on the token that is chosen, so it subtracts no credit.
        kept_of_predicted = 1.0
    return seen * kept_of_predicted + (1 - seen) * lam**actions_after


def break_even(index: int, length: int, n: float, lam: float) -> float:
    """Return the share s above which macro actions with equal weights keep less of a token's credit than single tokens.

    `index` to `lam` as for `signal_kept`. Returns 1 if macro actions keep no less for any s.
    """
    share_of_mean, actions_after = _place(index, length, n)
    tokens_after = length - 1 - index
    gain = lam**actions_after - lam**tokens_after  # with a critic that predicts nothing
    loss = 1 - share_of_mean  # with a critic that predicts everything
    # Macro actions keep more by (1 − s) · gain and less by s · loss; both are equal at the share that is returned.
    return gain / (gain + loss) if loss > 0 else 1.0


def _place(index: int, length: int, n: float) -> tuple[float, int]:
    """Return (i + 1)/n of a token, and how many macro actions follow its own.

    i is the token's position in its macro action, from 0, and n the tokens of this action: the last one of a response
    may have fewer than the others.
    """
    n = min(n, length)
    action = int(index // n)
    first = int(index // n * n)
    tokens_of_action = min(n, length - first)
    actions = math.ceil(length / n)
    return (index - first + 1) / tokens_of_action, actions - 1 - action


def decisive_token(part: str) -> tuple[int, int] | None:
    """Return the position of the decisive word in a response, from 0, and the response's length in tokens with EOS.

    `part` names a part of `tiny-umbrella`, such as `L32-first`: a story of 32 tokens, and before it the sentence with
    the decisive word. This sentence and EOS add five tokens. Returns None if the word's position is random. Raises
    `InputError` for an unknown part.
    """
    length, place, _ = parse_part(part)
    if place == "random":
        return None
    position = 0 if place == "first" else length
    return position, length + 5
