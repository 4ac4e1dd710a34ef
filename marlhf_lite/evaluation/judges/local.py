"""A causal LM on this machine as a judge: is "A" or "B" the likelier next word?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from marlhf_lite.evaluation.judges.criteria import Criteria, letter_prompt, wording
from marlhf_lite.evaluation.judges.judge import Answer, Judge, Question
from marlhf_lite.evaluation.judges.scorers import fingerprint
from marlhf_lite.models.actor_critic import position_ids
from marlhf_lite.tasks.tokenization import pad
from marlhf_lite.utils.errors import InputError


class LocalJudge(Judge):
    """Reads log p(A) and log p(B) where the answer is to follow; the higher one wins, equal ones are a tie.

    Small models lean towards one letter. With both orders `combine` takes the mean of each response's
    log-probability, in which a constant lean cancels; `position` in the summary shows it.

    Args:
        model: any causal LM of transformers, with the base's weights or an adapter's.
        tokenizer: its tokenizer; its chat template is used where it has one.
        criteria: what is judged by.
        name: of the judge.
        batch_size: questions per forward pass.

    Raises:
        InputError: a tokenizer in which A and B are not one token each after the same beginning.
    """

    def __init__(self, model, tokenizer, criteria: Criteria, name: str = "local", batch_size: int = 16):
        self.model, self.tokenizer, self._criteria = model, tokenizer, criteria
        self.name, self.criteria, self.batch_size = name, criteria.label, batch_size
        self.lead, self.letters = _letters(tokenizer)
        self.content = fingerprint(model)

    def identity(self) -> dict:
        return {
            "kind": "local",
            "content": self.content,
            "wording": wording(self._criteria, letter_prompt),
            "template": self.tokenizer.chat_template or "",
        }

    @torch.no_grad()
    def __call__(self, questions: Sequence[Question]) -> list[Answer]:
        """Answers with `scores` {"logprob": nats} of both letters; skipped where texts are too long for the model."""
        contexts = [self._context(question) for question in questions]
        room = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        answers: list = [
            Answer("skipped", raw=f"{len(ids)} tokens, the model takes {room}") if room and len(ids) > room else None
            for ids in contexts
        ]
        fit = [ids for ids, answer in zip(contexts, answers, strict=True) if answer is None]
        found = iter(self._read(fit).tolist() if fit else ())
        return [_answer(*next(found)) if answer is None else answer for answer in answers]

    def _context(self, question: Question) -> list[int]:
        """Token ids up to where the letter stands."""
        text = letter_prompt(self._criteria, question)
        if self.tokenizer.chat_template:
            chat = [{"role": "user", "content": text}]
            text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]  # the template has put its own
        else:
            ids = self.tokenizer(text)["input_ids"]
        return ids + self.lead

    def _read(self, contexts: list[list[int]]) -> Tensor:
        """[N, 2] log-probabilities of A and B, float32."""
        self.model.eval()
        device = next(self.model.parameters()).device
        ids, mask = pad(contexts, self.tokenizer.pad_token_id, left=True)
        ids, mask = ids.to(device), mask.to(device)
        logits = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=position_ids(mask),
            logits_to_keep=1,
            use_cache=False,
        ).logits[:, -1]
        return torch.log_softmax(logits.float(), dim=-1)[:, self.letters]


def _letters(tokenizer) -> tuple[list[int], list[int]]:
    """`(tokens before the letter, the tokens of A and B)`, as they follow a text (a chat begins its turn without a
    space)."""
    space = "" if tokenizer.chat_template else " "
    a, b = (tokenizer(space + letter, add_special_tokens=False)["input_ids"] for letter in "AB")
    if len(a) != len(b) or a[:-1] != b[:-1] or a[-1] == b[-1]:
        raise InputError("local judge: its tokenizer has no single token for A and for B: take another model")
    return a[:-1], [a[-1], b[-1]]


def _answer(a: float, b: float) -> Answer:
    choice = "tie" if a == b else "A" if a > b else "B"
    return Answer(choice, {"A": {"logprob": a}, "B": {"logprob": b}})
