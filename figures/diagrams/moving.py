"""The diagram that moves: a score walks back through an answer. Without motion the file shows the end."""

from __future__ import annotations

from canvas import FAINT, INK, LONGER, MACRO, PPO, Canvas, diagram, number, tint

LAM = 0.95
TOKENS = 101
BLOCK = 5
LEFT, WIDTH_OF_TOKEN = 170, 5.9
TALLEST = 62  # pixels of a bar that has all of the score
PERIOD = 14  # seconds from one start of the motion to the next

# Percent of the period: the score has fallen, the score has arrived at the first token, everything is shown.
FALLEN, ARRIVED, SHOWN = 6, 60, 64

MOTION = f"""
.ball {{ animation: fall {PERIOD}s infinite; opacity: 0; }}
.walks {{ animation: walk {PERIOD}s infinite; transform: scaleX(0); }}
.jumps {{ animation: jump {PERIOD}s infinite; transform: scaleX(0); }}
.answer {{ animation: appear {PERIOD}s infinite; }}
@keyframes fall {{
  0% {{ opacity: 1; transform: translateY(-34px); animation-timing-function: ease-in; }}
  {FALLEN}% {{ opacity: 1; transform: translateY(0); }}
  {FALLEN + 3}%, 100% {{ opacity: 0; transform: translateY(0); }}
}}
@keyframes walk {{
  0%, {FALLEN}% {{ transform: scaleX(1); animation-timing-function: steps({TOKENS}, end); }}
  {ARRIVED}%, 100% {{ transform: scaleX(0); }}
}}
@keyframes jump {{
  0%, {FALLEN}% {{ transform: scaleX(1); animation-timing-function: steps({TOKENS // BLOCK}, end); }}
  {ARRIVED}%, 100% {{ transform: scaleX(0); }}
}}
@keyframes appear {{
  0%, {ARRIVED}% {{ opacity: 0; }}
  {SHOWN}%, 100% {{ opacity: 1; }}
}}
@media (prefers-reduced-motion: reduce) {{
  .ball, .walks, .jumps, .answer {{ animation: none; }}
}}"""


def share_at(token: int, lam: float, block: int) -> float:
    """Return the share of a score after the last token that reaches token number `token`, counted from 0.

    λ acts once for each block of `block` tokens after the token's own. The critic is uninformed: it expected none of
    the score.
    """
    # With 101 tokens the last one is a block of its own. So the blocks after a token are the number of tokens after it,
    # divided by `block` and rounded up.
    blocks_after_it = (TOKENS - 1 - token + block - 1) // block
    return lam**blocks_after_it


@diagram(height=408)
def score_travels(c: Canvas) -> None:
    """A score walks back through 101 tokens

    Three rows of 101 bars. The score is given after the last token, at the right, and walks to the first token, at the
    left. With PPO at λ = 0.95, 0.6 % of it arrives. MA-PPO goes back in blocks of five tokens, and 36 % arrives. PPO
    at λ = 0.99 goes back token by token, and 37 % arrives. It was the λ.
    """
    c.style(MOTION)
    rows = (
        ("PPO", "λ = 0.95", "token by token", LAM, 1, PPO),
        ("MA-PPO", "λ = 0.95", "in blocks of five", LAM, BLOCK, MACRO),
        ("PPO-0.99", "λ = 0.99", "token by token", 0.99, 1, LONGER),
    )
    right = LEFT + TOKENS * WIDTH_OF_TOKEN
    c.text(
        right - 18,
        60,
        "the score falls here, after the last token",
        12.5,
        colour=FAINT,
        anchor="end",
    )
    for i, (name, its_lam, its_steps, lam, block, colour) in enumerate(rows):
        bottom = 146 + 96 * i
        for first in range(0, TOKENS, block):
            tokens_of_block = min(block, TOKENS - first)
            height = TALLEST * share_at(first, lam, block)
            width = tokens_of_block * WIDTH_OF_TOKEN - 1.2
            x = LEFT + first * WIDTH_OF_TOKEN
            c.rect(x, bottom - height, width, height, tint(colour, 0.75))
        # The row's bars are all there. A cover hides them at first, and uncovers them token by token or block by block.
        how_it_goes_back = "jumps" if block > 1 else "walks"
        c.cover(LEFT, bottom - TALLEST - 1, TOKENS * WIDTH_OF_TOKEN, TALLEST + 1, how_it_goes_back)
        c.line([(LEFT, bottom), (right, bottom)], FAINT, thick=1)
        c.ball(right - WIDTH_OF_TOKEN / 2, bottom - TALLEST + 6, colour, "ball")
        c.text(28, bottom - 30, name, 15, bold=True, anchor="start")
        c.text(28, bottom - 10, its_lam, 12.5, anchor="start")
        c.text(28, bottom + 8, its_steps, 12.5, colour=FAINT, anchor="start")
        percent = 100 * share_at(0, lam, block)
        arrived = number(percent, 1 if percent < 1 else 0)
        c.text(
            LEFT + 2,
            bottom + 14,
            f"{arrived} % arrives",
            13.5,
            bold=True,
            anchor="start",
            kind="answer",
        )
    c.text(
        LEFT,
        388,
        "Blocks of five did what a larger λ does, too: it was the λ.",
        14,
        bold=True,
        colour=INK,
        anchor="start",
        kind="answer",
    )
