"""Any list of checkpoints, at any list of temperatures, on the same prompts; what is stored is not done again."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm.auto import tqdm

from marlhf_lite.evaluation.responses import Key, Store, noise_names, prompt_ids, restore
from marlhf_lite.evaluation.sampling import generate_seeded, merged
from marlhf_lite.evaluation.scores import as_rows, scored
from marlhf_lite.models.actor_critic import PolicyModel, ScalarHeadModel
from marlhf_lite.tasks.tokenization import encode_prompts
from marlhf_lite.training.rewards import ModelReward
from marlhf_lite.training.rollout import Rollout, Sampling
from marlhf_lite.utils.errors import InputError

# Of a config, what says where weights came from and not what they are.
_PLACES = ("base_model_name_or_path", "_name_or_path", "transformers_version", "peft_version", "inference_mode")


@dataclass(frozen=True)
class Scorers:
    """Who scores responses. `load` and `load_rm` turn a folder into a role, when it is first needed and not before."""

    load: Callable[[Path], PolicyModel]
    reference: Path | None = None  # for the KL; None for none
    rm: Path | None = None
    load_rm: Callable[[Path], ScalarHeadModel] | None = None
    gold: Callable[[list[str], list[str]], list[float]] | None = None


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
) -> list[dict]:
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
        Rows by checkpoint, temperature, prompt and sample: id, prompt, method, temperature, sample, seed, response,
        token_ids, tokens, ended, and where there is a scorer kl (k1, nats), rm_score and gold. `checkpoint`,
        `reference` and `rm` are fingerprints of weights.

    Raises:
        InputError: a folder without weights, no prompts, no samples, or a stored file that is broken.
    """
    if not prompts or samples < 1:
        raise InputError(f"{len(prompts)} prompts and {samples} samples: give at least one of each")
    prints = {name: fingerprint(path, name) for name, path in checkpoints.items()}
    worker = _Worker(scorers, tokenizer, batch_size)
    keys = {Key(id, k, seed): p for id, p in zip(prompt_ids(prompts), prompts, strict=True) for k in range(samples)}
    jobs = []
    for name, path in checkpoints.items():
        for temperature in dict.fromkeys(temperatures or (sampling.temperature,)):
            how = replace(sampling, temperature=float(temperature))
            settings = {"fingerprint": prints[name], "model": model, **vars(how)}
            wanted = {key: p for key, p in keys.items() if temperature > 0 or key.sample == 0}
            jobs.append(_Job(name, Path(path), how, Store.of(folder, name, settings), wanted))
    worker.run(jobs)
    return [worker.shown(job, key) for job in jobs for key in job.wanted]


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


@dataclass(frozen=True)
class _Job:
    """One checkpoint at one temperature."""

    name: str
    place: Path
    sampling: Sampling
    store: Store
    wanted: dict[Key, str]  # to prompts

    def missing(self) -> list[Key]:
        return [key for key in self.wanted if key not in self.store.rows]


class _Worker:
    """Fills stores. Models stay loaded as long as they are needed: reference and reward model throughout."""

    def __init__(self, scorers: Scorers, tokenizer, batch_size: int):
        self.scorers, self.tokenizer, self.batch_size = scorers, tokenizer, batch_size
        given = {"reference": scorers.reference, "rm": scorers.rm}
        self.marks = {name: fingerprint(path, name) for name, path in given.items() if path}
        self.reference = functools.cache(lambda: merged(scorers.load(scorers.reference)).eval())
        self.reward = functools.cache(lambda: ModelReward(merged(scorers.load_rm(scorers.rm))))

    def run(self, jobs: Sequence[_Job]) -> None:
        """Generates what is missing and scores anew what others scored, with one bar over all of it."""
        total = sum(len(job.missing()) + len(self.stale(job)) for job in jobs)
        place = policy = None
        with tqdm(total=total, desc="responses", unit="", leave=False, disable=not total) as bar:
            for job in jobs:
                if job.place != place:
                    policy = functools.cache(functools.partial(self.policy, job.place))  # lets go of the one before
                    place = job.place
                bar.set_postfix_str(f"{job.name}, T={job.sampling.temperature:g}")
                self.rescore(job, policy, bar)
                self.generate(job, policy, bar)

    def policy(self, place: Path) -> PolicyModel:
        same = self.scorers.reference and place.resolve() == Path(self.scorers.reference).resolve()
        return self.reference() if same else merged(self.scorers.load(place)).eval()

    def stale(self, job: _Job) -> list[Key]:
        """Responses that lack a score, or have it from another model than is asked now."""
        there = [key for key in job.wanted if key in job.store.rows]
        return [key for key in there if not self.is_scored(job.store.rows[key])]

    def is_scored(self, row: Mapping) -> bool:
        known = all(row.get(name) == mark for name, mark in self.marks.items())
        return known and (self.scorers.gold is None or "gold" in row)

    def rescore(self, job: _Job, policy: Callable[[], PolicyModel], bar: tqdm) -> None:
        rows = []
        for chunk in _chunks(self.stale(job), self.batch_size):
            old = [job.store.rows[key] for key in chunk]
            rollout = restore(self.tokenizer, old, next(policy().parameters()).device)
            rows += [row | new for row, new in zip(old, self.scores(rollout, policy), strict=True)]
            bar.update(len(chunk))
        if rows:
            job.store.replace(rows)

    def generate(self, job: _Job, policy: Callable[[], PolicyModel], bar: tqdm) -> None:
        for chunk in _chunks(self.by_length(job), self.batch_size):
            prompts = [job.wanted[key] for key in chunk]
            rollout = generate_seeded(policy().model, self.tokenizer, prompts, noise_names(chunk), job.sampling)
            ids = [row[m].tolist() for row, m in zip(rollout.response_ids, rollout.mask, strict=True)]
            about = {"method": job.name, "temperature": job.sampling.temperature}
            scores = self.scores(rollout, policy)
            rows = [
                key._asdict() | about | {"prompt": prompt, "token_ids": tokens} | score
                for key, prompt, tokens, score in zip(chunk, prompts, ids, scores, strict=True)
            ]
            job.store.add(rows)
            bar.update(len(chunk))

    def by_length(self, job: _Job) -> list[Key]:
        """What is missing, long prompts first: little padding, the memory needed most is needed at once."""
        keys = job.missing()
        prompts = list(dict.fromkeys(job.wanted[key] for key in keys))
        lengths = dict(zip(prompts, map(len, encode_prompts(self.tokenizer, prompts)), strict=True)) if prompts else {}
        return sorted(keys, key=lambda key: -lengths[job.wanted[key]])

    def scores(self, rollout: Rollout, policy: Callable[[], PolicyModel]) -> list[dict]:
        models = (policy(), self.reference()) if self.scorers.reference else (None, None)
        reward = self.reward() if self.scorers.rm else None
        columns = scored(rollout, *models, reward, self.scorers.gold)
        return [row | self.marks for row in as_rows(columns)]

    def shown(self, job: _Job, key: Key) -> dict:
        """A stored row without scores that were not asked for."""
        row, asked = dict(job.store.rows[key]), {"kl": "reference" in self.marks, "rm_score": "rm" in self.marks}
        asked |= {"reference": asked["kl"], "rm": asked["rm_score"], "gold": self.scorers.gold is not None}
        return {name: value for name, value in row.items() if asked.get(name, True)} | {"method": job.name}


def _chunks(keys: Sequence[Key], size: int) -> list[Sequence[Key]]:
    return [keys[start : start + size] for start in range(0, len(keys), size)]
