"""Keep policies of a sentiment study for elective 16: their adapters in bfloat16, and answers to held-out questions.

    python data/sentiment_records.py --model FOLDER PPO=runs/.../training/ppo/policy MA-PPO=runs/.../training/ppo/policy

Writes into `--output`: `adapters/NAME` for each policy that `--adapters` names; `answers.jsonl`, every `EVERY`th
question, answered by the model as it is ("base") and by each policy with the same seed, with the reward; and
`training.jsonl`, the answers that each run kept as samples while it trained.

`data/sentiment_policies` holds those of seed 700 of `sentiment_first`, without adapters; its folder `settle` those of
seed 800 of `sentiment_settle`, trained again on a processor (on a GPU the same seed has other random numbers).
"""

import argparse
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from marlhf_lab.corpora import sentiment
from marlhf_lab.figures.macro_actions import token_pieces
from marlhf_lite.config.options import ModelConfig
from marlhf_lite.extras.judges.judgments import file_name
from marlhf_lite.models.loading import load_base, load_policy, load_tokenizer
from marlhf_lite.tasks.chats import chat_writer, expect_chats
from marlhf_lite.training.rollout import Sampling, generate
from marlhf_lite.utils.jsonl import append_lines, read_lines

DATA = Path(__file__).resolve().parent
# no folder of the questions: they are loaded as a dataset
SETTLE = DATA / "sentiment_policies" / "settle"
HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
# 3: all forms of a question come up
EVERY = 3
SEED = 160
SAMPLING = Sampling(max_new_tokens=64, temperature=0.8, top_k=50)


def keep_adapter(policy: Path, folder: Path) -> None:
    """Copy an adapter, its numbers in bfloat16 and its base by its name on the hub."""
    folder.mkdir(parents=True)
    config = json.loads((policy / "adapter_config.json").read_text(encoding="utf-8"))
    text = json.dumps(config | {"base_model_name_or_path": HUB}, indent=2) + "\n"
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")
    name = "adapter_model.safetensors"
    save_file(
        {key: value.to(torch.bfloat16) for key, value in load_file(policy / name).items()},
        folder / name,
    )


def answers(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    method: str,
    questions: list[str],
    sampling: Sampling,
    reward: Callable,
) -> list[dict]:
    """One row for each question: what a method answered, its tokens, and its reward."""
    torch.manual_seed(SEED)
    prompts = [
        chat_writer(tokenizer, "auto")([{"role": "user", "content": text}]) for text in questions
    ]
    rollout = generate(model, tokenizer, prompts, sampling)
    rows = zip(questions, rollout.responses, rollout.response_ids, rollout.lengths, strict=True)
    return [
        {
            "method": method,
            "question": question,
            "answer": answer,
            "score": reward([""], [answer])[0],
            "tokens": token_pieces(tokenizer, ids[:length]),
        }
        for question, answer, ids, length in rows
    ]


def samples(policy: Path, method: str) -> list[dict]:
    """One row for each answer that the run of a policy kept while it trained."""
    question = re.compile(r"user\n(.*?)<")  # between the marks of the chat template
    return [
        {"method": method, "update": row["update"], "question": question.search(row["prompt"])[1]}
        | {"answer": row["response"], "score": row["score"]}
        for row in read_lines(policy.parent / "samples.jsonl")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=HUB, help="folder or hub name")
    parser.add_argument("--reward", choices=("first_words", "first_valence"), default="first_words")
    parser.add_argument(
        "--min_response_length", type=int, default=0, help="of the answers, as in training"
    )
    parser.add_argument("--output", type=Path, default=SETTLE)
    parser.add_argument("--adapters", default="PPO,MA-PPO", help="policies whose adapters are kept")
    parser.add_argument("policies", nargs="+", metavar="NAME=FOLDER")
    args = parser.parse_args()
    questions = [
        row["prompt"][0]["content"]
        for row in read_lines(DATA / "sentiment" / "test.jsonl")[::EVERY]
    ]
    tokenizer = load_tokenizer(args.model)
    base = load_base(ModelConfig(model=args.model))
    expect_chats(tokenizer)
    shutil.rmtree(args.output / "adapters", ignore_errors=True)
    how = (
        questions,
        replace(SAMPLING, min_new_tokens=args.min_response_length),
        getattr(sentiment, args.reward),
    )
    rows = answers(base, tokenizer, "base", *how)
    kept = []
    for given in args.policies:
        name, folder = given.split("=", 1)
        kept_at = args.output / "adapters" / file_name(name)
        keep_adapter(Path(folder), kept_at)
        kept += samples(Path(folder), name)
        rows += answers(load_policy(base, kept_at, trainable=False), tokenizer, name, *how)
        print(
            f"{name}: {sum(row['score'] for row in rows[-len(questions) :]) / len(questions):+.2f}",
            flush=True,
        )
        if name not in args.adapters.split(","):
            shutil.rmtree(kept_at)
    for name, found in (("answers", rows), ("training", kept)):
        path = args.output / f"{name}.jsonl"
        path.unlink(missing_ok=True)
        append_lines(path, found)


if __name__ == "__main__":
    main()
