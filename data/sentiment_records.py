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
# Outside the folder of the questions, data/sentiment, which is loaded as a dataset.
SETTLE = DATA / "sentiment_policies" / "settle"
HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
EVERY = 3  # every third question: so all forms of a question come up
SEED = 160
SAMPLING = Sampling(max_new_tokens=64, temperature=0.8, top_k=50)


def keep_adapter(policy: Path, folder: Path) -> None:
    """Copy the adapter of a policy to `folder`, with its weights in bfloat16.

    Its config names the base model as the hub does, instead of by a folder of the machine that trained it.
    """
    folder.mkdir(parents=True)
    config = json.loads((policy / "adapter_config.json").read_text(encoding="utf-8"))
    text = json.dumps(config | {"base_model_name_or_path": HUB}, indent=2) + "\n"
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")
    name = "adapter_model.safetensors"
    weights = load_file(policy / name)
    halved = {key: value.to(torch.bfloat16) for key, value in weights.items()}
    save_file(halved, folder / name)


def answers(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    method: str,
    questions: list[str],
    sampling: Sampling,
    reward: Callable,
) -> list[dict]:
    """One row for each question: what the model of a method answered, the answer's tokens, and its reward."""
    torch.manual_seed(SEED)
    write_chat = chat_writer(tokenizer, "auto")
    prompts = [write_chat([{"role": "user", "content": text}]) for text in questions]
    rollout = generate(model, tokenizer, prompts, sampling)
    rows = []
    for question, answer, ids, length in zip(
        questions, rollout.responses, rollout.response_ids, rollout.lengths, strict=True
    ):
        (score,) = reward([""], [answer])  # without the prompt, which the reward does not read
        tokens = token_pieces(tokenizer, ids[:length])  # without padding
        row = {"method": method, "question": question, "answer": answer}
        rows.append(row | {"score": score, "tokens": tokens})
    return rows


def samples(policy: Path, method: str) -> list[dict]:
    """One row for each answer that the run of a policy kept while it trained."""
    question_in_prompt = re.compile(r"user\n(.*?)<")  # between the marks of the chat template
    rows = []
    for sample in read_lines(policy.parent / "samples.jsonl"):
        question = question_in_prompt.search(sample["prompt"])[1]
        row = {"method": method, "update": sample["update"], "question": question}
        rows.append(row | {"answer": sample["response"], "score": sample["score"]})
    return rows


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
    asked = read_lines(DATA / "sentiment" / "test.jsonl")[::EVERY]
    questions = [row["prompt"][0]["content"] for row in asked]
    tokenizer = load_tokenizer(args.model)
    base = load_base(ModelConfig(model=args.model))
    expect_chats(tokenizer)
    shutil.rmtree(args.output / "adapters", ignore_errors=True)
    sampling = replace(SAMPLING, min_new_tokens=args.min_response_length)
    reward = getattr(sentiment, args.reward)
    of_all = answers(base, tokenizer, "base", questions, sampling, reward)
    of_training = []
    for given in args.policies:
        name, folder = given.split("=", 1)
        kept_at = args.output / "adapters" / file_name(name)
        keep_adapter(Path(folder), kept_at)
        of_training += samples(Path(folder), name)
        # The adapter answers as it is kept, in bfloat16, so that a reader who loads it gets the same answers.
        policy = load_policy(base, kept_at, trainable=False)
        of_policy = answers(policy, tokenizer, name, questions, sampling, reward)
        of_all += of_policy
        mean = sum(row["score"] for row in of_policy) / len(of_policy)
        print(f"{name}: {mean:+.2f}", flush=True)
        if name not in args.adapters.split(","):  # it was only written to answer from there
            shutil.rmtree(kept_at)
    for name, found in (("answers", of_all), ("training", of_training)):
        path = args.output / f"{name}.jsonl"
        path.unlink(missing_ok=True)
        append_lines(path, found)


if __name__ == "__main__":
    main()
