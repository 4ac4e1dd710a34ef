"""Blind side-by-side judging in a notebook: the questions of `marlhf judge --human`, with buttons and keys.

Verdicts go to the same files, so that one may begin here and go on in a terminal.
"""

from __future__ import annotations

import html
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from marlhf_lite.evaluation.judges.asking import Judging
from marlhf_lite.evaluation.judges.criteria import CRITERIA, Criteria
from marlhf_lite.evaluation.judges.human import KEYS, HumanJudge, printable
from marlhf_lite.evaluation.judges.judge import Answer, Question
from marlhf_lite.evaluation.judges.pairs import Pair, Verdict
from marlhf_lite.plotting.explorer import headless
from marlhf_lite.utils.errors import InputError

_LABELS = {"1": "1 is better", "2": "2 is better", "t": "tie", "s": "skip"}
_CELL = "flex:1 1 18em;border:1px solid gray;padding:0 .8em;white-space:pre-wrap"


class JudgingWidget:
    """One pair at a time; a click or a key writes the verdict and shows the next.

    Args:
        pairs: to compare; whose responses they are is not shown, and their order is drawn by seed and annotator.
        folder: where verdicts are kept; what this annotator has judged there is not asked again.
        annotator: whose verdicts these are.
        criteria: tldr, hh, webgpt, or a `Criteria`.
        seed: of the order.

    `buttons` are the widgets by key; `.click()` does what a click does. Typing a key in `keys` does the same.
    Raises `InputError` as `judge_pairs` and `HumanJudge` do.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        folder: str | Path,
        annotator: str = "annotator-1",
        criteria: str | Criteria = "tldr",
        seed: int = 0,
    ):
        if isinstance(criteria, str) and criteria not in CRITERIA:
            raise InputError(f"criteria {criteria!r}: choose from {', '.join(CRITERIA)}")
        self.criteria = CRITERIA[criteria] if isinstance(criteria, str) else criteria
        self.work = Judging(HumanJudge(annotator, self.criteria), pairs, folder, seed=seed)
        self.box = self._box()
        self._show()

    def current(self) -> Question | None:
        """What is asked now; None at the end."""
        return next(iter(self.work.waiting()), None)

    def verdicts(self) -> list[Verdict]:
        """So far, those of earlier sittings included."""
        return self.work.verdicts()

    def answer(self, key: str) -> None:
        """1, 2, t or s for the pair that is shown; anything else, or after the end, does nothing."""
        question = self.current()
        if question is not None and key in KEYS:
            self.work.record(question, Answer(KEYS[key]), time.monotonic() - self._since)
            self._show()

    def page(self) -> str:
        """The pair as HTML, or what is to be said at the end."""
        waiting = self.work.waiting()
        done = f"{len(self.work.questions) - len(waiting)} of {len(self.work.questions)} done"
        if not waiting:
            return f"<p>{done}: thank you. The verdicts are in {html.escape(str(self.work.store.path))}.</p>"
        question, name = waiting[0], self.criteria.response
        sides = "".join(_cell(f"{name} {n}", text) for n, text in enumerate((question.a, question.b), 1))
        return (
            f"<details><summary>{done}; how to judge</summary>{_text(self.criteria.question())}</details>"
            f"{_cell(self.criteria.prompt, question.pair.prompt)}"
            f'<div style="display:flex;flex-wrap:wrap;gap:.6em;margin-top:.6em">{sides}</div>'
        )

    def _box(self) -> Any:
        import ipywidgets as w

        self.output = w.HTML()
        self.buttons = {key: w.Button(description=label, tooltip=f"key {key}") for key, label in _LABELS.items()}
        for key, button in self.buttons.items():
            button.on_click(lambda _, key=key: self.answer(key))
        # Widgets have no key events; a field that is emptied after each letter serves as one.
        self.keys = w.Text(placeholder="or type here: 1 2 t s", layout=w.Layout(width="12em"))
        self.keys.observe(self._typed, "value")
        self._since = time.monotonic()
        return w.VBox([self.output, w.HBox([*self.buttons.values(), self.keys])])

    def _typed(self, change: dict) -> None:
        if change["new"]:
            self.keys.value = ""
            self.answer(change["new"].strip()[-1:].lower())

    def _show(self) -> None:
        self.output.value, self._since = self.page(), time.monotonic()
        for control in (*self.buttons.values(), self.keys):
            control.disabled = self.current() is None


def judge_by_hand(*arguments: Any, interactive: bool | None = None, **options: Any) -> Any:
    """A `JudgingWidget`'s box, to end a cell with; without a browser, the first pair as HTML without buttons.

    Arguments are the `JudgingWidget`'s. `interactive` decides by itself what to return; None finds out.
    """
    widget = JudgingWidget(*arguments, **options)
    if not headless() if interactive is None else interactive:
        return widget.box
    from IPython.display import HTML

    return HTML(widget.page())


def _cell(title: str, text: str) -> str:
    return f'<div style="{_CELL}"><b>{html.escape(title)}</b>\n{_text(text)}</div>'


def _text(text: str) -> str:
    return f'<span style="white-space:pre-wrap">{html.escape(printable(text.strip()))}</span>'
