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


def explore(
    tokenizer: Any,
    texts: Mapping[str, str],
    values: Numbers,
    logprobs: Numbers,
    label: str = "value of the token",
    interactive: bool | None = None,
    own_rules: Sequence[str] = (),
) -> Any:
    """Return widgets that draw `rule_figure` for every choice; without a browser, the figure of the first text.

    Args:
        tokenizer: a fast tokenizer; a text's response is its tokens and EOS.
        texts: title to text, to pick from; at least one.
        values: token ids to V(s_t) [T], for example a critic's.
        logprobs: token ids to log-probabilities [T] under the reference model, for the perplexity rules.
        label: of the axis: what `values` are.
        interactive: whether to return widgets; None asks `headless`.
        own_rules: your own rules, which join the choice, as package.module:function (in a notebook __main__:function).
    """
    reference, shown = _remember(logprobs), _remember(values)
    if headless() if interactive is None else not interactive:
        return rule_figure(
            tokenizer, next(iter(texts.values())), MacroConfig(), 0, shown, reference, label
        )
    import ipywidgets
    from IPython.display import HTML, display

    def show(
        example: str, own: str = "", n: int = 5, cutoff: int = 5, seed: int = 0, **options: Any
    ) -> None:
        try:
            macro = MacroConfig(n="inf" if n > 32 else str(n), cutoff=cutoff, **options)
            display(
                rule_figure(
                    tokenizer, own if own.strip() else example, macro, seed, shown, reference, label
                )
            )
        except InputError as error:
            display(HTML(f'<p role="alert">⚠ {html.escape(str(error))}</p>'))

    hints = get_type_hints(MacroConfig)
    choices = {name: list(get_args(hints[name])) for name in ("perplexity_rule", "parser", "sigma")}
    choices["termination"] = [*TERMINATIONS, *own_rules]
    numbers = {"n": (1, 33), "cutoff": (1, 40), "seed": (0, 99)}  # n above 32 is ∞
    other = {"own": "", "lengths": MacroConfig().lengths}
    panel = ipywidgets.interactive(show, example=list(texts.items()), **choices, **numbers, **other)
    for widget in panel.kwargs_widgets:
        widget.style.description_width = "initial"  # whole names
    return panel


def _remember(function: Numbers) -> Numbers:
    """`function`, asked only once for the same ids."""
    ask = cache(lambda ids: function(list(ids)).detach().float().cpu())
    return lambda ids: ask(tuple(ids))


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

    An environment says the text in [[double brackets]]: a hole.
    """
    if not text.strip():
        raise InputError("the text is empty: type one, or pick one above")
    ids, acted = [], []
    for turn, part in enumerate(re.split(r"\[\[(.*?)\]\]", text)):
        part_ids = tokenizer(part, add_special_tokens=False)["input_ids"]
        ids, acted = ids + part_ids, acted + [turn % 2 == 0] * len(part_ids)
    ids, acted = [*ids, tokenizer.eos_token_id], [*acted, True]
    context = {"token_ids": torch.tensor([ids]), "tokenizer": tokenizer}
    if choice.termination == "perplexity":
        context["ref_logprobs"] = logprobs(ids)[None]
    macro = make_rule(choice, seed)(torch.tensor([acted]), **context)
    pieces, facts = token_pieces(tokenizer, ids), describe(macro)
    numbers = values(ids).float().masked_fill(~macro.token_mask[0], math.nan)  # a hole has no value
    lines = 0.34 * (1 + sum(map(len, pieces)) // 64)
    sizes = {"figsize": (7.2, 1.9 + lines), "height_ratios": [lines, 1.9]}
    figure, (above, below) = plt.subplots(2, 1, **sizes, layout="constrained")
    draw_spans(above, pieces, macro)
    above.set_title(choice.termination, fontsize="medium", loc="left")
    below.plot(range(len(ids)), numbers, ".", color="0.45", markersize=4, label="token")
    pooled = macro_values(numbers[None], macro, choice.sigma)[0].tolist()
    for number, ((start, end), value) in enumerate(zip(macro.spans()[0], pooled, strict=True)):
        name = f"macro action, σ {choice.sigma}" if number == 0 else None
        below.plot(
            [start - 0.45, end - 0.55],
            [value] * 2,
            color=SPANS[number % 2],
            linewidth=2.5,
            label=name,
        )
    below.set(xlabel="token of the response", ylabel=label)
    mean = f"{facts['macro_actions']} macro actions of {facts['tokens']} tokens, mean length {facts['mean_length']:.2f}"
    below.set_title(mean, fontsize="medium", loc="left")
    figure.legend(loc="outside lower center", ncols=2)
    plt.close(figure)  # whoever shows the figure shows it once
    return figure
