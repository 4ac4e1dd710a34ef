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
# Notebooks' pages align the cells of a table to the right unless the cells say otherwise.
_CELL = '<td style="text-align:left;vertical-align:top">'
_HEAD = '<th style="text-align:left;vertical-align:top">'
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
        tokenizer: reads the token ids of responses whose macro actions are shown.
        rules: method to the rule whose macro actions are shown in its responses. The responses of a method without a
            rule are shown as plain text.
        prompts: how many prompts to show. `seed` draws them, so that nobody picks them.

    Raises:
        InputError: two responses of a method to a prompt, or a prompt that a method did not answer.
    """
    # 1. Check that no method has two responses to a prompt, and draw prompts.
    frame = to_frame(responses)
    rules = rules or {}
    methods = frame["method"].unique().tolist()
    repetitions = frame[frame.duplicated(["method", "id"])]
    if len(repetitions):
        raise InputError(
            f"{repetitions['method'].iloc[0]}: two responses to prompt "
            f"{repetitions['id'].iloc[0]!r}: give one"
        )
    ids = frame["id"].unique().tolist()
    drawn = set(random.Random(seed).sample(ids, min(prompts, len(ids))))
    # 2. A section for each of them, in the order of the responses.
    sections = []
    for prompt_id in ids:
        if prompt_id not in drawn:
            continue
        # A row for each method. `drop=False` keeps the column: a row still has its method.
        answers = frame[frame["id"] == prompt_id].set_index("method", drop=False)
        silent = [method for method in methods if method not in answers.index]
        if silent:
            raise InputError(
                f"prompt {prompt_id}: no response of {', '.join(silent)}: give every method's"
            )
        lines = [f"<tr>{_HEAD}</th>{_HEAD}scores</th>{_HEAD}response</th></tr>"]
        for method, row in answers.loc[methods].iterrows():
            response = _response(row, tokenizer, rules.get(method))
            lines.append(
                f"<tr>{_HEAD}{html.escape(method)}</th>"
                f"{_CELL}{_scores(row)}</td>{_CELL}{response}</td></tr>"
            )
        prompt = _text(answers["prompt"].iloc[0])
        sections.append(f"<section>{prompt}{_TABLE}{''.join(lines)}</table></section>")
    return "".join(sections)


def _text(text: str) -> str:
    return f'<div style="{_PLAIN}">{html.escape(text)}</div>'


def _scores(row: pd.Series) -> str:
    """The scores that a response has, a line for each."""
    lines = []
    for name, label in SCORES.items():
        value = row.get(name)
        if value is None or pd.isna(value):  # this response has no such score
            continue
        if name == "ended":
            words = "yes" if value else "no"
        elif isinstance(value, float):
            words = signed(value)
        else:
            words = value
        lines.append(f"{label}: {words}")
    return f'<div style="white-space:nowrap">{"<br>".join(lines)}</div>'


def _response(row: pd.Series, tokenizer, rule: TerminationRule | None) -> str:
    """The response with the macro actions of `rule`; as plain text if there is no rule."""
    if rule is None:
        return _text(row["response"])
    rollout = restore(tokenizer, row.to_frame().T)  # a table of one row
    macro = rule(rollout.mask, token_ids=rollout.response_ids, tokenizer=tokenizer)
    count = int(macro.mask.sum())
    pieces = token_pieces(tokenizer, row["token_ids"])
    return spans_html(pieces, {f"{count} macro actions": macro})
