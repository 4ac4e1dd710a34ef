"""Blind side-by-side judging in a notebook, by a person who clicks on buttons.

Judgments are stored as those of `marlhf judge` are, so that the same tables read them.
"""

import html
import json
from collections.abc import Sequence
from pathlib import Path

from marlhf_lite.extras.judges.judgments import Comparison, Judge, Judgment, JudgmentStore
from marlhf_lite.extras.judges.prompts import CRITERIA, Criteria
from marlhf_lite.utils.printable import printable

_LABELS = {"A": "1 is better", "B": "2 is better", "tie": "tie", "skipped": "skip"}


class Person(Judge):
    """A person as a judge. Each annotator has a separate file of judgments, and a random order of responses."""

    def __init__(self, annotator: str, criteria: Criteria):
        self.name = f"human-{annotator}"
        self.criteria = criteria.name
        self.identity = json.dumps([self.name, criteria.question()])


def judge_by_hand(
    pairs: Sequence[Comparison],
    folder: str | Path,
    annotator: str = "annotator-1",
    criteria: str = "tldr",
):
    """Return a box that shows one pair at a time; a click stores the judgment and shows the next pair.

    Args:
        pairs: what to compare; the names of the methods are not shown.
        folder: where judgments are kept. If this annotator has judged a pair there, it is not asked again.
        annotator: whose judgments these are.
        criteria: tldr, hh or webgpt.

    Raises `InputError` as `judge_pairs` does.
    """
    import ipywidgets as widgets  # an extra: the library works without it

    store = JudgmentStore(Person(annotator, CRITERIA[criteria]), pairs, folder)
    page = widgets.HTML()
    buttons = {winner: widgets.Button(description=label) for winner, label in _LABELS.items()}

    def show_next_pair() -> None:
        waiting = store.waiting()
        count = f"<p>{len(store.rows())} of {len(store.comparisons)} pairs judged</p>"
        if waiting:
            page.value = count + _page(waiting[0], criteria)
        else:
            page.value = f"{count}<p>Stored in {html.escape(str(store.path))}</p>"
        for button in buttons.values():
            button.disabled = not waiting

    def store_and_go_on(winner: str) -> None:
        store.add(store.waiting()[0], Judgment(winner))
        show_next_pair()

    for winner, button in buttons.items():
        # As a default, `winner` is fixed now; otherwise every button would store the last one of the loop.
        button.on_click(lambda _, winner=winner: store_and_go_on(winner))
    show_next_pair()
    return widgets.VBox([page, widgets.HBox(list(buttons.values()))])


def _page(comparison: Comparison, criteria: str) -> str:
    """The question, the prompt and the two responses in HTML, each under its title."""
    task = CRITERIA[criteria]
    # `prompt` and `response` are what the task calls a prompt and a response.
    titles = (task.prompt, f"{task.response} 1", f"{task.response} 2")
    parts = [("how to judge", task.question()), *zip(titles, comparison.texts, strict=True)]
    lines = []
    for title, text in parts:
        words = html.escape(printable(text.strip()))
        lines.append(
            f'<h4>{html.escape(title)}</h4><div style="white-space:pre-wrap">{words}</div>'
        )
    return "".join(lines)
