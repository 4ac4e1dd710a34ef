"""The same prompts answered by several methods: scores and macro actions side by side (paper: Tables 11 to 14)."""

import html
import random
from collections.abc import Mapping, Sequence

import pandas as pd

from marlhf_lab.figures.macro_actions import spans_html, token_pieces
from marlhf_lite.evaluation.responses import restore
from marlhf_lite.evaluation.scores import to_frame
from marlhf_lite.macro import TerminationRule
from marlhf_lite.plotting.training import signed
from marlhf_lite.utils.errors import InputError

SCORES = {
    "rm_score": "RM score",
    "gold": "gold score",
    "kl": "KL (nats)",
    "tokens": "tokens",
    "ended": "EOS",
}
_PLAIN = "white-space:pre-wrap;overflow-wrap:anywhere;font-family:monospace;line-height:1.6"
# pages align right
_CELL, _HEAD = (f'<{tag} style="text-align:left;vertical-align:top">' for tag in ("td", "th"))
_TABLE = '<table border="0" style="width:100%;text-align:left">'


def case_study(
    responses: pd.DataFrame | Sequence[Mapping],
    tokenizer,
    rules: Mapping[str, TerminationRule] | None = None,
    prompts: int = 3,
    seed: int = 0,
) -> str:
    """An HTML fragment: for each prompt a table with a line for each method, its scores and its response.

    All text is escaped and nothing is loaded from outside; it reads on light and on dark pages.

    Args:
        responses: one of each method to each prompt, as `evaluate_checkpoints` gives them.
        rules: method to the rule whose macro actions are shown in its responses; others are shown as plain text.
        prompts: how many; `seed` draws them, so nobody picks them.

    Raises:
        InputError: two responses of a method to a prompt, or a prompt that a method did not answer.
    """
    frame, rules = to_frame(responses), rules or {}
    methods = frame["method"].unique().tolist()
    twice = frame[frame.duplicated(["method", "id"])]
    if len(twice):
        raise InputError(
            f"{twice['method'].iloc[0]}: two responses to prompt {twice['id'].iloc[0]!r}: give one"
        )
    ids, sections = frame["id"].unique().tolist(), []
    drawn = set(random.Random(seed).sample(ids, min(prompts, len(ids))))
    for name in (name for name in ids if name in drawn):
        answers = frame[frame["id"] == name].set_index("method", drop=False)
        gone = [method for method in methods if method not in answers.index]
        if gone:
            raise InputError(
                f"prompt {name}: no response of {', '.join(gone)}: give every method's"
            )
        lines = [f"<tr>{_HEAD}</th>{_HEAD}scores</th>{_HEAD}response</th></tr>"]
        for method, row in answers.loc[methods].iterrows():
            cells = (_scores(row), _response(row, tokenizer, rules.get(method)))
            line = "".join(f"{_CELL}{cell}</td>" for cell in cells)
            lines.append(f"<tr>{_HEAD}{html.escape(method)}</th>{line}</tr>")
        sections.append(
            f"<section>{_text(answers['prompt'].iloc[0])}{_TABLE}{''.join(lines)}</table></section>"
        )
    return "".join(sections)


def _text(text: str) -> str:
    return f'<div style="{_PLAIN}">{html.escape(text)}</div>'


def _scores(row: pd.Series) -> str:
    words = []
    for name, label in SCORES.items():
        value = row.get(name)
        if value is not None and not pd.isna(value):
            number = signed(value) if isinstance(value, float) else value
            words.append(f"{label}: {('no', 'yes')[bool(value)] if name == 'ended' else number}")
    return f'<div style="white-space:nowrap">{"<br>".join(words)}</div>'


def _response(row: pd.Series, tokenizer, rule: TerminationRule | None) -> str:
    """The response as plain text, or with the macro actions of its rule."""
    if rule is None:
        return _text(row["response"])
    rollout = restore(tokenizer, row.to_frame().T)
    macro = rule(rollout.mask, token_ids=rollout.response_ids, tokenizer=tokenizer)
    return spans_html(
        token_pieces(tokenizer, row["token_ids"]), {f"{int(macro.mask.sum())} macro actions": macro}
    )
