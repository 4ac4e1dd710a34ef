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

SETTINGS = "settings.json"  # beside stored responses: what they come from
KEY = ["id", "sample", "seed"]  # what identifies a response in a store
# Files of responses


class ResponseStore:
    """Responses of one checkpoint at one temperature, in a folder under `root` that is named after the settings.

    `settings` are everything that a response depends on, and `rows` is a DataFrame of the responses with the index KEY.
    Raises `InputError` for a line of the file that is not a response, and for a repeated response.
    """

    def __init__(self, root: str | Path, method: str, settings: Mapping):
        settings_as_text = json.dumps(dict(settings), sort_keys=True)
        digest = hashlib.sha256(settings_as_text.encode()).hexdigest()[:8]
        name = re.sub(r"[^A-Za-z0-9_=+-]+", "-", method)  # characters of a plain file name
        self.folder = Path(root) / f"{name}-T{settings['temperature']:g}-{digest}"
        self.settings = {"method": method, **settings}
        self.path = self.folder / SAMPLES
        rows = _read([self.path], needed=("id", "token_ids", "ended"))  # none if there is no file
        self.rows = rows.set_index(KEY)

    def add(self, rows: pd.DataFrame) -> None:
        """Write responses at once, so that an interruption cannot lose them."""
        if not (self.folder / SETTINGS).is_file():
            write_json(self.folder / SETTINGS, self.settings)
        append_lines(self.path, to_records(rows.reset_index()))
        self.rows = pd.concat([self.rows, rows]) if len(self.rows) else rows

    def replace(self, rows: pd.DataFrame) -> None:
        """Replace the stored rows that have the same keys as `rows`."""
        kept = self.rows[~self.rows.index.isin(rows.index)]
        self.rows = pd.concat([kept, rows]).loc[self.rows.index]  # in the order from before
        write_rows(self.path, self.rows.reset_index())


def write_rows(path: Path, rows: pd.DataFrame) -> None:
    """Write a JSON-lines file of these responses; a reader sees the old file or the new one."""
    with replaced_at_the_end(path) as new:
        # A killed process with the same number may have left such a file, and lines would be appended to it.
        new.unlink(missing_ok=True)
        append_lines(new, to_records(rows))


def read_responses(path: str | Path) -> pd.DataFrame:
    """Return the responses in a file, a run of `marlhf evaluate` (its samples.jsonl), or a folder of stored responses.

    Rows without an `id` get one from their prompt. Raises `InputError` if there are no responses, for a row that is not
    a response, a score that is not finite, and a repeated response.
    """
    path = Path(path).expanduser()
    if path.is_file():
        files = [path]
    elif (path / SAMPLES).is_file():
        files = [path / SAMPLES]
    else:  # stores, in this folder or in a folder of it, as in a run
        stores = sorted(path.glob(f"*/{SETTINGS}")) or sorted(path.glob(f"*/*/{SETTINGS}"))
        files = [settings.with_name(SAMPLES) for settings in stores]
    rows = _read(files)
    if not len(rows):
        what = "no answers in it" if path.exists() else "no such file or folder"
        raise InputError(
            f"{path}: {what}: give a folder that `marlhf evaluate` wrote, or its {SAMPLES}"
        )
    return rows


def _read(files: Sequence[Path], needed: Sequence[str] = ()) -> pd.DataFrame:
    """Return the rows of files, in order.

    `needed` are columns that each must have beside prompt, method and response. Raises `InputError` for a row that
    lacks one, has a number that is not finite, or is repeated.
    """
    rows = []
    for file in files:
        for number, row in enumerate(read_lines(file), 1):
            for name in ("prompt", "method", "response", *needed):
                if row.get(name) is None:
                    raise InputError(
                        f"{file}, row {number}: no {name}: give answers that `marlhf evaluate` wrote"
                    )
            # A row's `reward` begins with the name of the reward, which is also the name of the column of its scores.
            # The name of a user's function, `package.module:name`, has a colon.
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
    repeated = frame[frame.duplicated(["method", "temperature", *KEY])]
    if len(repeated):
        first = repeated.iloc[0]
        raise InputError(
            f"{files[-1]}: id {first['id']} of {first['method']} is there twice: delete one of them"
        )
    return frame


# Answering prompts


@dataclass(frozen=True)
class HeldOutPrompts:
    """Prompts that no stage trains on, and how policies answer them.

    Random numbers depend on seed and prompt, but not on policy and batch: two policies answer a prompt with the same
    random numbers, so that comparisons by prompt are tighter.

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
        """Return a prompt for every wanted response, `samples` for each of the prompts, with the index KEY."""
        index = pd.MultiIndex.from_product(
            [prompt_ids(self.prompts), range(samples), [self.seed]], names=KEY
        )
        # As objects, because a `Prompt` is a text that also carries the columns of its row: arrays of texts drop them.
        return pd.Series(
            np.repeat(np.array(self.prompts, dtype=object), samples), index=index, dtype=object
        )

    def generate(
        self, policy: PolicyModel, wanted: pd.Series, method: str, score: Callable
    ) -> pd.DataFrame:
        """Return a response to each prompt of `wanted`, rows of `keyed`, with the columns that `score(rollout)` gives.

        The column `method` is what the caller calls the policy.
        """
        prompts = wanted.tolist()
        # The random numbers of a response come from its name, which does not depend on the checkpoint.
        names = tuple(f"{seed}/{id}/{sample}" for id, sample, seed in wanted.index)
        sampling = replace(SeededSampling.like(self.sampling), seed_names=names)
        # 0 means all rows at a time: the caller gives a batch, and halves it if memory ends.
        rollout, _ = generate_in_batches(
            self.sampler, 0, policy.model, self.tokenizer, prompts, sampling
        )
        # Errors begin with --sampler and the sampler's name, if it has one.
        with named_errors("sampler", getattr(self.sampler, "name", "")):
            check_sampled(rollout, policy)
        columns = {
            "method": method,
            "temperature": float(self.sampling.temperature),
            "prompt": prompts,
        }
        token_ids = []
        for ids, end in zip(rollout.response_ids.tolist(), rollout.ends.tolist(), strict=True):
            token_ids.append(ids[:end])  # without padding
        columns["token_ids"] = token_ids
        if rollout.turns is not None:  # of an environment
            columns["turns"] = rollout.turns
        return pd.DataFrame(columns | score(rollout), index=wanted.index, dtype=object)


def answer(
    policy: PolicyModel,
    reference: PolicyModel,
    held_out: HeldOutPrompts,
    reward: Callable | None = None,
    gold: GoldScore | None = None,
    name: str = "policy",
) -> pd.DataFrame:
    """Return a scored response of a loaded policy to each prompt, with the columns of `evaluate_checkpoints`.

    `name` is what the column `method` says. Nothing is stored, and the policy is in eval mode afterwards.
    """
    policy.eval()
    rewards = [reward] if reward else []

    def score(rollout: Rollout) -> dict:
        columns = score_rollout(rollout, policy, reference, rewards, gold)
        if reward and reward_column(reward) != "rm_score":
            columns["reward"] = reward_column(reward)  # names the column of its scores
        return columns

    generate = partial(held_out.generate, policy, method=name, score=score)
    wanted = held_out.keyed(1)  # one sample of each prompt
    batches = _in_batches(generate, wanted, held_out.batch_size, f"answers of {name}")
    if not batches:
        return to_frame([])
    return to_frame(pd.concat(batches).reset_index())


def restore(
    tokenizer, responses: pd.DataFrame | Sequence[Mapping], device: torch.device | str = "cpu"
) -> Rollout:
    """Return stored responses as a rollout with the same tokens, so that it can be scored or segmented again."""
    if not isinstance(responses, pd.DataFrame):
        responses = to_frame(responses)
    prompts = responses["prompt"].tolist()
    tokens = responses["token_ids"].tolist()
    ended = responses["ended"].tolist()
    is_of_environment = "turns" in responses and responses["turns"].notna().all()
    if is_of_environment:  # `token_ids` are those of the policy's turns and of the environment's
        stored = zip(prompts, tokens, responses["turns"], ended, strict=True)
        return from_turns(tokenizer, [Dialogue(*row) for row in stored]).to(device)
    rollout = from_tokens(tokenizer, prompts, tokens, [tokenizer.eos_token_id])
    # The stored texts and ends replace those that `from_tokens` found, because a response may have ended by another
    # token than the tokenizer's EOS.
    return replace(
        rollout,
        responses=responses["response"].tolist(),
        ended=torch.tensor(ended, dtype=torch.bool),
    ).to(device)


def _in_batches(work: Callable, rows: pd.Series | pd.DataFrame, size: int, name: str) -> list:
    """Return the results of `work` on the rows, `size` of them at a time; if memory ends, half as many from then on.

    `name` stands beside the bar of progress.
    """
    with tqdm(total=len(rows), desc=name, disable=not len(rows), leave=False) as progress:

        def work_on(part: slice):
            result = work(rows.iloc[part])
            progress.update(part.stop - part.start)
            return result

        # With several processes the others may wait for this one, so it cannot try again by itself.
        is_one_process = PartialState().num_processes == 1
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

    It reads the responses in `folder`, generates the others and writes them there batch by batch, so that after an
    interruption it continues from there. If no response or score is missing, it loads no model. Temperature 0 is greedy
    and has one sample.

    Args:
        checkpoints: name to folder, of an adapter or of whole weights.
        held_out: the prompts, in the order of the rows. If `temperatures` is empty, the temperature is that of its
            sampling. Answers of an environment or of servers are stored separately.
        samples: responses to each prompt at each temperature.
        model: the base model's name, content and number format, which an adapter's weights do not tell.

    Returns:
        Rows by checkpoint, temperature, prompt and sample: id, sample, seed, method, temperature, prompt, token_ids,
        response, tokens, ended; and of the scores for which there is a scorer, kl (k1, nats), kl_k3, rm_score, gold,
        and a column named after the reward. `reference` and `rm` are fingerprints of the models that scored, and
        `reward` is what the scores of code depend on, with the name of the reward first.

    Raises:
        InputError: a folder without weights, or a broken stored file.
    """
    # 1. Fingerprints: of the checkpoints, on which responses depend, and of what scores them.
    fingerprints = {name: model_hash(path, name)[:12] for name, path in checkpoints.items()}
    marks = {}
    if scorers.reference:
        marks["reference"] = model_hash(scorers.reference, "reference")[:12]
    if scorers.rm:
        marks["rm"] = model_hash(scorers.rm, "rm")[:12]
    columns_of_code = scorers.columns_of_code()
    if columns_of_code:
        marks["reward"] = scorers.version_of_code()

    # 2. For each checkpoint and temperature read the store of their responses, and complete it.
    prompts_of_all_samples = held_out.keyed(samples)
    tables = []
    for name, path in checkpoints.items():
        load = scorers.policy(Path(path))  # a function, which loads the policy at its first call
        for temperature in dict.fromkeys(temperatures or (held_out.sampling.temperature,)):
            at_temperature = replace(
                held_out, sampling=replace(held_out.sampling, temperature=float(temperature))
            )
            # Everything on which a response depends, except what the key of each response has: the seeds' names.
            settings = {
                "fingerprint": fingerprints[name],
                "model": model,
                **vars(at_temperature.sampling),
            }
            del settings["seed_names"]
            # An environment or servers give other answers than `generate`.
            engine = getattr(held_out.sampler, "key", "")
            if engine:
                settings["engine"] = engine
            # With a chat template the same text has other tokens.
            if getattr(held_out.tokenizer, "expects_chats", False):
                settings["end_of_turn"] = held_out.tokenizer.eos_token
            store = ResponseStore(folder, name, settings)
            wanted = prompts_of_all_samples
            if temperature == 0:  # all samples would be the same
                wanted = wanted[wanted.index.get_level_values("sample") == 0]
            _fill(store, wanted, at_temperature, load, scorers, marks)
            tables.append(to_frame(store.rows.loc[wanted.index].reset_index()))
    rows = pd.concat(tables, ignore_index=True)

    # 3. Leave out scores of earlier evaluations that nobody asks for now.
    not_asked_for = set(score_columns(rows)) - {"rm_score", *columns_of_code}
    if not scorers.reference:
        not_asked_for |= {*KLS, "reference"}
    if not scorers.rm:
        not_asked_for |= {"rm_score", "rm"}
    if not marks.get("reward"):  # the mark of the code that gave scores
        not_asked_for.add("reward")
    return rows.drop(columns=[name for name in rows if name in not_asked_for])


def _fill(
    store: ResponseStore,
    wanted: pd.Series,
    held_out: HeldOutPrompts,
    load: Callable,
    scorers: Scorers,
    marks: dict,
) -> None:
    """Generate the responses that a store lacks, and score again those that other models or code have scored.

    `wanted` are the prompts by KEY, and `load` loads the policy. `marks` are the columns reference, rm and reward with
    the fingerprints of what scores now: stored responses with other marks are scored again. The store is written batch
    by batch.
    """

    def score(rollout: Rollout) -> dict:
        return scorers.score(rollout, load) | marks

    is_stored = wanted.index.isin(store.rows.index)
    missing = wanted[~is_stored]
    stored = store.rows.loc[wanted.index[is_stored]]
    # The file has only a prompt's text. A reward may need the other columns of the prompt's row in the data, and each
    # prompt of `wanted` carries them.
    stored = stored.assign(prompt=wanted[is_stored])

    # A stored response is fresh if what scored it has today's fingerprints, and no score is missing.
    columns_of_code = scorers.columns_of_code()
    found = stored.reindex(columns=[*marks, *columns_of_code]).astype(object)
    # Scores of the data itself have no version: their mark is "", and a file may lack it.
    has_mark = found[[*marks]].fillna({"reward": ""}) == pd.Series(marks, dtype=object)
    is_fresh = has_mark.all(axis=1) & found[columns_of_code].notna().all(axis=1)

    # The longest prompts first: batches need little padding, and if memory ends, it does so at the start.
    if len(missing):
        token_ids = encode_prompts(held_out.tokenizer, missing.tolist())
        order = np.argsort([-len(ids) for ids in token_ids], kind="stable")
        missing = missing.iloc[order]

    method = store.settings["method"]

    def score_again(rows: pd.DataFrame) -> None:
        device = next(load().parameters()).device
        rollout = restore(held_out.tokenizer, rows, device)
        # Old scores by code are dropped, because the column `reward`, which names their version, is overwritten. The
        # reward model's score stays: it has a mark of its own.
        rows = rows.drop(columns=set(score_columns(rows)) - {"rm_score"})
        scores = pd.DataFrame(score(rollout), index=rows.index, dtype=object)
        store.replace(rows.assign(**scores))

    def add(rows: pd.Series) -> None:
        store.add(held_out.generate(load(), rows, method, score))

    name = f"{method}, T={held_out.sampling.temperature:g}"
    _in_batches(score_again, stored[~is_fresh], held_out.batch_size, f"{name}, scores")
    _in_batches(add, missing, held_out.batch_size, name)
