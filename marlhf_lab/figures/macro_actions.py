"""Pictures of macro actions: one response's tokens as coloured spans under several rules, and lengths.

Neighbouring macro actions alternate between two colours that colour-blind readers can tell apart. Gaps and underlines
say the same on paper.
"""

import functools
import html
import math
import unicodedata
import warnings
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd
import seaborn
from matplotlib import font_manager
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from marlhf_lite.macro import MacroActions, describe
from marlhf_lite.parsing import TokenText
from marlhf_lite.plotting import training as plots
from marlhf_lite.plotting.styles import PALE_SPANS, SERIES, SPANS, method_styles
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.tables import markdown

CELL = 0.0845  # inches: width of a character of 9 points, and a little room
_VISIBLE = str.maketrans({"\n": "↵", "\r": "↵", "\t": "→"})


def token_pieces(tokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text of every token, or the name of a special token. If tokens share a character, the first has it."""
    ids = [int(i) for i in ids]
    text, places = TokenText(tokenizer)(ids)  # (start, end) of each token, in characters
    pieces = []
    covered = 0  # characters of the text that earlier tokens have
    for token, (start, end) in zip(ids, places, strict=True):
        if start < end:
            # "" for the later ones of tokens that share a character
            pieces.append(text[max(start, covered) : end])
        else:  # a special token has no characters of the text
            pieces.append(tokenizer.convert_ids_to_tokens(token))
        covered = max(covered, end)
    return pieces


def _width(text: str) -> int:
    """The columns that a text takes in a monospace font, in which wide characters of East Asia take two."""
    columns = 0
    for character in text:
        is_wide = unicodedata.east_asian_width(character) in "WF"  # wide, full width
        columns += 2 if is_wide else 1
    return columns


@functools.cache
def _fonts(characters: frozenset[str]) -> list[str]:
    """Return the names of fonts that together have all of these characters, the monospace font first.

    If no installed font has a character, warn; the cache makes it one warning for the same characters.
    """
    fonts = ["monospace"]
    printable = {character for character in characters if character.isprintable()}
    missing = _lacking(font_manager.findfont("monospace"), printable)
    for font in font_manager.fontManager.ttflist:
        if not missing:
            break
        if font.name.startswith("Last Resort"):  # it only has a box in place of every character
            continue
        still_missing = _lacking(font.fname, missing)
        if still_missing < missing:
            fonts.append(font.name)
        missing = still_missing
    if missing:
        # Our warning replaces matplotlib's, which would come for each character in each figure.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        warnings.warn(
            f"no font has {min(missing)}: install one such as Noto Sans CJK, then restart",
            stacklevel=2,
        )
    return fonts


def _lacking(font: str, characters: Iterable[str]) -> set[str]:
    """The characters for which the font has no glyph; `font` is its file."""
    glyph_of = font_manager.get_font(font).get_char_index  # 0 for a character without a glyph
    return {character for character in characters if not glyph_of(ord(character))}


def _visible(piece: str) -> str:
    """The text of a token as figures show it: breaks and tabs as arrows, and a token without any text as a dot."""
    return piece.translate(_VISIBLE) or "·"


def draw_spans(ax: Axes, pieces: Sequence[str], macro: MacroActions, columns: int = 64) -> None:
    """Draw the tokens of one response as boxes, in lines of `columns` characters at most; `macro` has one row.

    White strokes separate tokens, and gaps macro actions. A macro action that continues on the next line is open at its
    end. Tokens of an environment, which belong to no macro action, are grey.
    """
    # 1. The place of each token: its line, and its first column.
    shown = [_visible(piece) for piece in pieces]
    widths = [_width(text) for text in shown]
    places: list[tuple[int, int]] = []
    line = 0
    column = 0
    for width in widths:
        if column > 0 and column + width > columns:
            line += 1
            column = 0
        places.append((line, column))
        column += width
    # 2. Axes of as many columns as the longest line has. If the figure is too narrow for this line, letters become
    # smaller.
    longest = max(column + width for (_, column), width in zip(places, widths, strict=True))
    ax.set(xlim=(0, longest), ylim=(line + 1, 0))
    ax.axis("off")
    inches = ax.get_window_extent().width / ax.figure.dpi
    look_of_text = {
        "fontsize": min(9 * inches / (longest * CELL), 9),
        "family": _fonts(frozenset("".join(shown))),
        "ha": "center",
        "va": "center",
        "parse_math": False,
    }
    # 3. Tokens of macro actions. Each has a box, a line under it, its text, and, unless it is the first of its macro
    # action, a white stroke before it.
    for number, (start, end) in enumerate(macro.spans()[0]):
        for t in range(start, end):
            y, x = places[t]
            left = x
            right = x + widths[t]
            if t == start:
                left += 0.12  # half of the gap to the macro action before
            if t == end - 1:
                right -= 0.12
            box = Rectangle(
                (left, y + 0.08),
                right - left,
                0.84,
                color=PALE_SPANS[number % 2],
                lw=0,
                gid=f"macro action {number}",
            )
            ax.add_patch(box)
            ax.plot(
                [left, right],
                [y + 0.92] * 2,
                color=SPANS[number % 2],
                linewidth=1.2,
                solid_capstyle="butt",
            )
            if t > start:
                ax.plot([x, x], [y + 0.12, y + 0.84], color="white", linewidth=0.8)
            ax.text(x + widths[t] / 2, y + 0.47, shown[t], **look_of_text)
    # 4. Tokens of an environment: only their text.
    in_no_action = ~macro.token_mask[0, : len(pieces)]
    for t in in_no_action.nonzero()[:, 0].tolist():
        y, x = places[t]
        ax.text(x + widths[t] / 2, y + 0.47, shown[t], color="0.5", style="italic", **look_of_text)


def spans_html(
    pieces: Sequence[str], segmentations: Mapping[str, MacroActions], row: int = 0
) -> str:
    """Return the spans as an HTML fragment, a table with a line for each segmentation.

    All text is escaped, and nothing is loaded from outside. Text and page keep their colours, and spans are half
    transparent, so the table suits light and dark pages. Underlines stay if a printer leaves backgrounds out. If you
    hover over a span, you see its length.

    Args:
        pieces: the tokens' texts, see `token_pieces`.
        segmentations: name of a line to the macro actions that it shows.
        row: the number of the response in the segmentations, from 0.

    Raises:
        InputError: the last macro action ends before the last token, or after it.
    """
    lines = []
    for name, segmentation in segmentations.items():
        spans = segmentation.spans()[row]
        covered = spans[-1][1] if spans else 0  # tokens up to the end of the last macro action
        if covered != len(pieces):
            raise InputError(
                f"{name}: its macro actions cover {covered} tokens, the response has {len(pieces)}"
            )
        cells = []
        end_before = 0
        for number, (start, end) in enumerate(spans):
            if start > end_before:
                cells.append(_words_of_environment(pieces[end_before:start]))
            cells.append(_span(pieces[start:end], number))
            end_before = end
        lines.append(
            f'<tr style="background:transparent"><th scope="row" style="text-align:left;vertical-align:top;'
            f'padding:3px 10px 3px 0;font-weight:600;white-space:nowrap">{html.escape(name)}</th>'
            f'<td style="text-align:left;padding:3px 0;line-height:1.9;font-family:monospace;white-space:pre-wrap;'
            f'overflow-wrap:anywhere">{"".join(cells)}</td></tr>'
        )
    return f'<table style="border-collapse:collapse;border:none;color:inherit">{"".join(lines)}</table>'


def _words_of_environment(pieces: Sequence[str]) -> str:
    """Return the HTML of an environment's tokens between two macro actions, which belong to neither."""
    text = html.escape("".join(_visible(piece) for piece in pieces))
    return f'<span title="environment" style="opacity:0.6;font-style:italic;margin-right:2px">{text}</span>'


def _span(pieces: Sequence[str], number: int) -> str:
    """Return the HTML of the tokens of one macro action. `number` counts macro actions from 0; colours alternate."""
    colour = SPANS[number % 2]
    text = html.escape("".join(_visible(piece) for piece in pieces))
    length = "1 token" if len(pieces) == 1 else f"{len(pieces)} tokens"
    return (
        f'<span title="{length}" style="background:{colour}55;border-bottom:2px solid {colour};border-radius:3px;'
        f'padding:1px 0;margin-right:2px;-webkit-print-color-adjust:exact;print-color-adjust:exact">'
        f"{text}</span>"
    )


def length_histograms(segmentations: Mapping[str, MacroActions]) -> np.ndarray:
    """Draw how long each rule's macro actions are, one panel per rule, in shares of tokens. Return the Axes, flat.

    Shares are of *tokens*, not of macro actions: the chance that a random token is in a macro action of that length.
    Lengths from 16 on share the last bar; a dashed line marks the mean length of a macro action.
    """
    longest = 16
    panels = len(segmentations)
    columns = min(3, panels)
    rows = math.ceil(panels / columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        sharex=True,
        sharey=True,
        squeeze=False,
        figsize=(7.2, 1.5 * rows + 0.4),
        layout="constrained",
    )
    ticks = [1, *range(5, longest - 2, 5)]  # none right beside the last bar
    # The last row may have fewer panels than columns.
    for ax, (name, macro) in zip(axes.flat, segmentations.items(), strict=False):
        lengths = macro.lengths[macro.mask].numpy()
        seaborn.histplot(
            x=lengths.clip(max=longest),
            ax=ax,
            weights=lengths,  # a macro action counts as often as it has tokens
            stat="proportion",
            discrete=True,
            binrange=(1, longest),
            color=SERIES[0],
            alpha=1,
            linewidth=0,
            shrink=0.85,
        )
        ax.axvline(min(lengths.mean(), longest), color=SERIES[3], linestyle="--", linewidth=1.2)
        ax.set_title(f"{name}: mean {lengths.mean():.1f}", fontsize="medium", parse_math=False)
        ax.set_xticks([*ticks, longest], [*(str(tick) for tick in ticks), f"≥{longest}"])
        ax.set(xlabel="", ylabel="")
    for ax in axes.flat[panels:]:
        ax.axis("off")
    lowest_of_columns = axes.flat[max(panels - columns, 0) : panels]
    for ax in lowest_of_columns:
        ax.tick_params(labelbottom=True)  # there is no panel below it
    figure.supxlabel("length of the macro action (tokens)", fontsize="medium")
    figure.supylabel("share of tokens", fontsize="medium")
    return axes.flat[:panels]


def rule_table(segmentations: Mapping[str, MacroActions]) -> str:
    """How many macro actions each rule makes, and how long they are, over all responses: a table in Markdown."""
    lines = []
    for name, macro in segmentations.items():
        facts = describe(macro)
        per_answer = f"{facts['macro_actions_per_response']:.1f}"
        mean_length = f"{facts['mean_length']:.1f}"
        lines.append([name, per_answer, mean_length, f"{facts['single_share']:.0%}"])
    heads = ["macro actions per answer", "mean length (tokens)", "macro actions of one token"]
    return markdown(["rule", *heads], lines)


def boundary_map(names: Sequence[str], beyond: np.ndarray) -> Axes:
    """Draw a map of how well the boundaries of every two rules agree.

    beyond: [R, R] for each two of R rules the F1 of their boundaries, minus what chance gives.
    """
    _, ax = plt.subplots(figsize=(7.2, 0.5 * len(names) + 0.9), layout="constrained")
    numbers = pd.DataFrame(np.asarray(beyond))
    seaborn.heatmap(
        numbers,
        annot=numbers.map(plots.signed),
        fmt="",
        ax=ax,
        vmin=0,
        vmax=1,
        cmap="cividis",
        linewidths=0.5,
        cbar=False,
        square=False,
    )
    plots.make_words_on_cells_readable(ax)
    ax.set_xticklabels(names, rotation=30, ha="right")
    ax.set_yticklabels(names, rotation=0)
    ax.set(xlabel="rule", ylabel="rule")
    ax.grid(False)
    return ax


def surprise_figure(
    nll: Sequence[float], spans: Sequence[tuple[int, int]], pieces: Sequence[str]
) -> Axes:
    """Draw the negative log-likelihood of each token of a response, in nats, and the mean of each macro action.

    The axis is logarithmic; numbers below 1e-6 nats are drawn at 1e-6.
    """
    _, ax = plt.subplots(figsize=(7.2, 3.2), layout="constrained")
    shown = np.maximum(nll, 1e-6)
    ax.plot(shown, "o", color="0.45", markersize=4, label="nll of the token")
    for number, (start, end) in enumerate(spans):
        label = "mean of its macro action" if number == 0 else None  # the legend has it once
        mean = np.mean(nll[start:end])
        ax.plot([start - 0.4, end - 0.6], [mean, mean], color=SERIES[3], linewidth=2, label=label)
    ax.set_yscale("log")
    words = [piece.strip() or "␣" for piece in pieces]
    ax.set_xticks(range(len(shown)), words, rotation=90, fontsize=9)
    ax.set(xlabel="token", ylabel="nll (nats, log scale)", ylim=(shown.min() / 3, 30))
    ax.legend(ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1))
    return ax


@plt.rc_context(plots.STYLE)
def gain_over_length(fixed: Mapping[str, tuple], rules: Mapping[str, tuple]) -> Axes:
    """Draw what methods gain over SFT against the mean length of their macro actions, in tokens.

    A grey line joins the fixed lengths. If a rule gains more than the line at the same length, the reason is where it
    cuts.

    fixed, rules: method -> (mean length, gain); a gain is a mapping with mean, low and high.
    """
    ax = plots.subplots((1, 1), 0.42)[0, 0]
    lengths = [length for length, _ in fixed.values()]
    gains = [gain["mean"] for _, gain in fixed.values()]
    ax.plot(lengths, gains, "o-", color="0.5", label="fixed numbers of tokens")
    styles = method_styles(rules, marker=True)
    for name, (length, gain) in rules.items():
        below = gain["mean"] - gain["low"]
        above = gain["high"] - gain["mean"]
        look = styles[name] | {"linestyle": "none", "markersize": 6, "elinewidth": 1}
        ax.errorbar(length, gain["mean"], [[below], [above]], label=name, **look)
    ax.set(
        xscale="log",
        xlabel="tokens to a macro action (mean; log scale)",
        ylabel="RM score, gain over SFT",
    )
    ax.set_xticks([1, 3, 5, 10, 50], ["1", "3", "5", "10", "50"], minor=False)
    ax.minorticks_off()
    ax.grid(alpha=0.3, linewidth=0.5)
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return ax
