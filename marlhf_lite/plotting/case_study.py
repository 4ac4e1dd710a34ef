"""The same prompts answered by several methods: scores and macro actions side by side (paper: Tables 11 to 14)."""

from __future__ import annotations

import html
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from marlhf_lite.evaluation.responses import restore
from marlhf_lite.macro import TerminationRule
from marlhf_lite.models.actor_critic import PolicyModel
from marlhf_lite.plotting.macro_actions import spans_html, token_pieces
from marlhf_lite.tasks.tokenization import encode_responses
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.jsonl import write_atomically

SCORES = {"rm_score": "RM score", "gold": "gold score", "kl": "KL (nats)", "tokens": "tokens", "ended": "EOS"}
_CELL = "text-align:left;vertical-align:top;padding:6px 12px 6px 0;border-top:1px solid #8886"
_PLAIN = "white-space:pre-wrap;overflow-wrap:anywhere;font-family:monospace;line-height:1.6"


def case_study(
    rows: Sequence[Mapping],
    tokenizer,
    rules: Mapping[str, TerminationRule] | None = None,
    prompts: int | Sequence[str] = 3,
    seed: int = 0,
    reference: PolicyModel | None = None,
) -> str:
    """An HTML fragment: for each prompt a table with a line for each method, its scores and its response.

    All text is escaped and nothing is loaded from outside; it reads on light and on dark pages.

    Args:
        rows: one response of each method to each prompt, as `first_samples` or `pick_best` give them, with token_ids;
            without these, the text is tokenised again.
        rules: method to the rule whose macro actions are shown in its responses; others are shown as plain text.
        prompts: how many, drawn by `seed` so that nobody picks them; or which, by id or text.
        reference: for rules that need the reference model's log-probabilities (perplexity).

    Raises:
        InputError: no rows, an unknown prompt, a rule for an unknown method, two responses of a method to a prompt, or
            a prompt that a method did not answer.
    """
    answers, rules = _by_prompt(rows), dict(rules or {})
    methods = list(dict.fromkeys(row["method"] for row in rows))
    for method in rules:
        if method not in methods:
            raise InputError(f"rules: no responses of {method!r}; there are: {', '.join(methods) or 'none'}")
    parts = []
    for name in _chosen(answers, prompts, seed):
        lines = [_line(answers[name][m], tokenizer, rules.get(m), reference) for m in methods if m in answers[name]]
        if len(lines) < len(methods):
            gone = ", ".join(m for m in methods if m not in answers[name])
            raise InputError(f"prompt {name}: no response of {gone}: give every method's")
        parts.append(_study(next(iter(answers[name].values()))["prompt"], lines))
    return "".join(parts)


def write_page(path: str | Path, fragment: str, title: str = "Case study") -> Path:
    """The fragment as a page of its own, in UTF-8; the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title>'
    body = f'<body style="max-width:60em;margin:2em auto;font-family:sans-serif"><h1>{html.escape(title)}</h1>'
    page = f'<!doctype html><html lang="en"><head>{head}</head>{body}{fragment}</body></html>\n'
    write_atomically(path, page.encode("utf-8", "backslashreplace"))
    return path


def _by_prompt(rows: Sequence[Mapping]) -> dict[str, dict[str, Mapping]]:
    """Prompt to method to its row."""
    found: dict[str, dict[str, Mapping]] = {}
    for row in rows:
        answers = found.setdefault(row.get("id", row["prompt"]), {})
        if row["method"] in answers:
            raise InputError(f"{row['method']}: two responses to prompt {row.get('id', row['prompt'])!r}: give one")
        answers[row["method"]] = row
    if not found:
        raise InputError("case study: no responses: give at least one method's")
    return found


def _chosen(answers: Mapping[str, Mapping], prompts: int | Sequence[str], seed: int) -> list[str]:
    if isinstance(prompts, int):
        drawn = set(random.Random(seed).sample(list(answers), min(prompts, len(answers))))
        return [name for name in answers if name in drawn]
    by_text = {next(iter(rows.values()))["prompt"]: name for name, rows in answers.items()}
    names = [name if name in answers else by_text.get(name) for name in prompts]
    if None in names:
        raise InputError(f"prompts: nobody answered {prompts[names.index(None)]!r}: give ids or texts of the responses")
    return names


def _study(prompt: str, lines: Sequence[str]) -> str:
    heads = "".join(f'<th scope="col" style="{_CELL};border:none">{name}</th>' for name in ("", "scores", "response"))
    return (
        f'<section style="margin:0 0 2em"><div style="{_PLAIN};padding:0 0 6px">{html.escape(prompt)}</div>'
        f'<table style="border-collapse:collapse;border:none;color:inherit;width:100%"><tr>{heads}</tr>'
        f"{''.join(lines)}</table></section>"
    )


def _line(row: Mapping, tokenizer, rule: TerminationRule | None, reference: PolicyModel | None) -> str:
    scores = "<br>".join(f"{text}: {_number(row[name])}" for name, text in SCORES.items() if row.get(name) is not None)
    shown = f'<div style="{_PLAIN}">{html.escape(row["response"])}</div>'
    if rule is not None:
        shown = _spans(row, tokenizer, rule, reference)
    return (
        f'<tr style="background:transparent"><th scope="row" style="{_CELL};white-space:nowrap">'
        f'{html.escape(row["method"])}</th><td style="{_CELL};white-space:nowrap">{scores}</td>'
        f'<td style="{_CELL};width:100%">{shown}</td></tr>'
    )


def _number(value: float | bool) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.2f}".replace("-", "−") if isinstance(value, float) else str(value)


@torch.no_grad()
def _spans(row: Mapping, tokenizer, rule: TerminationRule, reference: PolicyModel | None) -> str:
    ids = row.get("token_ids")
    if ids is None:
        (ids,) = encode_responses(tokenizer, [row["response"]], 2**31)
        ids = ids if row.get("ended", True) else ids[:-1] or ids
    whole = {"ended": True, **row, "token_ids": ids}
    device = "cpu" if reference is None else next(reference.parameters()).device
    rollout = restore(tokenizer, [whole], device)
    context = {"token_ids": rollout.response_ids, "tokenizer": tokenizer}
    if reference is not None:
        width = rollout.mask.shape[1]
        context["ref_logprobs"] = reference(rollout.tokens, rollout.attention_mask, width)[0]
    macro = rule(rollout.mask, **context)
    return spans_html(token_pieces(tokenizer, ids), {f"{int(macro.mask.sum())} macro actions": macro})
