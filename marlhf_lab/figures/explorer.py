"""An explorer of termination rules: choose a text, a rule and its parameters; see spans, lengths and pooled values.

Without a browser that can answer widgets (nbconvert, nbclient, papermill), the first picture comes as a static figure.
"""

import html
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, get_args, get_type_hints

import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from torch import Tensor

from marlhf_lab.figures.macro_actions import draw_spans, token_pieces
from marlhf_lab.figures.notebook import headless
from marlhf_lite.config.method import TERMINATIONS, MacroConfig
from marlhf_lite.experiments.named_rules import make_rule
from marlhf_lite.macro import describe, macro_values
from marlhf_lite.plotting.styles import SPANS
from marlhf_lite.utils.errors import InputError

Numbers = Callable[[list[int]], Tensor]  # token ids of a text to one number for each, [T]
LARGEST_N = 32  # of the slider; one step beyond it n is ∞


def explore(
    tokenizer: Any,
    texts: Mapping[str, str],
    values: Numbers,
    logprobs: Numbers,
    label: str = "value of the token",
    interactive: bool | None = None,
    own_rules: Sequence[str] = (),
) -> Any:
    """Return widgets that draw `rule_figure` for every choice, or one figure if there is no browser.

    The one figure is that of the first text, with the default rule.

    Args:
        tokenizer: a fast tokenizer. The response that is cut is a text's tokens and EOS.
        texts: title to text, to pick from; at least one.
        values: token ids to V(s_t) [T], for example a critic's.
        logprobs: token ids to log-probabilities [T] under the reference model, for the perplexity rules.
        label: the label of the axis of values.
        interactive: whether to return widgets; None: yes unless `headless()`.
        own_rules: your own rules, which are added to the menu of rules, as package.module:function (in a notebook
            __main__:function).
    """
    values = _remember(values)
    logprobs = _remember(logprobs)
    if interactive is None:
        interactive = not headless()
    if not interactive:
        first_text = next(iter(texts.values()))
        return rule_figure(tokenizer, first_text, MacroConfig(), 0, values, logprobs, label)
    import ipywidgets  # an extra: the library works without it
    from IPython.display import HTML, display

    def show(
        example: str, own: str = "", n: int = 5, cutoff: int = 5, seed: int = 0, **options: Any
    ) -> None:
        text = own if own.strip() else example
        size = "inf" if n > LARGEST_N else str(n)
        # If no rule takes these options, a message says so in place of the figure, and the widgets stay.
        try:
            choice = MacroConfig(n=size, cutoff=cutoff, **options)
            display(rule_figure(tokenizer, text, choice, seed, values, logprobs, label))
        except InputError as error:
            display(HTML(f'<p role="alert">⚠ {html.escape(str(error))}</p>'))

    # Each keyword becomes a widget: a list is a menu, a pair of numbers a slider, a text a field to type in.
    hints = get_type_hints(MacroConfig)
    menus = {name: list(get_args(hints[name])) for name in ("perplexity_rule", "parser", "sigma")}
    menus["termination"] = [*TERMINATIONS, *own_rules]
    sliders = {"n": (1, LARGEST_N + 1), "cutoff": (1, 40), "seed": (0, 99)}
    fields = {"own": "", "lengths": MacroConfig().lengths}
    panel = ipywidgets.interactive(show, example=list(texts.items()), **menus, **sliders, **fields)
    for widget in panel.kwargs_widgets:
        widget.style.description_width = "initial"  # whole names
    return panel


def _remember(function: Numbers) -> Numbers:
    """Return `function` with a memory: for the same ids it is called only once."""
    ask = cache(lambda ids: function(list(ids)).detach().float().cpu())
    return lambda ids: ask(tuple(ids))  # a key of the cache must be hashable, and a list is not


def rule_figure(
    tokenizer: Any,
    text: str,
    choice: MacroConfig,
    seed: int,
    values: Numbers,
    logprobs: Numbers,
    label: str,
) -> Figure:
    """Draw the spans of a text's macro actions, and below them the values of tokens and of macro actions.

    Text in [[double brackets]] is said by an environment: it belongs to no macro action and has no value. `choice` and
    `seed` make the rule; the other arguments are those of `explore`. Raises `InputError` for an empty text, and for
    options that no rule has.
    """
    if not text.strip():
        raise InputError("the text is empty: type one, or pick one above")
    # 1. Token ids of the text and of EOS, and which of them the policy wrote.
    ids: list[int] = []
    is_of_policy: list[bool] = []
    # `split` returns parts outside and inside of brackets in turn. The first one, which may be empty, is outside, so
    # parts with even numbers are the policy's.
    for number, part in enumerate(re.split(r"\[\[(.*?)\]\]", text)):
        part_ids = tokenizer(part, add_special_tokens=False)["input_ids"]
        ids += part_ids
        is_of_policy += [number % 2 == 0] * len(part_ids)
    ids.append(tokenizer.eos_token_id)
    is_of_policy.append(True)
    # 2. The macro actions of the response, as a batch of one row, and their values.
    context = {"token_ids": torch.tensor([ids]), "tokenizer": tokenizer}
    if choice.termination == "perplexity":
        context["ref_logprobs"] = logprobs(ids)[None]
    macro = make_rule(choice, seed)(torch.tensor([is_of_policy]), **context)
    # NaN leaves a gap in the picture.
    of_tokens = values(ids).float().masked_fill(~macro.token_mask[0], math.nan)
    of_actions = macro_values(of_tokens[None], macro, choice.sigma)[0].tolist()
    # 3. Above, the spans; the figure is as high as their lines of 64 characters need.
    pieces = token_pieces(tokenizer, ids)
    characters = sum(len(piece) for piece in pieces)
    height_of_spans = 0.34 * (1 + characters // 64)
    height_of_values = 1.9
    figure, (above, below) = plt.subplots(
        2,
        1,
        figsize=(7.2, height_of_values + height_of_spans),
        height_ratios=[height_of_spans, height_of_values],
        layout="constrained",
    )
    draw_spans(above, pieces, macro)
    above.set_title(choice.termination, fontsize="medium", loc="left")
    # 4. Below, a dot for each token and a line for each macro action.
    below.plot(range(len(ids)), of_tokens, ".", color="0.45", markersize=4, label="token")
    for number, ((start, end), value) in enumerate(zip(macro.spans()[0], of_actions, strict=True)):
        below.plot(
            [start - 0.45, end - 0.55],
            [value] * 2,
            color=SPANS[number % 2],
            linewidth=2.5,
            label=f"macro action, σ {choice.sigma}" if number == 0 else None,  # one for all
        )
    below.set(xlabel="token of the response", ylabel=label)
    facts = describe(macro)
    below.set_title(
        f"{facts['macro_actions']} macro actions of {facts['tokens']} tokens, "
        f"mean length {facts['mean_length']:.2f}",
        fontsize="medium",
        loc="left",
    )
    figure.legend(loc="outside lower center", ncols=2)
    # Otherwise a notebook would show the figure once more by itself, at the end of the cell.
    plt.close(figure)
    return figure
