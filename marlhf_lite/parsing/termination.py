"""Termination conditions that read the text: macro actions are phrases of the response (§3.2.1, B.4), or sentences.

The tensors of a rollout may be on any device; the text is handled on the CPU, one response at a time.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from marlhf_lite.macro import MacroActions, TerminationRule
from marlhf_lite.parsing.base import ParsedSentence, Parser, cut, leaves, split_sentences
from marlhf_lite.parsing.spans import ResponseTokens, TokenText
from marlhf_lite.utils.errors import InputError

# above this share of sentences without a tree, parsing is token-level PPO in disguise
FALLBACK_LIMIT = 0.5


class _TextRule(TerminationRule):
    """A rule that needs every response's tokens as text: context values ``token_ids`` [B,T] and ``tokenizer``."""

    def __init__(self) -> None:
        self._reader: TokenText | None = None

    def _responses(
        self, mask: Tensor, token_ids: Tensor | None = None, tokenizer: Any = None, **context: Any
    ) -> list[ResponseTokens]:
        if token_ids is None or tokenizer is None:
            raise InputError(
                f"{type(self).__name__} reads the text: pass token_ids [B,T] and the tokenizer"
            )
        if self._reader is None or self._reader.tokenizer is not tokenizer:
            self._reader = TokenText(tokenizer)
        rows = zip(token_ids.tolist(), mask.sum(1).tolist(), strict=True)
        return [ResponseTokens(*self._reader(ids[:count])) for ids, count in rows]


def _segmentation(rows: Sequence[Sequence[bool]], mask: Tensor) -> MacroActions:
    """Make macro actions from one flag a token; each row is as long as its response."""
    width = mask.shape[1]
    padded = [[*row, *[False] * (width - len(row))] for row in rows]
    starts = torch.tensor(padded, dtype=torch.bool, device=mask.device).reshape(mask.shape)
    return MacroActions.from_starts(starts, mask)


class Sentence(_TextRule):
    """One macro action per sentence, found by rule (see `split_sentences`).

    White space before a sentence belongs to it; a token that straddles two belongs to the first. EOS and other tokens
    without text join the sentence before them.
    """

    def segment(self, mask: Tensor, **context: Any) -> MacroActions:
        rows = []
        for response in self._responses(mask, **context):
            ends = [response.before(end) for _, end in split_sentences(response.text)]
            rows.append(response.starts((end, "begin") for end in ends))
        return _segmentation(rows, mask)


class Parsing(_TextRule):
    """Phrases of at most `cutoff` tokens, from the constituency trees of a response's sentences, depth-first.

    A node with fewer than ``cutoff`` model tokens is one macro action (``inclusive``: at most ``cutoff``, as in
    §3.2.1); of a larger one, the children are visited. A node with a single leaf (a word or mark, however many tokens)
    joins the macro action before it, so that punctuation never stands alone; the first of a response begins one.

    A token belongs to the first leaf that it shares a character with, white space to the leaf after it. Tokens without
    text, such as EOS, do not count and join the macro action before them. A sentence without a tree falls back to one
    macro action per token; the share of such sentences is the metric `fallback_rate`.

    Args:
        parser: one of this package's, or any function from a text to a list of `ParsedSentence`, see `Parser`.
    """

    def __init__(self, parser: Parser, cutoff: int = 5, inclusive: bool = False):
        super().__init__()
        self.parser, self.cutoff, self.inclusive = parser, cutoff, inclusive
        self._counts: Counter[str] = Counter()  # of the last call

    def segment(self, mask: Tensor, **context: Any) -> MacroActions:
        responses = self._responses(mask, **context)
        parsed = self.parse(list(dict.fromkeys(response.text for response in responses)))
        parts = [list(_with_gaps(parsed[response.text], response.text)) for response in responses]
        trees = [sentence.tree for sentences in parts for sentence in sentences]
        self._counts = Counter(sentences=len(trees), without_tree=trees.count(None))
        # Without any text every token stands alone, as in token-level PPO.
        rows = [
            r.starts(self._pieces(r, s)) if s else [True] * r.count
            for r, s in zip(responses, parts, strict=True)
        ]
        return _segmentation(rows, mask)

    def parse(self, texts: Sequence[str]) -> dict[str, list[ParsedSentence]]:
        """Return the sentences of each text. Override it if a parser takes many texts at once."""
        return {text: list(self.parser(text)) for text in texts}

    def metrics(self) -> dict[str, float]:
        """Return `fallback_rate`, the share of the last call's sentences that have no tree and are cut at every token.

        It counts all processes, so all must call it.
        """
        counts = sum(gather_object([self._counts]), Counter())
        return {"fallback_rate": counts["without_tree"] / max(counts["sentences"], 1)}

    def check(self) -> None:
        """Raise `InputError` in all processes if more than half of the last call's sentences had no tree."""
        if (share := self.metrics()["fallback_rate"]) > FALLBACK_LIMIT:
            raise InputError(
                f"--termination parsing: {type(self.parser).__name__} found no tree for {share:.0%} of the sentences, "
                "so most macro actions are single tokens: take --parser python for programs, or for English the rule "
                "--termination link_phrases:Phrases of the examples"
            )

    def _pieces(
        self, response: ResponseTokens, sentences: list[ParsedSentence]
    ) -> Iterator[tuple[int, str]]:
        """Yield the runs of tokens that the trees cut, as `ResponseTokens.starts` takes them."""
        most, done = self.cutoff if self.inclusive else self.cutoff - 1, 0
        for sentence in sentences:
            end = max(done, response.before(sentence.end))
            if sentence.tree is None:
                yield end, "single"
            else:
                inner = [
                    response.before(sentence.start + leaf.end) for leaf in leaves(sentence.tree)
                ]
                bounds = [done, *(max(done, bound) for bound in inner[:-1]), end]
                for stop, single_leaf in cut(sentence.tree, bounds, most):
                    if done < stop:
                        yield stop, "join" if single_leaf else "begin"
                    done = stop
                yield end, "join"
            done = end


def _with_gaps(sentences: Sequence[ParsedSentence], text: str) -> Iterator[ParsedSentence]:
    """Yield the sentences, and the text between them as sentences without a tree."""
    last = 0
    for sentence in [*sentences, ParsedSentence(len(text), len(text), None)]:
        if between := text[last : sentence.start].rstrip():
            yield ParsedSentence(last, last + len(between), None)
        if sentence.start < sentence.end:
            yield sentence
        last = sentence.end
