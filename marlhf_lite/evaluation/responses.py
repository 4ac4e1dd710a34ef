"""Responses that are generated once, kept on disk and used again.

A folder holds the responses of one checkpoint at one temperature: settings.json says what they come from, and
samples.jsonl has a line for each, written batch by batch, so that an interrupted evaluation goes on where it was.
A response is named by its prompt's id, its number among the samples of that prompt, and the seed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from marlhf_lite.tasks.tokenization import encode_prompts, pad
from marlhf_lite.training.rollout import Rollout
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.jsonl import append_lines, read_lines, write_json
from marlhf_lite.utils.run_folder import SAMPLES

SETTINGS = "settings.json"


class Key(NamedTuple):
    """What names a response of a checkpoint at a temperature."""

    id: str  # of the prompt
    sample: int  # 0, 1, … among the responses to this prompt
    seed: int


class Store:
    """The responses in `folder`, by their key; `settings` are what they come from.

    Raises `InputError` for a line that is no response, and for a response that is there twice.
    """

    def __init__(self, folder: str | Path, settings: Mapping):
        self.folder, self.settings = Path(folder), dict(settings)
        self.path = self.folder / SAMPLES
        rows = read_lines(self.path)
        check_rows(rows, str(self.path), ("id", "token_ids", "ended"))
        self.rows = {_key(row): row for row in rows}

    @classmethod
    def of(cls, root: str | Path, method: str, settings: Mapping) -> Store:
        """The store of these settings under `root`, named after the method, the temperature and the settings."""
        text = json.dumps(dict(settings), sort_keys=True)
        name = f"{re.sub(r'[^A-Za-z0-9_=+-]+', '-', method)}-T{settings['temperature']:g}"
        folder = Path(root) / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        return cls(folder, {"method": method, **settings})

    def add(self, rows: Sequence[Mapping]) -> None:
        """Writes responses at once; whoever is killed after this finds them again."""
        self._make()
        append_lines(self.path, rows)
        self.rows |= {_key(row): dict(row) for row in rows}

    def replace(self, rows: Iterable[Mapping]) -> None:
        """Writes rows in place of those with the same keys."""
        self._make()
        self.rows |= {_key(row): dict(row) for row in rows}
        write_rows(self.path, self.rows.values())

    def _make(self) -> None:
        if not (self.folder / SETTINGS).is_file():
            write_json(self.folder / SETTINGS, self.settings)


def write_rows(path: Path, rows: Iterable[Mapping]) -> None:
    """A JSON-lines file of these rows; a reader, or whoever is killed, sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    append_lines(temporary, rows)
    os.replace(temporary, path)


def prompt_ids(prompts: Sequence[str]) -> list[str]:
    """An id for each prompt, from its text alone; a text that comes again is told apart by its number."""
    seen: Counter[str] = Counter()
    ids = []
    for prompt in prompts:
        name = hashlib.sha256(prompt.encode("utf-8", "backslashreplace")).hexdigest()[:12]
        seen[name] += 1
        ids.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return ids


def noise_names(keys: Sequence[Key]) -> list[str]:
    """What the noise of each response is drawn from: see `seeded.noise`. It says nothing of the checkpoint."""
    return [f"{key.seed}/{key.id}/{key.sample}" for key in keys]


def restore(tokenizer, rows: Sequence[Mapping], device: torch.device | str = "cpu") -> Rollout:
    """Stored responses as the rollout they came from: the very tokens, to be scored or segmented again."""
    ids, attention_mask = pad(encode_prompts(tokenizer, [row["prompt"] for row in rows]), tokenizer.pad_token_id, True)
    tokens, mask = pad([row["token_ids"] for row in rows], tokenizer.pad_token_id, left=False)
    return Rollout(
        prompts=[row["prompt"] for row in rows],
        responses=[row["response"] for row in rows],
        tokens=torch.cat([ids, tokens], 1).to(device),
        attention_mask=torch.cat([attention_mask, mask], 1).to(device),
        mask=mask.bool().to(device),
        ended=torch.tensor([row["ended"] for row in rows]).to(device),
    )


def check_rows(rows: Sequence[Mapping], source: str, more: Sequence[str] = ()) -> None:
    """Raises `InputError` unless every row is a response (prompt, method, response, and `more`) and stands once."""
    found: dict[tuple, int] = {}
    for number, row in enumerate(rows, 1):
        missing = [name for name in ("prompt", "method", "response", *more) if row.get(name) is None]
        if missing:
            raise InputError(f"{source}, row {number}: no {missing[0]}: give answers that `marlhf evaluate` wrote")
        if row.get("id") is None:
            continue
        key = (row["method"], row.get("temperature"), _key(row))
        if key in found:
            what = f"id {row['id']} of {row['method']}"
            raise InputError(f"{source}, row {number}: {what} stands in row {found[key]} too: delete one of them")
        found[key] = number


def _key(row: Mapping) -> Key:
    return Key(str(row["id"]), row.get("sample", 0), row.get("seed", 0))


# Rows of several samples and temperatures, for tables that want one of each


def label(row: Mapping, temperatures: bool) -> str:
    """The method's name, with its temperature where that tells rows apart."""
    return f"{row['method']} T={row.get('temperature', '?')}" if temperatures else row["method"]


def first_samples(rows: Sequence[Mapping]) -> list[dict]:
    """The first sample of each, one row a prompt; where there are several temperatures, methods are named with them."""
    several = len({row.get("temperature") for row in rows}) > 1
    return [dict(row) | {"method": label(row, several)} for row in rows if row.get("sample", 0) == 0]


def sample_means(rows: Sequence[Mapping], columns: Sequence[str] = ("rm_score", "gold", "kl", "tokens", "ended")):
    """The same with every column averaged over the samples of its prompt: list of dicts, ready for `summarise`."""
    several = len({row.get("temperature") for row in rows}) > 1
    groups: dict[tuple, list[Mapping]] = {}
    for row in rows:
        groups.setdefault((label(row, several), row.get("id", row["prompt"])), []).append(row)
    return [_mean(group, columns) | {"method": method} for (method, _), group in groups.items()]


def _mean(group: Sequence[Mapping], columns: Sequence[str]) -> dict:
    if len(group) == 1:
        return dict(group[0])
    kept = {name: group[0][name] for name in ("id", "prompt", "temperature", "seed") if name in group[0]}
    there = [name for name in columns if name in group[0]]
    return kept | {name: float(np.mean([row[name] for row in group])) for name in there} | {"samples": len(group)}


def matrix(rows: Sequence[Mapping], name: str) -> tuple[list[str], np.ndarray]:
    """`(ids, values [P, S])` of one column of one method at one temperature: prompts in order, their samples in order.

    Raises `InputError` where prompts have different numbers of samples, or a value is missing.
    """
    groups: dict[str, list[tuple]] = {}
    for row in rows:
        if row.get(name) is None:
            raise InputError(f"{row['method']}: a response without {name}: score the responses first")
        groups.setdefault(row.get("id", row["prompt"]), []).append((row.get("sample", 0), row[name]))
    counts = Counter(map(len, groups.values()))
    if len(counts) > 1:
        raise InputError(f"{rows[0]['method']}: prompts have {sorted(counts)} samples: evaluate again to complete them")
    return list(groups), np.array([[value for _, value in sorted(group)] for group in groups.values()], dtype=float)
