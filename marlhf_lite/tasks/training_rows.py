"""What SFT and the reward model train on: rows of token ids, as TRL's trainers take them."""

from collections.abc import Sequence

import datasets

from marlhf_lite.tasks.answers import encode_answers, encode_continuation, encode_responses
from marlhf_lite.tasks.observations import make_message
from marlhf_lite.tasks.tokenization import encode_prompts


def sft_dataset(tokenizer, rows: datasets.Dataset, limit: int) -> datasets.Dataset:
    """Return columns `input_ids` and `completion_mask` (1 on the chosen response), as `trl.SFTTrainer` takes them.

    Rows with a `dialogue`, texts of policy and environment in turn, teach only the policy's turns. `limit` is the
    largest number of tokens of a response, or of one of the policy's turns.
    """
    if "dialogue" in rows.column_names:
        prompts = encode_prompts(tokenizer, rows["prompt"])
        completions = []
        masks = []
        for texts in rows["dialogue"]:
            ids, mask = _encode_dialogue(tokenizer, texts, limit)
            completions.append(ids)
            masks.append(mask)
    else:
        prompts, completions = encode_answers(tokenizer, rows["prompt"], rows["chosen"], limit)
        masks = [[1] * len(ids) for ids in completions]
    columns: dict[str, list[list[int]]] = {"input_ids": [], "completion_mask": []}
    for prompt, completion, mask in zip(prompts, completions, masks, strict=True):
        columns["input_ids"].append(prompt + completion)
        columns["completion_mask"].append([0] * len(prompt) + mask)
    return datasets.Dataset.from_dict(columns)


def _encode_dialogue(tokenizer, texts: Sequence[str], limit: int) -> tuple[list[int], list[int]]:
    """Return the token ids of texts of policy and environment in turn, and a mask that is 1 on the policy's."""
    ids: list[int] = []
    mask: list[int] = []
    for number, text in enumerate(texts):
        is_of_policy = number % 2 == 0
        if is_of_policy:
            (new_ids,) = encode_responses(tokenizer, [text], limit)
        else:
            (observation,) = encode_continuation(tokenizer, [text])
            new_ids = make_message(tokenizer, observation, before=ids[-1:])
        ids += new_ids
        mask += [int(is_of_policy)] * len(new_ids)
    return ids, mask


def pair_dataset(tokenizer, rows: datasets.Dataset, limit: int) -> datasets.Dataset:
    """Return columns `chosen_ids` and `rejected_ids` (prompt and response), as `trl.RewardTrainer` takes them.

    `limit` is the largest number of tokens of a response.
    """
    columns = {}
    for side in ("chosen", "rejected"):
        prompts, responses = encode_answers(tokenizer, rows["prompt"], rows[side], limit)
        wholes = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        columns[f"{side}_ids"] = wholes
    return datasets.Dataset.from_dict(columns)
