"""Responses that are generated once, kept on disk and used again.

A folder has the responses of one checkpoint at one temperature: settings.json says what they come from, and
samples.jsonl has a line for each, written batch by batch, so that an interrupted evaluation can continue. A response is
identified by its prompt's id, its number among the samples of that prompt, and the seed.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from accelerate import PartialState
from tqdm.auto import tqdm

from marlhf_lite.evaluation.sampling import SeededSampling, generate_seeded
from marlhf_lite.evaluation.scores import (
    KLS,
    NUMBERS,
    GoldScore,
    Scorers,
    prompt_ids,
    reward_column,
    score_columns,
    score_rollout,
    to_frame,
    to_records,
)
from marlhf_lite.models.actor_critic import PolicyModel
from marlhf_lite.tasks.tokenization import encode_prompts
from marlhf_lite.training.environments import Dialogue, from_turns
from marlhf_lite.training.rollout import (
    Rollout,
    Sampler,
    Sampling,
    from_tokens,
    generate_in_batches,
)
from marlhf_lite.training.sampler_checks import check_sampled
from marlhf_lite.utils.contents import model_hash
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.jsonl import append_lines, read_lines, replaced_at_the_end, write_json
from marlhf_lite.utils.less_memory import in_batches
from marlhf_lite.utils.run_folder import SAMPLES
from marlhf_lite.utils.user_code import named_errors

SETTINGS = "settings.json"
KEY = ["id", "sample", "seed"]
# Files of responses


class ResponseStore:
    """Responses of one checkpoint at one temperature, in a folder under `root` that is named after the settings.

    `rows` is a DataFrame with the index KEY; responses depend on `settings`. Raises `InputError` for a line that is not
    a response, and for a repeated response.
    """

    def __init__(self, root: str | Path, method: str, settings: Mapping):
        digest = hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()[:8]
        name = re.sub(r"[^A-Za-z0-9_=+-]+", "-", method)
        self.folder = Path(root) / f"{name}-T{settings['temperature']:g}-{digest}"
        self.settings = {"method": method, **settings}
        self.path = self.folder / SAMPLES
        self.rows = _read([self.path], ("id", "token_ids", "ended")).set_index(KEY)

    def add(self, rows: pd.DataFrame) -> None:
        """Write responses at once, so that an interruption cannot lose them."""
        if not (self.folder / SETTINGS).is_file():
            write_json(self.folder / SETTINGS, self.settings)
        append_lines(self.path, to_records(rows.reset_index()))
        self.rows = pd.concat([self.rows, rows]) if len(self.rows) else rows

    def replace(self, rows: pd.DataFrame) -> None:
        """Replace the rows with the same keys."""
        kept = self.rows[~self.rows.index.isin(rows.index)]
        self.rows = pd.concat([kept, rows]).loc[self.rows.index]
        write_rows(self.path, self.rows.reset_index())


def write_rows(path: Path, rows: pd.DataFrame) -> None:
    """Write a JSON-lines file of these responses; a reader sees the old file or the new one."""
    with replaced_at_the_end(path) as new:
        new.unlink(missing_ok=True)  # of an earlier process with this number: lines are appended
        append_lines(new, to_records(rows))


def read_responses(path: str | Path) -> pd.DataFrame:
    """Return the responses in a file, a run of `marlhf evaluate` (its samples.jsonl), or a folder of stored responses.

    Rows without an `id` get one from their prompt. Raises `InputError` if there are no responses, for a row that is not
    a response, a score that is not finite, and a repeated response.
    """
    path = Path(path).expanduser()
    stores = sorted(path.glob(f"*/{SETTINGS}")) or sorted(path.glob(f"*/*/{SETTINGS}"))
    files = [file for file in (path, path / SAMPLES) if file.is_file()] or [
        p.with_name(SAMPLES) for p in stores
    ]
    rows = _read(files)
    if not len(rows):
        what = "no answers in it" if path.exists() else "no such file or folder"
        raise InputError(
            f"{path}: {what}: give a folder that `marlhf evaluate` wrote, or its {SAMPLES}"
        )
    return rows


def _read(files: Sequence[Path], needed: Sequence[str] = ()) -> pd.DataFrame:
    """Return the rows of files. Raises `InputError` for one that is not a response, lacks a column or is repeated."""
    rows = []
    for file in files:
        for number, row in enumerate(read_lines(file), 1):
            missing = [
                name for name in ("prompt", "method", "response", *needed) if row.get(name) is None
            ]
            if missing:
                raise InputError(
                    f"{file}, row {number}: no {missing[0]}: give answers that `marlhf evaluate` wrote"
                )
            reward = str(row.get("reward") or "").split(", ")[0]
            is_of_code = ":" in reward
            if is_of_code and "gold" in row and reward not in row:
                row[reward] = row.pop("gold")  # until 1.0.0 every score of code was called gold
            for name in (*NUMBERS, reward):
                value = row.get(name)
                if value is None:
                    continue
                if not isinstance(value, int | float) or not math.isfinite(value):
                    raise InputError(
                        f"{file}, row {number}: {name} {value!r} is not a finite number: leave it out"
                    )
            rows.append(row)
    frame = to_frame(rows)
    for id, method in frame.loc[
        frame.duplicated(["method", "temperature", *KEY]), ["id", "method"]
    ].to_numpy():
        raise InputError(f"{files[-1]}: id {id} of {method} is there twice: delete one of them")
    return frame


# Answering prompts


@dataclass(frozen=True)
class HeldOutPrompts:
    """Prompts that no stage trains on, and how policies answer them.

    Random numbers depend on seed and prompt, but not on policy and batch, so that comparisons by prompt are tighter.

    Args:
        prompts: [P] texts.
        tokenizer: the tokenizer of the base model.
        batch_size: responses generated at a time; it changes speed and memory, and responses only by rounding.
        sampler: what answers them: this process, servers, or dialogues with an environment.
    """

    prompts: Sequence[str]
    tokenizer: object
    sampling: Sampling
    seed: int = 0
    batch_size: int = 128
    sampler: Sampler = generate_seeded

    def keyed(self, samples: int) -> pd.Series:
        """Return the prompt of every wanted response, with the index KEY."""
        index = pd.MultiIndex.from_product(
            [prompt_ids(self.prompts), range(samples), [self.seed]], names=KEY
        )
        return pd.Series(
            np.repeat(np.array(self.prompts, dtype=object), samples), index=index, dtype=object
        )

    def generate(
        self, policy: PolicyModel, wanted: pd.Series, method: str, score: Callable
    ) -> pd.DataFrame:
        """Return a response to each wanted prompt (some of `keyed`), with the columns of `score(rollout)`."""
        prompts = wanted.tolist()
        # independent of the checkpoint
        names = tuple(f"{seed}/{id}/{sample}" for id, sample, seed in wanted.index)
        sampling = replace(SeededSampling.like(self.sampling), seed_names=names)
        rollout, _ = generate_in_batches(
            self.sampler, 0, policy.model, self.tokenizer, prompts, sampling
        )
        with named_errors("sampler", getattr(self.sampler, "name", "")):
            check_sampled(rollout, policy)
        columns = {
            "method": method,
            "temperature": float(self.sampling.temperature),
            "prompt": prompts,
        }
        ends = zip(rollout.response_ids.tolist(), rollout.ends.tolist(), strict=True)
        columns["token_ids"] = [ids[:end] for ids, end in ends]
        columns |= {} if rollout.turns is None else {"turns": rollout.turns}
        return pd.DataFrame(columns | score(rollout), index=wanted.index, dtype=object)


def answer(
    policy: PolicyModel,
    reference: PolicyModel,
    held_out: HeldOutPrompts,
    reward: Callable | None = None,
    gold: GoldScore | None = None,
    name: str = "policy",
) -> pd.DataFrame:
    """Return a scored response of a loaded policy to each prompt, with the columns of `evaluate_checkpoints`."""
    policy.eval()
    rewards = [reward] if reward else []

    def score(rollout: Rollout) -> dict:
        columns = score_rollout(rollout, policy, reference, rewards, gold)
        if reward and reward_column(reward) != "rm_score":
            columns["reward"] = reward_column(reward)  # names the column of its scores
        return columns

    generate = partial(held_out.generate, policy, method=name, score=score)
    rows = _in_batches(generate, held_out.keyed(1), held_out.batch_size, f"answers of {name}")
    return to_frame(pd.concat(rows).reset_index() if rows else [])


def restore(
    tokenizer, responses: pd.DataFrame | Sequence[Mapping], device: torch.device | str = "cpu"
) -> Rollout:
    """Return the rollout of stored responses, with the same tokens, to score or segment it again."""
    responses = responses if isinstance(responses, pd.DataFrame) else to_frame(responses)
    prompts, texts, tokens, ended = (
        responses[name].tolist() for name in ("prompt", "response", "token_ids", "ended")
    )
    # `token_ids` are then those of both sides
    if "turns" in responses and responses["turns"].notna().all():
        stored = zip(prompts, tokens, responses["turns"], ended, strict=True)
        return from_turns(tokenizer, [Dialogue(*row) for row in stored]).to(device)
    rollout = from_tokens(tokenizer, prompts, tokens, [tokenizer.eos_token_id])
    ended = torch.tensor(ended, dtype=torch.bool)  # also by tokens other than the tokenizer's EOS
    return replace(rollout, responses=texts, ended=ended).to(device)


def _in_batches(work: Callable, rows: pd.Series | pd.DataFrame, size: int, name: str) -> list:
    """Return what `work` does with the rows, `size` at a time, or half as many if memory ends."""
    with tqdm(total=len(rows), desc=name, disable=not len(rows), leave=False) as progress:

        def work_on(part: slice):
            result = work(rows.iloc[part])
            progress.update(part.stop - part.start)
            return result

        is_one_process = PartialState().num_processes == 1  # else the others may wait for this one
        results, _ = in_batches(work_on, len(rows), size, no_process_waits=is_one_process)
        return results


def evaluate_checkpoints(
    checkpoints: Mapping[str, Path],
    scorers: Scorers,
    held_out: HeldOutPrompts,
    folder: str | Path,
    *,
    temperatures: Sequence[float] = (),
    samples: int = 1,
    model: str = "",
) -> pd.DataFrame:
    """Return scored responses of all checkpoints at all temperatures (paper: Figures 3, 8, 10, 20, 21).

    It reads the responses in `folder`, generates the others and writes them there batch by batch, so that it continues
    after an interruption. If none is missing, it loads no model. Temperature 0 is greedy and has one sample.

    Args:
        checkpoints: name to folder, of an adapter or of whole weights.
        held_out: the prompts, in the order of the rows; their sampling has the temperature if `temperatures` is empty.
            Answers of an environment or of servers are stored separately.
        samples: responses to each prompt at each temperature.
        model: the base model's name, content and number format, which an adapter's weights do not tell.

    Returns:
        Rows by checkpoint, temperature, prompt and sample: id, sample, seed, method, temperature, prompt, token_ids,
        response, tokens, ended, and with a scorer kl (k1, nats), kl_k3, rm_score, gold, and a column named after the
        reward. `reference` and `rm` are fingerprints of the models that scored, and `reward` is what the scores of code
        depend on, with the name of the reward first.

    Raises:
        InputError: a folder without weights, or a broken stored file.
    """
    prints = {name: model_hash(path, name)[:12] for name, path in checkpoints.items()}
    marks = {
        name: model_hash(path, name)[:12]
        for name in ("reference", "rm")
        if (path := getattr(scorers, name))
    }
    by_code = scorers.columns_of_code()
    if by_code:
        marks["reward"] = scorers.version_of_code()
    wanted, tables = held_out.keyed(samples), []
    for name, path in checkpoints.items():
        load = scorers.policy(Path(path))
        for temperature in dict.fromkeys(temperatures or (held_out.sampling.temperature,)):
            at_temperature = replace(
                held_out, sampling=replace(held_out.sampling, temperature=float(temperature))
            )
            settings = {
                "fingerprint": prints[name],
                "model": model,
                **vars(at_temperature.sampling),
            }
            del settings["seed_names"]
            settings |= {"engine": key} if (key := getattr(held_out.sampler, "key", "")) else {}
            # the same text has other tokens
            if getattr(held_out.tokenizer, "expects_chats", False):
                settings["end_of_turn"] = held_out.tokenizer.eos_token
            store = ResponseStore(folder, name, settings)
            asked = (
                wanted if temperature > 0 else wanted[wanted.index.get_level_values("sample") == 0]
            )
            _fill(store, asked, at_temperature, load, scorers, marks)
            tables.append(to_frame(store.rows.loc[asked.index].reset_index()))
    rows = pd.concat(tables, ignore_index=True)
    # A store may have scores that nobody asks for now.
    not_asked = set(score_columns(rows)) - {"rm_score", *by_code}
    if not scorers.reference:
        not_asked |= {*KLS, "reference"}
    if not scorers.rm:
        not_asked |= {"rm_score", "rm"}
    if not marks.get("reward"):
        not_asked.add("reward")
    return rows.drop(columns=[name for name in rows if name in not_asked])


def _fill(
    store: ResponseStore,
    wanted: pd.Series,
    held_out: HeldOutPrompts,
    load: Callable,
    scorers: Scorers,
    marks: dict,
) -> None:
    """Score again what other models or code than those of `marks` scored, and generate the missing responses."""

    def score(rollout: Rollout) -> dict:
        return scorers.score(rollout, load) | marks

    there = wanted.index.isin(store.rows.index)
    stored = store.rows.loc[wanted.index[there]]
    missing = wanted[~there]
    method = store.settings["method"]
    stored = stored.assign(
        prompt=wanted[there]
    )  # a `Prompt` with its row's columns; the file has its text
    by_code = scorers.columns_of_code()
    has = stored.reindex(columns=[*marks, *by_code]).astype(object)
    # A true score of the data has no version, so its mark is empty.
    same_scorers = has[[*marks]].fillna({"reward": ""}) == pd.Series(marks, dtype=object)
    fresh = same_scorers.all(axis=1) & has[by_code].notna().all(axis=1)
    # The longest prompts first: little padding, and memory ends at the start if at all.
    lengths = []
    if len(missing):
        lengths = [-len(ids) for ids in encode_prompts(held_out.tokenizer, missing.tolist())]
    missing = missing.iloc[np.argsort(lengths, kind="stable")]

    def score_again(rows: pd.DataFrame) -> None:
        rollout = restore(held_out.tokenizer, rows, next(load().parameters()).device)
        # Scores by code lose their version, which is overwritten. The reward model's score has a mark of its own.
        rows = rows.drop(columns=set(score_columns(rows)) - {"rm_score"})
        store.replace(rows.assign(**pd.DataFrame(score(rollout), index=rows.index, dtype=object)))

    def add(rows: pd.Series) -> None:
        store.add(held_out.generate(load(), rows, method, score))

    name, size = f"{method}, T={held_out.sampling.temperature:g}", held_out.batch_size
    _in_batches(score_again, stored[~fresh], size, f"{name}, scores")
    _in_batches(add, missing, size, name)
