"""An explorer of termination rules: a text, a rule and its parameters in; spans, lengths and pooled values out.

Where no browser can answer widgets (nbconvert, nbclient, papermill), the same picture comes as a static figure.
"""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from marlhf_lite.config.options import MacroConfig
from marlhf_lite.macro import MacroActions, describe, macro_values
from marlhf_lite.macro.actions import SIGMAS
from marlhf_lite.macro.perplexity import PERPLEXITY_RULES
from marlhf_lite.parsing.registry import PARSERS, RULES, make_rule
from marlhf_lite.plotting.macro_actions import COLOURS, draw_spans, spans_html, token_pieces
from marlhf_lite.utils.errors import InputError

_HEADLESS = re.compile(r"nbconvert|nbclient|papermill|jupyter[- ]execute|pytest|quarto|jupytext|jupyter-book|myst")
_OF_RULE = {
    "fixed": ("n",),
    "randomized": ("lengths", "seed"),
    "perplexity": ("perplexity_rule",),
    "parsing": ("parser", "cutoff", "inclusive"),
}
Numbers = Callable[[list[int]], Tensor]  # token ids of a text to [T] numbers, one for each


@dataclass(frozen=True)
class View:
    """What one choice of text, rule and parameters shows."""

    name: str  # of the rule
    pieces: list[str]  # text of the tokens
    macro: MacroActions  # of this one response
    values: Tensor  # [T]
    pooled: Tensor  # [S] V(ω_τ)


class Explorer:
    """Pick or type a text, choose ζ, its parameters and σ; the picture follows.

    Args:
        tokenizer: a fast tokenizer; a text's response is its tokens and EOS.
        texts: title to text, to pick from; at least one.
        values: token ids to V(s_t) [T], say a critic's; None shows log-probabilities in their place.
        logprobs: token ids to log-probabilities [T] under the reference model; None leaves out the perplexity rules.
        label: what `values` are, for the axis.

    `controls` are the widgets by name; setting their `.value` from Python does what a click does.
    """

    def __init__(
        self,
        tokenizer: Any,
        texts: Mapping[str, str],
        values: Numbers | None = None,
        logprobs: Numbers | None = None,
        label: str = "value of the token",
    ):
        if not texts:
            raise InputError("texts: give at least one text to pick")
        if values is None and logprobs is None:
            raise InputError("values: give a function of token ids, or logprobs, which are then shown in their place")
        self.tokenizer, self.texts, self.logprobs = tokenizer, dict(texts), logprobs
        self._values, self.label = (values or logprobs), (label if values else "log-probability of the token")
        self._numbers: dict[tuple[str, str], Tensor] = {}
        self.controls = self._controls()
        self.box = self._box()
        self._changed()

    # -- what is shown ------------------------------------------------------------------------------------------------

    def view(self) -> View:
        """The present choice, computed. Raises InputError for an empty text or bad parameters."""
        now = {name: control.value for name, control in self.controls.items()}
        if not now["text"].strip():
            raise InputError("the text is empty: type one, or pick one above")
        ids = [*self.tokenizer(now["text"], add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        how = MacroConfig(
            termination=now["rule"],
            n="inf" if now["n"] > 32 else str(now["n"]),
            lengths=now["lengths"],
            perplexity_rule=now["perplexity_rule"],
            parser=now["parser"],
            cutoff=now["cutoff"],
            inclusive=now["inclusive"],
        )
        context = {"token_ids": torch.tensor([ids]), "tokenizer": self.tokenizer}
        if now["rule"] == "perplexity":
            context["ref_logprobs"] = self._cached("logprobs", self.logprobs, ids)[None]
        macro = make_rule(how, now["seed"])(torch.ones(1, len(ids), dtype=torch.bool), **context)
        values = self._cached("values", self._values, ids)
        pooled = macro_values(values[None], macro, now["sigma"])[0]
        return View(_rule_name(how), token_pieces(self.tokenizer, ids), macro, values, pooled)

    def figure(self) -> Figure:
        """Spans above, values of tokens and of macro actions below, as a static figure."""
        view = self.view()
        lines = 1 + sum(map(len, view.pieces)) // 64
        figure, axes = plt.subplots(
            2, 1, figsize=(6.9, 1.9 + 0.34 * lines), height_ratios=[0.34 * lines, 1.9], layout="constrained"
        )
        draw_spans(view.pieces, {view.name: view.macro}, ax=axes[0])
        self._draw_values(axes[1], view)
        plt.close(figure)  # whoever shows it, shows it once
        return figure

    def page(self) -> str:
        """The same as HTML: spans, lengths, and the values as an inline image; or one line that says what is wrong."""
        try:
            view = self.view()
        except InputError as error:
            return f'<p role="alert">⚠ {html.escape(str(error))}</p>'
        facts = describe(view.macro)
        histogram = ", ".join(f"{count} × {length}" for length, count in facts["histogram"].items())
        figure, ax = plt.subplots(figsize=(6.6, 2.2), layout="constrained")
        self._draw_values(ax, view)
        figure.savefig(image := io.BytesIO(), format="png", dpi=96)
        plt.close(figure)
        words = (
            f"{facts['macro_actions']} macro actions of {facts['tokens']} tokens, mean length "
            f"{facts['mean_length']:.2f}; macro actions × length: {histogram}"
        )
        return (
            f"{spans_html(view.pieces, {view.name: view.macro})}<p>{html.escape(words)}</p>"
            f'<img alt="values of tokens, and of macro actions" style="max-width:100%;background:white" '
            f'src="data:image/png;base64,{base64.b64encode(image.getvalue()).decode()}">'
        )

    def _draw_values(self, ax: Axes, view: View) -> None:
        ax.plot(range(len(view.values)), view.values, ".", color="0.45", markersize=4, label="token")
        spans = view.macro.spans()[0]
        for number, ((start, end), value) in enumerate(zip(spans, view.pooled.tolist(), strict=True)):
            label = f"macro action, σ {self.controls['sigma'].value}" if number == 0 else None
            colour = COLOURS[number % 2]
            ax.plot([start - 0.45, end - 0.55], [value] * 2, color=colour, linewidth=2.5, label=label)
        ax.set(xlabel="token of the response", ylabel=self.label)
        ax.legend(fontsize=7, loc="best")

    # -- widgets ------------------------------------------------------------------------------------------------------

    def _controls(self) -> dict[str, Any]:
        import ipywidgets as w

        rules = [name for name in RULES if name != "perplexity" or self.logprobs is not None]
        first = next(iter(self.texts.values()))
        wide = w.Layout(width="98%", height="60px")
        return {
            "pick": w.Dropdown(options=list(self.texts.items()), value=first, description="example"),
            "text": w.Textarea(value=first, description="text", layout=wide, continuous_update=False),
            "rule": w.Dropdown(options=rules, value="fixed", description="rule ζ"),
            "n": w.IntSlider(5, 1, 33, description="n (33: ∞)", continuous_update=False),
            "lengths": w.Text("2,3,5,10", description="lengths", continuous_update=False),
            "seed": w.BoundedIntText(0, 0, 10**6, description="seed"),
            "perplexity_rule": w.Dropdown(options=PERPLEXITY_RULES, description="whose"),
            "parser": w.Dropdown(options=list(PARSERS), value="grammar", description="parser"),
            "cutoff": w.IntSlider(5, 1, 40, description="cutoff C", continuous_update=False),
            "inclusive": w.Checkbox(False, description="inclusive"),
            "sigma": w.Dropdown(options=SIGMAS, value="equal", description="σ"),
        }

    def _box(self) -> Any:
        import ipywidgets as w

        of = self.controls
        self.output = w.HTML()
        parameters = w.HBox([of[name] for names in _OF_RULE.values() for name in names])
        parameters.layout.flex_flow = "row wrap"
        of["pick"].observe(lambda change: setattr(of["text"], "value", change["new"]), "value")
        for name, control in of.items():
            if name != "pick":
                control.observe(lambda change: self._changed(), "value")
        return w.VBox([of["pick"], of["text"], w.HBox([of["rule"], of["sigma"]]), parameters, self.output])

    def _changed(self) -> None:
        shown = _OF_RULE.get(self.controls["rule"].value, ())
        for names in _OF_RULE.values():
            for name in names:
                self.controls[name].layout.display = None if name in shown else "none"
        self.output.value = self.page()

    def _cached(self, name: str, function: Numbers, ids: list[int]) -> Tensor:
        key = (name, repr(ids))
        if key not in self._numbers:
            numbers = function(ids).detach().float().cpu()
            if numbers.shape != (len(ids),):
                raise InputError(f"{name}: returned shape {tuple(numbers.shape)} for {len(ids)} tokens")
            self._numbers[key] = numbers
        return self._numbers[key]


def explore(*arguments: Any, interactive: bool | None = None, **options: Any) -> Any:
    """An `Explorer`'s widgets, to end a cell with; without a browser, its static figure.

    Arguments are the `Explorer`'s. `interactive` decides by itself what to return; None finds out, see `headless`.
    """
    explorer = Explorer(*arguments, **options)
    if not headless() if interactive is None else interactive:
        return explorer.box
    return explorer.figure()


def headless() -> bool:
    """Was this kernel started by a program that runs notebooks without a browser?"""
    try:
        import psutil  # comes with ipykernel

        parent = psutil.Process().parent()
        return parent is not None and bool(_HEADLESS.search(" ".join(parent.cmdline())))
    except Exception:  # no psutil, or no right to look
        return False


def _rule_name(how: MacroConfig) -> str:
    """The rule with those of its parameters that are options."""
    names = [name for name in _OF_RULE.get(how.termination, ()) if hasattr(how, name)]
    return " ".join([how.termination, *(f"{name}={getattr(how, name)}" for name in names)])
