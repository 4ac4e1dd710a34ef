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
    """Whose judgments a file holds. Each annotator has a separate file and order."""

    def __init__(self, annotator: str, criteria: Criteria):
        self.name, self.criteria = f"human-{annotator}", criteria.name
        self.identity = json.dumps([self.name, criteria.question()])


def judge_by_hand(
    pairs: Sequence[Comparison],
    folder: str | Path,
    annotator: str = "annotator-1",
    criteria: str = "tldr",
):
    """A box with one pair at a time; a click stores the judgment and shows the next pair.

    Args:
        pairs: to compare; the names of the methods are not shown.
        folder: where judgments are kept; pairs that this annotator has judged there are not asked again.
        annotator: whose judgments these are.
        criteria: tldr, hh or webgpt.

    Raises `InputError` as `judge_pairs` does.
    """
    import ipywidgets as widgets  # an extra: the library works without it

    store = JudgmentStore(Person(annotator, CRITERIA[criteria]), pairs, folder)
    page, buttons = (
        widgets.HTML(),
        {winner: widgets.Button(description=label) for winner, label in _LABELS.items()},
    )

    def show() -> None:
        waiting = store.waiting()
        done, kept = (
            f"{len(store.rows())} of {len(store.comparisons)} pairs judged",
            html.escape(str(store.path)),
        )
        page.value = f"<p>{done}</p>" + (
            _page(waiting[0], criteria) if waiting else f"<p>Stored in {kept}</p>"
        )
        for button in buttons.values():
            button.disabled = not waiting

    def click(winner: str) -> None:
        store.add(store.waiting()[0], Judgment(winner))
        show()

    for winner, button in buttons.items():
        button.on_click(lambda _, winner=winner: click(winner))
    show()
    return widgets.VBox([page, widgets.HBox(list(buttons.values()))])


def _page(comparison: Comparison, criteria: str) -> str:
    task = CRITERIA[criteria]
    cells = zip(
        (task.prompt, f"{task.response} 1", f"{task.response} 2"), comparison.texts, strict=True
    )
    texts = [("how to judge", task.question()), *cells]
    return "".join(
        f'<h4>{html.escape(title)}</h4><div style="white-space:pre-wrap">{html.escape(printable(text.strip()))}</div>'
        for title, text in texts
    )
