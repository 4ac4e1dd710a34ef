"""Responses that are generated once, kept on disk and used again.

A folder holds the responses of one checkpoint at one temperature: settings.json says what they come from, and
samples.jsonl has a line for each, written batch by batch, so that an interrupted evaluation goes on where it was.
A response is identified by its prompt's id, its number among the samples of that prompt, and the seed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from marlhf_lite.evaluation.sampling import generate_seeded
from marlhf_lite.evaluation.scores import NUMBERS, GoldScore, Scorers, prompt_ids, score_rollout, to_frame, to_records
from marlhf_lite.models.actor_critic import PolicyModel
from marlhf_lite.tasks.tokenization import encode_prompts
from marlhf_lite.training.rewards import ModelReward
from marlhf_lite.training.rollout import Rollout, Sampling, from_tokens, merged_adapter
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.jsonl import append_lines, read_lines, write_json
from marlhf_lite.utils.run_folder import SAMPLES

SETTINGS = "settings.json"
KEY = ["id", "sample", "seed"]
# Entries of a model's config that say where its weights came from and not what they are.
_PLACES = ("base_model_name_or_path", "_name_or_path", "transformers_version", "peft_version", "inference_mode")

# Files of responses


class ResponseStore:
    """Responses of one checkpoint at one temperature, in a folder under `root` that is named after the settings.

    `rows` is a DataFrame with the index KEY; `settings` are what responses depend on. Raises `InputError` for a line
    that is no response, and for a response that is there twice.
    """

    def __init__(self, root: str | Path, method: str, settings: Mapping):
        digest = hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()[:8]
        name = re.sub(r"[^A-Za-z0-9_=+-]+", "-", method)
        self.folder = Path(root) / f"{name}-T{settings['temperature']:g}-{digest}"
        self.settings = {"method": method, **settings}
        self.path = self.folder / SAMPLES
        rows = read_lines(self.path)
        check_rows(rows, str(self.path), ("id", "token_ids", "ended"))
        self.rows = to_frame(rows).set_index(KEY)

    def add(self, rows: pd.DataFrame) -> None:
        """Write responses at once: they are found again, whatever happens after this."""
        if not (self.folder / SETTINGS).is_file():
            write_json(self.folder / SETTINGS, self.settings)
        append_lines(self.path, to_records(rows.reset_index()))
        self.rows = pd.concat([self.rows, rows]) if len(self.rows) else rows

    def replace(self, rows: pd.DataFrame) -> None:
        """Write rows in place of those with the same keys."""
        kept = self.rows[~self.rows.index.isin(rows.index)]
        self.rows = pd.concat([kept, rows]).loc[self.rows.index]
        write_rows(self.path, self.rows.reset_index())


def write_rows(path: Path, rows: pd.DataFrame) -> None:
    """Write a JSON-lines file of these responses; a reader sees the old file or the new one."""
    new = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    new.unlink(missing_ok=True)
    append_lines(new, to_records(rows))
    os.replace(new, path)


def read_responses(path: str | Path) -> pd.DataFrame:
    """The responses in a file, in a run of `marlhf evaluate` (its samples.jsonl), or in a folder of stored responses.

    Rows that lack an `id` get one from their prompt. Raises `InputError` where there are no responses, a row is none,
    a score is no finite number, or a response is there twice.
    """
    path = Path(path).expanduser()
    rows = []
    for file in [path] if path.is_file() else _sample_files(path):
        found = read_lines(file)
        check_rows(found, str(file))
        rows += found
    if not rows:
        what = "no answers in it" if path.exists() else "no such file or folder"
        raise InputError(f"{path}: {what}: give a folder that `marlhf evaluate` wrote, or its {SAMPLES}")
    frame = to_frame(rows)
    twice = frame[frame.duplicated(["method", "temperature", *KEY])]
    if len(twice):
        what = f"id {twice['id'].iloc[0]} of {twice['method'].iloc[0]}"
        raise InputError(f"{path}: {what} stands there twice: delete one of them")
    return frame


def _sample_files(folder: Path) -> list[Path]:
    if (folder / SAMPLES).is_file():
        return [folder / SAMPLES]
    stores = sorted(folder.glob(f"*/{SETTINGS}")) or sorted(folder.glob(f"*/*/{SETTINGS}"))
    return [path.with_name(SAMPLES) for path in stores]


def check_rows(rows: Sequence[Mapping], source: str, needed: Sequence[str] = ()) -> None:
    """Raises `InputError` unless every row is a response (prompt, method, response, and `needed`) and stands once."""
    first: dict[tuple, int] = {}
    for number, row in enumerate(rows, 1):
        missing = [name for name in ("prompt", "method", "response", *needed) if row.get(name) is None]
        if missing:
            raise InputError(f"{source}, row {number}: no {missing[0]}: give answers that `marlhf evaluate` wrote")
        for name in NUMBERS:
            value = row.get(name)
            if value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
                raise InputError(f"{source}, row {number}: {name} {value!r} is no finite number: leave it out")
        if row.get("id") is not None:
            names = (row["method"], row.get("temperature"), row["id"], row.get("sample", 0), row.get("seed", 0))
            if first.setdefault(names, number) != number:
                what = f"id {row['id']} of {row['method']}"
                raise InputError(f"{source}, row {number}: {what} stands in row {first[names]} too: delete one of them")


def fingerprint(folder: str | Path, name: str = "checkpoint") -> str:
    """A hash of the weights in a folder and of their config, wherever the folder is.

    Raises `InputError`, which calls the folder `name`, where there are none.
    """
    folder = Path(folder)
    adapter = folder / "adapter_config.json"
    config, pattern = (adapter, "adapter_model.*") if adapter.is_file() else (folder / "config.json", "*")
    weights = [path for path in sorted(folder.glob(pattern)) if path.suffix in (".safetensors", ".bin")]
    if not weights or not config.is_file():
        what = "it holds no weights with their config" if folder.is_dir() else "there is no such folder"
        raise InputError(f"{name}: {folder}: {what}: give the folder of an adapter or of a model")
    try:
        facts = json.loads(config.read_text(encoding="utf-8"))
        facts = {key: value for key, value in facts.items() if key not in _PLACES}
    except (ValueError, AttributeError):
        raise InputError(f"{name}: {config} is damaged: train it again, or give another folder") from None
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for path in weights:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:12]


# Answering prompts


def answer(
    policy: PolicyModel,
    reference: PolicyModel,
    tokenizer,
    prompts: Sequence[str],
    sampling: Sampling,
    reward: ModelReward | None = None,
    gold: GoldScore | None = None,
    *,
    name: str = "policy",
    seed: int = 0,
    batch_size: int = 128,
) -> pd.DataFrame:
    """One scored response of a loaded policy to each prompt, with the columns of `evaluate_checkpoints`.

    The random numbers are those of `evaluate_checkpoints`: they belong to seed and prompt, whatever the policy and the
    batch, so that comparisons by prompt are tighter.
    """
    policy.eval()
    wanted = _keyed(prompts, 1, seed)
    rows = []
    for chunk in tqdm(list(_batches(wanted, batch_size)), desc=f"answers of {name}", leave=False):
        rollout = _generate(policy, tokenizer, chunk, sampling)
        scores = score_rollout(rollout, policy, reference, reward, gold)
        rows.append(_response_rows(rollout, chunk, name, sampling, scores))
    return to_frame(pd.concat(rows).reset_index() if rows else [])


def restore(tokenizer, responses: pd.DataFrame | Sequence[Mapping], device: torch.device | str = "cpu") -> Rollout:
    """Stored responses as the rollout they came from: the same tokens, to be scored or segmented again."""
    responses = responses if isinstance(responses, pd.DataFrame) else to_frame(responses)
    texts = {name: responses[name].tolist() for name in ("prompt", "response", "token_ids", "ended")}
    rollout = from_tokens(tokenizer, texts["prompt"], texts["token_ids"], [tokenizer.eos_token_id])
    ended = torch.tensor(texts["ended"], dtype=torch.bool)  # also by tokens other than the tokenizer's EOS
    return replace(rollout, responses=texts["response"], ended=ended).to(device)


def _keyed(prompts: Sequence[str], samples: int, seed: int) -> pd.Series:
    """The prompt of every response that is wanted, with the index KEY."""
    index = pd.MultiIndex.from_product([prompt_ids(prompts), range(samples), [seed]], names=KEY)
    return pd.Series([prompt for prompt in prompts for _ in range(samples)], index=index, dtype=object)


def _batches(rows: pd.Series | pd.DataFrame, size: int) -> Iterator:
    return (rows.iloc[start : start + size] for start in range(0, len(rows), size))


def _generate(policy: PolicyModel, tokenizer, wanted: pd.Series, sampling: Sampling) -> Rollout:
    names = [f"{seed}/{id}/{sample}" for id, sample, seed in wanted.index]  # nothing of the checkpoint
    with merged_adapter(policy.model):
        return generate_seeded(policy.model, tokenizer, wanted.tolist(), names, sampling)


def _response_rows(
    rollout: Rollout, wanted: pd.Series, method: str, sampling: Sampling, scores: Mapping[str, Iterable]
) -> pd.DataFrame:
    tokens = [row[m].tolist() for row, m in zip(rollout.response_ids, rollout.mask, strict=True)]
    columns = {"method": method, "temperature": float(sampling.temperature), "prompt": wanted.tolist()}
    return pd.DataFrame(columns | {"token_ids": tokens} | dict(scores), index=wanted.index, dtype=object)


def evaluate_checkpoints(
    checkpoints: Mapping[str, Path],
    scorers: Scorers,
    tokenizer,
    prompts: Sequence[str],
    folder: str | Path,
    sampling: Sampling,
    *,
    temperatures: Sequence[float] = (),
    samples: int = 1,
    seed: int = 0,
    batch_size: int = 128,
    model: str = "",
) -> pd.DataFrame:
    """Responses of every checkpoint to every prompt at every temperature, scored (paper: Figures 3, 8, 10, 20, 21).

    What `folder` holds of them is read, the rest is generated and written there batch by batch: started again after an
    interruption, it goes on. With everything there, no model is loaded. Temperature 0 is greedy and has one sample.

    Args:
        checkpoints: name to folder, of an adapter or of whole weights.
        prompts: [P] texts; their order is that of the rows.
        sampling: its temperature is the one used where `temperatures` is empty.
        samples: responses to each prompt at each temperature.
        batch_size: responses generated at a time; it changes speed and memory, and responses by rounding alone.
        model: the base model's name, which an adapter's weights do not tell.

    Returns:
        Rows by checkpoint, temperature, prompt and sample: id, sample, seed, method, temperature, prompt, token_ids,
        response, tokens, ended, and where there is a scorer kl (k1, nats), rm_score and gold. `reference` and `rm` are
        fingerprints of the models that scored.

    Raises:
        InputError: a folder without weights, or a stored file that is broken.
    """
    prints = {name: fingerprint(path, name) for name, path in checkpoints.items()}
    worker, tables = _Worker(scorers, tokenizer, batch_size), []
    wanted = _keyed(prompts, samples, seed)
    greedy = wanted[wanted.index.get_level_values("sample") == 0]
    for name, path in checkpoints.items():
        policy = worker.policy(Path(path))
        for temperature in dict.fromkeys(temperatures or (sampling.temperature,)):
            how = replace(sampling, temperature=float(temperature))
            store = ResponseStore(folder, name, {"fingerprint": prints[name], "model": model, **vars(how)})
            tables.append(worker.fill(store, wanted if temperature > 0 else greedy, how, policy))
    return pd.concat(tables, ignore_index=True)


class _Worker:
    """Fills stores. Reference and reward model stay loaded throughout, a policy for as long as it is needed."""

    def __init__(self, scorers: Scorers, tokenizer, batch_size: int):
        self.scorers, self.tokenizer, self.batch_size = scorers, tokenizer, batch_size
        given = {"reference": scorers.reference, "rm": scorers.rm}
        self.marks = {name: fingerprint(path, name) for name, path in given.items() if path}
        self.reference = functools.cache(lambda: scorers.load(scorers.reference).eval())
        self.reward = functools.cache(lambda: ModelReward(scorers.load_rm(scorers.rm)))

    def policy(self, folder: Path) -> Callable[[], PolicyModel]:
        """The policy in a folder, loaded when it is first asked for."""
        if self.scorers.reference and folder.resolve() == Path(self.scorers.reference).resolve():
            return self.reference
        return functools.cache(lambda: self.scorers.load(folder).eval())

    def fill(
        self, store: ResponseStore, wanted: pd.Series, sampling: Sampling, policy: Callable[[], PolicyModel]
    ) -> pd.DataFrame:
        """Score again what other models scored, generate what is missing, and return what is wanted."""
        there = wanted.index.isin(store.rows.index)
        stale, missing = self._stale(store.rows.loc[wanted.index[there]]), self._longest_first(wanted[~there])
        method, total, scored = store.settings["method"], len(stale) + len(missing), []
        about = {"desc": f"{method}, T={sampling.temperature:g}", "unit": "", "leave": False}
        with tqdm(total=total, disable=not total, **about) as bar:
            for chunk in _batches(stale, self.batch_size):
                rollout = restore(self.tokenizer, chunk, next(policy().parameters()).device)
                scores = pd.DataFrame(self._scores(rollout, policy), index=chunk.index, dtype=object)
                scored.append(chunk.assign(**scores))
                bar.update(len(chunk))
            if scored:
                store.replace(pd.concat(scored))
            for chunk in _batches(missing, self.batch_size):
                rollout = _generate(policy(), self.tokenizer, chunk, sampling)
                store.add(_response_rows(rollout, chunk, method, sampling, self._scores(rollout, policy)))
                bar.update(len(chunk))
        return self._asked(to_frame(store.rows.loc[wanted.index].reset_index()))

    def _asked(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Rows without scores that were not asked for."""
        asked = {"kl": "reference" in self.marks, "reference": "reference" in self.marks}
        asked |= {"rm_score": "rm" in self.marks, "rm": "rm" in self.marks, "gold": self.scorers.gold is not None}
        return rows.drop(columns=[name for name in rows if not asked.get(name, True)])

    def _stale(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Stored responses that lack a score, or have it from another model than is asked now."""
        marks = rows.reindex(columns=[*self.marks, "gold"])
        fresh = (marks[[*self.marks]] == pd.Series(self.marks, dtype=object)).all(axis=1)
        return rows[~(fresh & (marks["gold"].notna() | (self.scorers.gold is None)))]

    def _longest_first(self, missing: pd.Series) -> pd.Series:
        """Prompts of like length together, so that padding is little; the most memory is needed at once."""
        prompts = list(dict.fromkeys(missing))
        lengths = dict(zip(prompts, map(len, encode_prompts(self.tokenizer, prompts)), strict=True)) if prompts else {}
        return missing.iloc[np.argsort([-lengths[prompt] for prompt in missing], kind="stable")]

    def _scores(self, rollout: Rollout, policy: Callable[[], PolicyModel]) -> dict:
        models = (policy(), self.reference()) if self.scorers.reference else (None, None)
        reward = self.reward() if self.scorers.rm else None
        return score_rollout(rollout, *models, reward, self.scorers.gold) | self.marks
