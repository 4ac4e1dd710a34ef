"""ζ by syntax: macro actions are phrases of the response (§3.2.1, Appendix B.4), or its sentences.

Unlike the rules in `macro`, these read the response's text; the tensors of a rollout are on any device, the text is
handled on the CPU, one response at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from marlhf_lite.macro import MacroActions
from marlhf_lite.macro._checks import check_int, check_mask, check_tensor
from marlhf_lite.parsing.base import ParsedSentence, Parser, check_sentences
from marlhf_lite.parsing.offsets import TokenText
from marlhf_lite.parsing.sentences import split_sentences
from marlhf_lite.parsing.spans import ResponseTokens
from marlhf_lite.parsing.trees import cut, leaves
from marlhf_lite.utils.errors import InputError


class _TextRule:
    """A rule that needs every response's tokens as text: context values ``token_ids`` [B,T] and ``tokenizer``."""

    def __init__(self) -> None:
        self._reader: TokenText | None = None

    def _responses(self, mask: Tensor, token_ids: Tensor | None, tokenizer: Any) -> list[ResponseTokens]:
        check_mask(mask)
        if token_ids is None or tokenizer is None:
            raise InputError(f"{self!r} reads the text: pass token_ids [B,T] and the tokenizer they are of")
        check_tensor("token_ids", token_ids, tuple(mask.shape))
        if self._reader is None or self._reader.tokenizer is not tokenizer:
            self._reader = TokenText(tokenizer)
        rows = zip(token_ids.tolist(), mask.sum(1).tolist(), strict=True)
        return [ResponseTokens(*self._reader(ids[:count])) for ids, count in rows]


def _segmentation(rows: Sequence[Sequence[bool]], mask: Tensor) -> MacroActions:
    """From one flag a token, a row each as long as its response."""
    width = mask.shape[1]
    padded = [[*row, *[False] * (width - len(row))] for row in rows]
    starts = torch.tensor(padded, dtype=torch.bool, device=mask.device).reshape(mask.shape)
    return MacroActions.from_starts(starts, mask)


class Sentence(_TextRule):
    """One macro action a sentence, found by rule (see `split_sentences`).

    White space before a sentence belongs to it; a token that straddles two belongs to the first. EOS and other tokens
    without text join the sentence before them.
    """

    def __call__(
        self, mask: Tensor, *, token_ids: Tensor | None = None, tokenizer: Any = None, **context: Any
    ) -> MacroActions:
        return _segmentation([_sentence_starts(r) for r in self._responses(mask, token_ids, tokenizer)], mask)

    def __repr__(self) -> str:
        return "Sentence()"


def _sentence_starts(response: ResponseTokens) -> list[bool]:
    for _, end in split_sentences(response.text):
        response.begin(response.taken)
        response.take(end)
    return response.starts()


class Parsing(_TextRule):
    """Phrases of at most so many tokens, from the constituency trees of a response's sentences, depth-first.

    A node with fewer than ``cutoff`` model tokens is one macro action (``inclusive``: at most ``cutoff``, as §3.2.1 has
    it); of a larger one, the children are visited. A node with a single leaf (a word or mark, however many tokens)
    joins the macro action before it, so that punctuation never stands alone; the first of a response begins one.

    A token belongs to the first leaf that it has a character of, white space to the leaf behind it. Tokens without
    text, such as EOS, are in no tree: they are not counted, and join the macro action before them. A sentence without a
    tree falls back to one macro action a token (and so does what follows it without a text); so a response without any
    tree is cut as token-level PPO cuts it.

    Args:
        parser: see `Parser`; `GrammarParser`, `LinkGrammarParser`, `StanzaParser`, `PythonParser`, or any function from
            a text to `ParsedSentence`s.
        workers: threads that parse while the models score (see `prepare`); None takes what the parser asks for, which
            is none where parsing is cheap. 0 parses when the rule is called.
    """

    def __init__(self, parser: Parser, cutoff: int = 5, inclusive: bool = False, workers: int | None = None):
        super().__init__()
        check_int("cutoff", cutoff, least=1)
        if not callable(parser):
            raise InputError(f"parser: expected a function from text to parsed sentences, got {type(parser).__name__}")
        workers = getattr(parser, "workers", 0) if workers is None else workers
        check_int("workers", workers, least=0)
        self.parser, self.cutoff, self.inclusive, self.workers = parser, cutoff, bool(inclusive), workers
        self._pool = ThreadPoolExecutor(workers, "parser") if workers else None  # starts its threads when needed
        self._begun: dict[str, Future] = {}
        self._metrics: dict[str, float] = {}

    def __call__(
        self, mask: Tensor, *, token_ids: Tensor | None = None, tokenizer: Any = None, **context: Any
    ) -> MacroActions:
        responses = self._responses(mask, token_ids, tokenizer)
        if self._pool:
            self._begin(responses)
        rows, sentences, fallbacks, seconds = [], 0, 0, 0.0
        for i, response in enumerate(responses):
            parsed, spent = self._parsed(response.text)
            check_sentences(parsed, response.text, f"response {i}")
            parsed = list(_with_gaps(parsed, response.text))
            rows.append(self._starts(response, parsed))
            sentences, seconds = sentences + len(parsed), seconds + spent
            fallbacks += sum(s.tree is None for s in parsed)
        self._begun = {}
        milliseconds = 1e3 * seconds / max(len(responses), 1)
        self._metrics = {"fallback_rate": fallbacks / max(sentences, 1), "parse_milliseconds": milliseconds}
        return _segmentation(rows, mask)

    def prepare(self, mask: Tensor, *, token_ids: Tensor | None = None, tokenizer: Any = None, **context: Any) -> None:
        """Begin parsing these responses in the background, if there are workers; the next call of the rule collects."""
        if self._pool:
            self._begin(self._responses(mask, token_ids, tokenizer))

    def metrics(self) -> dict[str, float]:
        """Of the last call: the share of sentences that fell back, and the parser's milliseconds per response."""
        return dict(self._metrics)

    def __repr__(self) -> str:
        return f"Parsing({self.parser!r}, cutoff={self.cutoff}, inclusive={self.inclusive})"

    def _begin(self, responses: list[ResponseTokens]) -> None:
        texts = dict.fromkeys(r.text for r in responses)
        self._begun = {t: self._begun.get(t) or self._pool.submit(_timed, self.parser, t) for t in texts}

    def _parsed(self, text: str) -> tuple[list[ParsedSentence], float]:
        return self._begun[text].result() if self._pool else _timed(self.parser, text)

    def _starts(self, response: ResponseTokens, sentences: list[ParsedSentence]) -> list[bool]:
        """Is each token the first of a macro action?"""
        if not sentences:
            return [True] * response.count
        most = self.cutoff if self.inclusive else self.cutoff - 1
        for sentence in sentences:
            if sentence.tree is None:
                response.take_singly(sentence.end)
                continue
            bounds = response.bounds([sentence.start + leaf.end for leaf in leaves(sentence.tree)], sentence.end)
            for first, last, joins in cut(sentence.tree, bounds, most):
                if first < last and not joins:  # the first token of all begins one whatever it is
                    response.begin(first)
            response.take(sentence.end)
        return response.starts()


def _timed(parser: Parser, text: str) -> tuple[list[ParsedSentence], float]:
    start = time.perf_counter()
    return list(parser(text)), time.perf_counter() - start


def _with_gaps(sentences: Sequence[ParsedSentence], text: str) -> Iterator[ParsedSentence]:
    """The sentences, and between them text that is in none as sentences without a tree."""
    last = 0
    for sentence in [*sentences, ParsedSentence(len(text), len(text), None)]:
        if between := text[last : sentence.start].rstrip():
            yield ParsedSentence(last, last + len(between), None)
        if sentence.start < sentence.end:
            yield sentence
        last = sentence.end
