"""Diagrams with numbers, which come from the library."""

from __future__ import annotations

import math

import nltk
import torch
from canvas import (
    CRITIC,
    FAINT,
    GREY,
    INK,
    LONGER,
    MACRO,
    PPO,
    REFERENCE,
    REWARD,
    Canvas,
    alternate,
    diagram,
    number,
    tint,
)

from marlhf_lab.credit.sentence import (
    BETA,
    POLICY,
    SCORE,
    SEEING,
    WANTED,
    WRITTEN,
    of_sentence,
    table,
)
from marlhf_lab.credit.sentence import REFERENCE as REFERENCE_TABLE
from marlhf_lab.figures.one_update import STORY, true_advantages
from marlhf_lab.figures.one_update import one_update as one_sentence
from marlhf_lite.config.commands import MemoryCommand
from marlhf_lite.config.parser import parse
from marlhf_lite.extras.memory.estimate import GIB, Memory, estimate_memory
from marlhf_lite.macro import (
    FixedNGram,
    MacroActions,
    Perplexity,
    RandomizedNGram,
    gae,
    kl_rewards,
    macro_rewards,
    macro_values,
)
from marlhf_lite.parsing.base import cut

LAM = 0.95


@diagram(height=520)
def credit_travel(c: Canvas) -> None:
    """How much of the score reaches each token (λ = 0.95, T = 20, n = 5)

    With an uninformed critic, a token d tokens before the end keeps 0.95 to the power d of the score: 0.38
    for the first of 20 tokens. A macro action k macro actions before the end keeps 0.95 to the power k: 0.86 for
    the first of four.
    """
    T, n, w, x0 = 20, 5, 34.5, 32  # w: width of a token, x0: left edge of the first one, in pixels
    c.text(
        28,
        70,
        "Tokens: d tokens before the last one, λ^d is left",
        bold=True,
        colour=PPO,
        anchor="start",
    )
    for t in range(T):
        share = LAM ** (T - 1 - t)
        c.rect(x0 + w * t + 3, 216 - 110 * share, w - 6, 110 * share, tint(PPO, 0.45), PPO)
        c.text(x0 + w * (t + 0.5), 207 - 110 * share, number(share), size=12)
    c.cells(x0, 216, [w] * T, [str(t + 1) for t in range(T)], size=12, h=24)
    title = "Macro actions of 5 tokens: k macro actions before the last one, λ^k is left"
    c.text(28, 286, title, bold=True, colour=MACRO, anchor="start")
    for k, left in enumerate(range(0, T, n)):
        share = LAM ** (T // n - 1 - k)
        c.rect(
            x0 + w * left + 3, 432 - 110 * share, n * w - 6, 110 * share, tint(MACRO, 0.35), MACRO
        )
        c.text(x0 + w * (left + n / 2), 378, f"0.95^{T // n - 1 - k} = {number(share)}")
    c.cells(
        x0, 432, [w] * T, [str(t + 1) for t in range(T)], alternate([n] * (T // n)), size=12, h=24
    )
    for y in (228, 444):
        c.text(758, y, "score", bold=True, colour=REWARD)
        c.arrow((736, y), (x0 + w * T + 2, y), colour=REWARD)
    longer = number(LAM ** (1 / n), 3)
    c.note(
        482,
        f"The critic is uninformed here, so all credit has to travel. Tokens with λ^(1/5) = {longer} keep nearly as "
        "much as these macro actions.",
    )


@diagram(height=620)
def one_update(c: Canvas) -> None:
    """One sentence, one update: the advantages of six words

    Bars show the advantages by PPO and by MA-PPO with macro actions of three words, squares the true ones: 0.17, 0.22,
    0.15, 0.08 for the four right words, −0.19 and −0.08 for the two wrong ones. With an uninformed critic all bars are
    above 0, and the first word has least by PPO. With an informed critic the first words are above 0, the last below.
    """
    # w: width of a word, x0: left edge of the first one, tall: height of a bar of 1, in pixels
    truth, x0, w, tall = true_advantages(), 38, 121, 200
    # Title, `sees` of the critic, and y of the line at advantage 0 and of the words.
    panels = (
        (
            "Uninformed critic, 0.65 everywhere: all words are praised for the score of 1",
            0.0,
            190,
            246,
        ),
    )
    panels += (
        (
            "Informed critic: it expects more after right words, less after wrong ones",
            1.0,
            430,
            508,
        ),
    )
    for title, sees, zero, cells in panels:
        rows = one_sentence(**STORY | {"sees": sees})
        c.text(28, zero - 118, title, bold=True, anchor="start")
        c.line([(x0, zero), (x0 + 6 * w, zero)], FAINT, thick=1)
        for t, real in enumerate(truth):
            for place, (value, colour) in enumerate(
                ((rows["A"][t], PPO), (rows["macro_A"][t], MACRO))
            ):
                # A positive bar stands on the line at 0, a negative one hangs from it.
                x, top = x0 + w * t + 14 + 48 * place, zero - tall * max(value, 0)
                c.rect(x, top, 44, tall * abs(value), tint(colour, (0.2, 0.45)[place]), colour)
                c.text(
                    x + 22,
                    top - 9 if value > 0 else zero - tall * value + 10,
                    number(value),
                    size=12.5,
                )
            c.rect(x0 + w * t + 54.5, zero - tall * real - 5.5, 11, 11, INK, "#ffffff", thick=2)
        words = [f"{a} {'✓' if a == b else '✗'}" for a, b in zip(WRITTEN, WANTED, strict=True)]
        c.cells(x0, cells, [w] * 6, words, alternate([3, 3]), h=26)
    for x, words, colour, share in (
        (60, "PPO: each word a step", PPO, 0.2),
        (280, "MA-PPO: two steps", MACRO, 0.45),
    ):
        c.rect(x - 22, 555, 16, 14, tint(colour, share), colour)
        c.text(x, 562, words, size=13, anchor="start")
    c.rect(468, 557, 10, 10, INK)
    c.text(486, 562, "the true advantage, known in this game", size=13, anchor="start")
    c.note(
        592,
        "λ = 0.95, no KL penalty. ✓ and ✗: right and wrong words; two colours of cells: two macro actions.",
    )


@diagram(height=444)
def mask_ids_lengths(c: Canvas) -> None:
    """A batch of two responses, cut into macro actions of n = 3

    Two responses of 8 and 5 tokens. ids gives the macro action of each token and -1 on padding; lengths gives the
    tokens in each macro action and 0 on padding; mask says which macro actions exist.
    """
    mask = torch.arange(8) < torch.tensor([[8], [5]])
    macro = FixedNGram(3)(mask)
    words = ["Mia baked a cake for her friend .".split(), "Ben lost his keys .".split()]
    c.text(28, 72, "tokens, padded to T = 8", bold=True, anchor="start")
    c.text(
        28,
        182,
        "ids [B, T]: the macro action of each token, −1 on padding",
        bold=True,
        anchor="start",
    )
    c.text(28, 292, "lengths [B, S]: tokens in each", bold=True, anchor="start")
    c.text(450, 292, "mask [B, S]: does it exist?", bold=True, anchor="start")
    for row in range(2):
        lengths = macro.lengths[row].tolist()
        fills = alternate(lengths) + [GREY] * (8 - sum(lengths))
        y = 34 * row
        for top in (88, 198):
            c.text(126, y + top + 14, f"response {row}", anchor="end")
        c.cells(140, y + 88, [74] * 8, words[row] + ["padding"] * (8 - len(words[row])), fills)
        c.cells(
            140,
            y + 198,
            [74] * 8,
            [str(i).replace("-", "−") for i in macro.ids[row].tolist()],
            fills,
        )
        # Each macro action has the colour of its first token; one that does not exist has length 0, and is grey.
        fills_of_actions = [
            fills[sum(lengths[:i])] if length else GREY for i, length in enumerate(lengths)
        ]
        c.text(126, y + 322, f"response {row}", anchor="end")
        exists = macro.mask[row].tolist()
        c.cells(140, y + 308, [74] * 3, [str(length) for length in lengths], fills_of_actions)
        c.cells(450, y + 308, [74] * 3, [str(flag) for flag in exists], fills_of_actions)
    c.note(
        400,
        "Every token lies in exactly one macro action, macro actions are in order, and padding lies in none. S = "
        "3 is the largest number of macro actions in the batch.",
    )


@diagram(height=414)
def sigma(c: Canvas) -> None:
    """σ: how a macro action of 4 tokens weighs the values of its tokens

    Four bar charts of weights. equal: 0.25 each. unit: the last token alone. start: the first token alone.
    position: 0.12, 0.16, 0.24, 0.48, the last token weighs most.
    """
    macro, values = MacroActions.from_lengths([[4]]), [0.2, 0.4, 0.1, 0.5]
    names = {
        "equal": "each token the same",
        "unit": "the last token alone",
        "start": "the first token alone",
        "position": "the later, the more",
    }
    for i, (name, words) in enumerate(names.items()):
        x, weights = 28 + 190 * i, macro.weights(name)[0].tolist()
        c.text(x + 84, 72, name, size=15, bold=True)
        c.text(x + 84, 94, words, colour=FAINT)
        for t, weight in enumerate(weights):
            c.rect(
                x + 42 * t + 5,
                280 - 150 * weight,
                32,
                max(150 * weight, 1),
                tint(MACRO, 0.35),
                MACRO,
            )
            c.text(x + 42 * t + 21, 270 - 150 * weight, number(weight), size=12.5)
        c.cells(x, 284, [42] * 4, [number(v, 1) for v in values], [tint(CRITIC)] * 4)
        pooled = macro_values(torch.tensor([values]), macro, name).item()
        c.text(x + 84, 334, f"Σ σ V = {number(pooled, 3)}", size=15, bold=True)
    c.note(
        368,
        "Bars: the weights σ, which sum to 1. Pink cells: the critic's values V of the four tokens, an example."
        " position: σ_i = 1 / ((4 − i) · H) for i = 0 … 3, with H = 1 + 1/2 + 1/3 + 1/4 = 2.083.",
    )


@diagram(height=504)
def values_to_advantages(c: Canvas) -> None:
    """From values and rewards of tokens to advantages, and back

    Six words, two macro actions of three. Values are averaged and KL penalties added up inside a macro action; the
    score joins the last reward. GAE gives an advantage for each macro action, and each of its words takes it.
    """
    macro = FixedNGram(3)(torch.ones(1, 6, dtype=torch.bool))
    values = torch.tensor([SEEING])
    penalties = kl_rewards(
        of_sentence(table(POLICY)), of_sentence(table(REFERENCE_TABLE)), macro.token_mask, BETA
    )
    R, V = macro_rewards(penalties, torch.tensor([SCORE]), macro), macro_values(values, macro)
    A, _ = gae(R, V, macro.mask, lam=LAM)
    # After the last macro action the value is 0.
    next_V = torch.cat([V[:, 1:], torch.zeros(1, 1)], 1)
    # Name, where it comes from, and the row's words or numbers [1, 6] or [1, 2], with their colour.
    rows = (
        ("token", "two macro actions", WRITTEN, None),
        ("value V(s)", "from the critic", values, CRITIC),
        ("KL penalty r", "from policy and reference", penalties, REFERENCE),
        ("value V(ω)", "mean of its tokens", V, CRITIC),
        ("reward R", "sum of r; the last + score 1", R, REWARD),
        ("TD error δ", "R + next V − V", R + next_V - V, MACRO),
        ("advantage Â", "δ + 0.95 · next Â", A, MACRO),
        ("Â of each token", "that of its macro action", macro.broadcast(A), PPO),
    )
    for i, (name, rule, row, colour) in enumerate(rows):
        # There is more room before the rows of macro actions, and after them.
        y = 62 + 48 * i + 10 * (i > 2) + 10 * (i > 6)
        words = [number(x) for x in row[0].tolist()] if isinstance(row, torch.Tensor) else row
        fills = [tint(colour)] * len(words) if colour else alternate([3, 3])
        c.text(222, y + 8, name, bold=True, anchor="end")
        c.text(222, y + 25, rule, size=12, colour=FAINT, anchor="end")
        c.cells(236, y, [528 / len(words)] * len(words), words, fills, h=34)
    c.note(480, "γ = 1, λ = 0.95, σ = equal; the value after the last macro action is 0.")


@diagram(height=520)
def losses(c: Canvas) -> None:
    """What each loss touches, for one macro action of 4 tokens

    Policy loss: either each token's own ratio or the product of the four ratios meets the advantage of the macro
    action; the gradient reaches the policy alone. Value loss: either each token's value or their weighted mean
    regresses to the return; the gradient reaches the critic alone.
    """
    ratios = torch.tensor([1.10, 0.90, 1.20, 1.00])
    policy_side = (
        "Policy loss",
        "ratio π / π_old of each token",
        [number(x) for x in ratios.tolist()],
        "advantage Â of the macro action: 0.64",
        'ratio="token"\n4 terms: each\nratio with Â',
        f'ratio="macro"\n1 term: product\n{number(ratios.prod().item())} with Â',
        "clip the ratio to 1 ± ε,\ntake the smaller of the two products",
    )
    value_side = (
        "Value loss",
        "value V of each token",
        ["0.20", "0.40", "0.10", "0.50"],
        "return Q̂ = Â + V of the macro action: 0.94",
        'target="token"\n4 terms: each\nV against Q̂',
        'target="macro"\n1 term: V(ω) =\n0.30 against Q̂',
        "two squared errors, of V and of V kept within\n0.2 of its old value: half of the larger one",
    )
    sides = ((28, PPO, "policy", *policy_side), (412, CRITIC, "critic", *value_side))
    # The two sides, from top to bottom: what each token has, the number that all four share, the two forms of the loss
    # ("token" or "macro"), how it is clipped, and the model that learns.
    for x, colour, model, title, above, numbers, shared, token_form, macro_form, clip in sides:
        c.text(x + 180, 72, title, size=15, bold=True)
        c.text(x + 180, 100, above)
        c.cells(x + 20, 114, [80] * 4, numbers, [tint(colour)] * 4)
        c.cells(x + 20, 154, [320], [shared], [tint(MACRO)])
        for left, words in ((x + 20, token_form), (x + 190, macro_form)):
            c.arrow((left + 75, 182), (left + 75, 212))
            c.box(left, 216, 150, 68, words, MACRO if left > x + 20 else PPO, size=13)
            c.arrow((left + 75, 284), (left + 75, 312))
        c.text(x + 180, 228, "or", colour=FAINT)
        c.box(x + 20, 316, 320, 50, clip)
        c.arrow((x + 180, 366), (x + 180, 414), colour=colour)
        c.text(x + 190, 390, "gradient", anchor="start")
        c.box(x + 60, 418, 240, 38, f"{model}: it alone learns", colour, size=13)
    c.note(
        480,
        "Â, Q̂, old log-probabilities and old values are constants: no gradient flows into them. The shaded wide "
        "cell is one number for all four tokens.",
    )


@diagram(height=456)
def termination_rules(c: Canvas) -> None:
    """Six termination rules on one sentence

    The sentence 'Mia baked a cake for her old friend Ben.' is cut into macro actions by single tokens, by a fixed
    number of tokens, at random, by perplexity, by its parse tree, and not at all.
    """
    words = "Mia baked a cake for her old friend Ben .".split()
    nll = torch.tensor([[3.1, 2.0, 0.4, 1.2, 1.0, 2.2, 2.6, 0.8, 3.0, 0.1]])
    mask = torch.ones(1, len(words), dtype=torch.bool)
    tree = nltk.Tree.fromstring(
        "(S (NP Mia) (VP baked (NP a cake) (PP for (NP her old friend Ben))) .)"
    )
    rules = (
        ("tokens, n = 1", FixedNGram(1)(mask)),
        ("fixed, n = 5", FixedNGram(5)(mask)),
        ("random lengths", RandomizedNGram(seed=3)(mask)),
        ("perplexity", Perplexity()(mask, ref_logprobs=-nll)),
        ("parsing, C = 5", _parsed(tree, len(words))),
        ("whole, n = ∞", FixedNGram(math.inf)(mask)),
    )
    c.text(142, 76, "NLL of the token", size=12.5, colour=FAINT, anchor="end")
    for t, x in enumerate(nll[0].tolist()):
        c.text(154 + 62 * (t + 0.5), 76, number(x, 1), size=12.5, colour=FAINT)
    for i, (name, macro) in enumerate(rules):
        y, lengths = 94 + 48 * i, [n for n in macro.lengths[0].tolist() if n]
        c.text(142, y + 16, name, bold=True, anchor="end")
        c.cells(154, y, [62] * len(words), words, alternate(lengths), h=32, size=12.5)
        # A thick line at the end of each macro action but the last.
        for end in [sum(lengths[:k]) for k in range(1, len(lengths))]:
            c.line([(154 + 62 * end, y - 4), (154 + 62 * end, y + 36)], thick=3)
    c.note(
        394,
        "Thick line: a macro action ends. Each word is one token here. Perplexity: a token joins unless its "
        "negative log-likelihood (NLL, an example) is above the mean of its macro action so far. Parsing: a "
        "phrase with fewer than 5 tokens is one macro action; a single word or mark joins the one before.",
    )


def _parsed(tree: nltk.Tree, count: int) -> MacroActions:
    """Cut a sentence of `count` words, each of which is one token, as the parsing rule does with C = 5."""
    starts, begin = torch.zeros(1, count, dtype=torch.bool), 0
    # Leaf i is token i, so its bounds are i and i + 1. Fewer than 5 tokens are at most 4.
    for end, is_single_leaf in cut(tree, range(count + 1), most=4):
        # A phrase begins a macro action; a single word joins the one before. The first token begins one in any case.
        starts[0, begin], begin = not is_single_leaf, end
    return MacroActions.from_starts(starts, torch.ones_like(starts))


@diagram(height=430)
def memory(c: Canvas) -> None:
    """Memory of a PPO run with Gemma-2B: full fine-tuning against LoRA

    Two bars on one scale. Full fine-tuning of four models in float32 needs 103 GiB at the peak: weights, Adam's
    moments and gradients. LoRA over one bfloat16 base needs 14 GiB, about half of it for sampling.
    """
    full, lora = _estimate("gemma-2b/tldr"), _estimate("lora-24gb")
    scale = 744 / full.peak  # pixels per byte
    each = full.weights / 4  # of four models of equal size
    parts = [(name, each, colour) for name, colour in _ROLES] + [
        ("Adam's two moments\nof policy and critic", full.optimizer, LONGER),
        ("gradients and\nbackward pass", max(full.training, full.generation), MACRO),
    ]
    title = f"Full fine-tuning, four models in float32: {full.peak / GIB:.0f} GiB at the peak"
    c.text(28, 72, title, bold=True, anchor="start")
    _bar(c, 28, 92, 70, scale, full.peak, parts)
    c.text(
        28,
        218,
        f"LoRA over one bfloat16 base: {lora.peak / GIB:.0f} GiB at the peak; from left to right:",
        bold=True,
        anchor="start",
    )
    parts = [
        ("", lora.weights, REFERENCE),
        ("", lora.adapters + lora.optimizer, LONGER),
        ("", max(lora.training, lora.generation), MACRO),
    ]
    _bar(c, 28, 238, 70, scale, lora.peak, parts)
    legend = (
        (f"base weights, shared by all four: {lora.weights / GIB:.1f} GiB", REFERENCE),
        (
            f"four adapters, and the moments of two: {(lora.adapters + lora.optimizer) / GIB:.1f} GiB",
            LONGER,
        ),
        (
            f"sampling (keys, values, prefill), more than a training step: {lora.generation / GIB:.1f} GiB",
            MACRO,
        ),
        ("white: CUDA itself, and 5 % for fragments", "#ffffff"),
    )
    for i, (words, colour) in enumerate(legend):
        y = 240 + 20 * i
        c.rect(150, y - 6, 13, 13, tint(colour, 0.4), INK, thick=1)
        c.text(172, y, words, size=13, anchor="start")
    c.line([(28, 340), (28 + 40 * GIB * scale, 340)], thick=3)
    c.text(28 + 20 * GIB * scale, 358, "40 GiB")
    c.note(
        386,
        "Estimates of marlhf memory --preset gemma-2b/tldr and --preset lora-24gb, which differ in batch size too. "
        "Sampling and training take turns, so only the larger one counts.",
    )


_ROLES = (
    ("policy", PPO),
    ("refer-\nence", REFERENCE),
    ("reward\nmodel", REWARD),
    ("critic", CRITIC),
)


def _estimate(preset: str) -> Memory:
    return estimate_memory(parse("memory", ["--preset", preset], MemoryCommand))


def _bar(c: Canvas, x: float, y: float, h: float, scale: float, total: float, parts: list) -> None:
    """Draw a stacked bar of `total` bytes from (x, y) on, with a height of `h` pixels and `scale` pixels per byte.

    parts: words, bytes and colour of each. What they leave of the total is white.
    """
    c.rect(x, y, total * scale, h, "#ffffff", INK, thick=1)
    for words, size, colour in parts:
        c.rect(x, y, size * scale, h, tint(colour, 0.4), INK, thick=1)
        if words:
            c.text(x + size * scale / 2, y + h / 2, f"{words}\n{size / GIB:.1f} GiB", size=12)
        x += size * scale
