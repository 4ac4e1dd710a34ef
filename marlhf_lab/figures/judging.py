"""Blind side-by-side judging in a notebook: what `marlhf judge --judge human` asks, with buttons.

Judgments go to the same files, so that one may begin here and go on in a terminal.
"""

import html
from collections.abc import Sequence
from pathlib import Path

from marlhf_lite.extras.judges.judges import KEYS, HumanJudge, printable
from marlhf_lite.extras.judges.judgments import Comparison, Judgment, JudgmentStore
from marlhf_lite.extras.judges.prompts import CRITERIA

_LABELS = {"1": "1 is better", "2": "2 is better", "t": "tie", "s": "skip"}


def judge_by_hand(
    pairs: Sequence[Comparison], folder: str | Path, annotator: str = "annotator-1", criteria: str = "tldr"
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

    store = JudgmentStore(HumanJudge(annotator, CRITERIA[criteria]), pairs, folder)
    page, buttons = widgets.HTML(), {key: widgets.Button(description=label) for key, label in _LABELS.items()}

    def show() -> None:
        waiting = store.waiting()
        done, kept = f"{len(store.rows())} of {len(store.comparisons)} pairs judged", html.escape(str(store.path))
        page.value = f"<p>{done}</p>" + (_page(waiting[0], criteria) if waiting else f"<p>Stored in {kept}</p>")
        for button in buttons.values():
            button.disabled = not waiting

    def click(key: str) -> None:
        store.add(store.waiting()[0], Judgment(KEYS[key]))
        show()

    for key, button in buttons.items():
        button.on_click(lambda _, key=key: click(key))
    show()
    return widgets.VBox([page, widgets.HBox(list(buttons.values()))])


def _page(comparison: Comparison, criteria: str) -> str:
    task = CRITERIA[criteria]
    cells = zip((task.prompt, f"{task.response} 1", f"{task.response} 2"), comparison.texts, strict=True)
    texts = [("how to judge", task.question()), *cells]
    return "".join(
        f'<h4>{html.escape(title)}</h4><div style="white-space:pre-wrap">{html.escape(printable(text.strip()))}</div>'
        for title, text in texts
    )
