"""Answers of an untrained policy with their scores, and critics that learn from some of them.

`signal_apart.py` and `baseline_signal.py` measure how much of a score reaches the gradient of the policy. Both need the
same parts: a start that `marlhf sft` writes, answers that the policy draws, their scores, gradients of log π, and a
critic like the one that a user gets. Every part is kept in a file, so an interrupted measurement resumes.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from marlhf_lite.config.embedded import EMBEDDED_MODELS
from marlhf_lite.config.options import ModelConfig
from marlhf_lite.experiments.named_rewards import text_reward
from marlhf_lite.models.actor_critic import trainable
from marlhf_lite.models.adapters import resolve_adapter_dir
from marlhf_lite.models.loading import build_models, load_base, load_tokenizer
from marlhf_lite.tasks.chats import chat_writer
from marlhf_lite.tasks.loading import load_task
from marlhf_lite.training.rewards import FunctionReward, ModelReward
from marlhf_lite.training.rollout import (
    Rollout,
    Sampling,
    generate,
    generate_in_batches,
    prompt_stream,
)

ROOT = Path(__file__).parents[1]
ROWS_PER_PASS = 8


@dataclass(frozen=True)
class Setting:
    """What a policy is asked, how its answers are scored, and how a critic of these scores is trained."""

    data: dict  # options of `marlhf sft` and `marlhf rm`
    length: int  # of an answer, in tokens
    reward: str = "gold"
    least: int = 0  # tokens that an answer has at least
    answers: int = 512
    batch: int = 32  # answers in each batch, for sampling and for the critic
    head: str = "normal"  # how the critic's head begins
    updates: int = 8  # batches that the critic is trained on, at most
    passes: int = 1  # over each of its batches
    rate: float = 6e-3
    sft: list[str] = field(default_factory=list)  # more options of `marlhf sft`
    # Whether the model is the one that `--model` names; else it is the embedded one of the data.
    pretrained: bool = False


UMBRELLA = {"dataset": "tiny-umbrella", "part": "L64-random-noise", "size": 600}
SMOLLM2 = Setting(
    data={"dataset": str(ROOT / "data" / "sentiment")},
    length=64,
    reward="marlhf_lab.corpora.sentiment:first_valence",
    least=64,
    answers=192,
    batch=16,
    head="zero",
    updates=6,
    passes=2,
    rate=3e-3,
    sft=["--sft_epochs=0", "--lora_r=4", "--lora_alpha=8"],
    pretrained=True,
)
UMBRELLA_WITH_TRAINED_CRITIC = Setting(data=UMBRELLA, length=72, head="zero", passes=6)


class ScoredAnswers:
    """The answers of one setting, and what is computed from them, a file for each part in `folder`."""

    def __init__(self, setting: Setting, folder: Path, model: str, answers: int, seed: int):
        self.setting = setting
        self.folder = folder
        self.answers = answers
        self.seed = seed
        folder.mkdir(parents=True, exist_ok=True)
        dataset = setting.data["dataset"]
        stored = ModelConfig(model=model if setting.pretrained else embedded_model_of(dataset))
        asked_model = [f"--model={model}"] if setting.pretrained else []
        self.sft = self._train_stage("sft", [*asked_model, *setting.sft])
        self.rm = None
        if setting.reward == "rm":
            self.rm = self._train_stage("rm", [*asked_model, f"--sft={folder / 'sft'}"])
        self.base = load_base(stored)
        self.tokenizer = load_tokenizer(stored.model)
        chat = {"chat": chat_writer(self.tokenizer, "auto")} if setting.pretrained else {}
        self.task = load_task(**setting.data, **chat)
        self.models = build_models(self.base, self.sft, self.rm, critic_init="sft")
        function = text_reward(setting.reward, self.task)
        if function:
            self.reward = FunctionReward(function, setting.reward)
        else:
            self.reward = ModelReward(self.models.reward)
        self.policy = self.models.policy.eval()
        self.parameters = trainable(self.models.policy)

    def _train_stage(self, name: str, more: Sequence[str]) -> Path:
        """Return the adapter that `marlhf sft` or `marlhf rm` trains on the setting's data.

        If an earlier call has trained it, it is only read; `more` are options besides those of the data.
        """
        folder = self.folder / name
        if not any(folder.rglob("adapter_model.safetensors")):  # not trained, or not to the end
            data = [f"--{key}={value}" for key, value in self.setting.data.items()]
            words = [*data, *more, f"--seed={self.seed}", f"--output_dir={folder}"]
            shutil.rmtree(folder, ignore_errors=True)
            command = [sys.executable, "-m", "marlhf_lite", name, *words]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return resolve_adapter_dir(name, str(folder))

    def kept(self, name: str, make: Callable):
        """Return what `make()` returns, or what an earlier call has written to the file of this name."""
        path = self.folder / f"{name}.pt"
        if not path.exists():
            begin = time.time()
            found = make()
            new = path.with_suffix(".tmp")  # until the file is whole
            torch.save(found, new)
            os.replace(new, path)
            now = time.strftime("%H:%M:%S")
            print(f"{now} {self.folder.name} {name}: {time.time() - begin:.0f} s", flush=True)
        return torch.load(path, weights_only=False)

    def batch(self, number: int) -> Rollout:
        """Return a batch of scored answers. Its random numbers depend on the seed and its number alone."""
        size = self.setting.batch

        def make() -> dict:
            prompts = prompt_stream(list(self.task.splits["ppo"]["prompt"]), self.seed)
            wanted = list(islice(prompts, self.answers))[number * size :][:size]
            torch.manual_seed(1000 * self.seed + number)
            # Drawn from the policy itself: temperature 1, all tokens.
            sampling = Sampling(
                self.setting.length, temperature=1.0, top_k=0, min_new_tokens=self.setting.least
            )
            rollout = generate_in_batches(
                generate, 0, self.policy.model, self.tokenizer, wanted, sampling
            )[0]
            return vars(rollout) | {"scores": torch.as_tensor(self.reward(rollout)).float()}

        return Rollout(**self.kept(f"answers-{number:02}", make))

    def logprobs(self, part: Rollout) -> Tensor:
        """[B, T] log-probabilities of the answers' tokens, with the policy's weights as they are."""
        return self.policy(part.tokens, part.attention_mask, part.mask.shape[1])[0]

    def all_logprobs(self, rollout: Rollout) -> Tensor:
        """[B, T] log-probabilities of many answers, some rows at a time."""
        parts = [rollout.select(rows).trim() for rows in rows_per_pass(rollout)]
        return torch.cat([rollout.widen(self.logprobs(part)) for part in parts])

    def new_critic(self):
        """Return a critic that has learned nothing yet: from the reward model if there is one, else a new head."""
        start = "rm" if self.rm else "sft"
        head = self.setting.head
        return build_models(self.base, self.sft, self.rm, start, critic_head_init=head).critic


def embedded_model_of(dataset: str) -> str:
    """Return the name of the model that belongs to an embedded corpus.

    tiny-umbrella has tiny-gemma-umbrella; tiny-tldr, and corpora without a model of their own, have tiny-gemma.
    """
    name = "tiny-gemma" + dataset.removeprefix("tiny").removesuffix("-tldr")
    return name if name in EMBEDDED_MODELS else "tiny-gemma"


def rows_per_pass(rollout: Rollout) -> Sequence[Tensor]:
    """Return the row numbers of a rollout in groups that fit in memory."""
    return torch.arange(len(rollout)).split(ROWS_PER_PASS)


def train_critic(critic, batches: Sequence[Rollout], setting: Setting) -> None:
    """Train a critic towards the answers' final scores, as PPO trains it with λ = 1 for values.

    The learning rate rises over the first five batches, as a run's does. Each batch is passed over `setting.passes`
    times.
    """
    parameters = trainable(critic)
    optimizer = torch.optim.AdamW(parameters, lr=setting.rate, weight_decay=0.0)
    for update, rollout in enumerate(batches):
        optimizer.param_groups[0]["lr"] = setting.rate * min(1, (update + 1) / 5)
        for _ in range(setting.passes):
            for rows in rows_per_pass(rollout):
                part = rollout.select(rows).trim()
                values = part.before_tokens(critic(part.tokens, part.attention_mask))
                errors = (values - part.scores[:, None])[part.mask]
                loss = 0.5 * errors.square().sum() / rollout.mask.sum()
                loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
