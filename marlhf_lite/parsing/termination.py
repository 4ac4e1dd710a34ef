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

# Above this share of sentences without a tree, which are cut at every token, parsing is token-level PPO in disguise.
FALLBACK_LIMIT = 0.5


class _TextRule(TerminationRule):
    """A rule that needs every response's tokens as text: context values ``token_ids`` [B,T] and ``tokenizer``."""

    def __init__(self) -> None:
        self._reader: TokenText | None = None

    def _responses(
        self, mask: Tensor, token_ids: Tensor | None = None, tokenizer: Any = None, **context: Any
    ) -> list[ResponseTokens]:
        """Return the text and the tokens of each response; `mask` is 1 on its tokens, which come before the padding.

        Raises `InputError` if the tokens or their tokenizer are missing.
        """
        if token_ids is None or tokenizer is None:
            raise InputError(
                f"{type(self).__name__} reads the text: pass token_ids [B,T] and the tokenizer"
            )
        # The reader keeps the texts of pairs of tokens from call to call, so it is made anew for a new tokenizer only.
        if self._reader is None or self._reader.tokenizer is not tokenizer:
            self._reader = TokenText(tokenizer)
        responses = []
        for ids, count in zip(token_ids.tolist(), mask.sum(1).tolist(), strict=True):
            text, spans = self._reader(ids[:count])
            responses.append(ResponseTokens(text, spans))
        return responses


def _macro_actions(flags: Sequence[Sequence[bool]], mask: Tensor) -> MacroActions:
    """Return the macro actions that begin at the flagged tokens; each response has a list with a flag per token."""
    starts = torch.zeros_like(mask)  # [B,T]; padding begins nothing
    for row, flags_of_response in enumerate(flags):
        starts[row, : len(flags_of_response)] = torch.tensor(flags_of_response, dtype=torch.bool)
    return MacroActions.from_starts(starts, mask)


class Sentence(_TextRule):
    """One macro action per sentence, found by rule (see `split_sentences`).

    White space before a sentence belongs to the sentence. A token that straddles two sentences belongs to the first.
    EOS and other tokens without text join the sentence before them.
    """

    def segment(self, mask: Tensor, **context: Any) -> MacroActions:
        """Return the macro actions: each sentence is a piece up to its end, and the next one begins there."""
        flags = []
        for response in self._responses(mask, **context):
            pieces = []
            for _, end in split_sentences(response.text):
                pieces.append((response.count_before(end), "begin"))
            flags.append(response.starts(pieces))
        return _macro_actions(flags, mask)


class Parsing(_TextRule):
    """Phrases of at most `cutoff` tokens, from the constituency trees of a response's sentences, depth-first.

    A node with fewer than ``cutoff`` tokens of the model is one macro action (with ``inclusive``: at most ``cutoff``,
    as in §3.2.1). If a node has more, its children are visited. A node with a single leaf (a word or mark, however many
    tokens it has) joins the macro action before it, so that punctuation never stands alone. If it is the first node of
    a response, it begins a macro action.

    A token belongs to the first leaf that it shares a character with, white space to the leaf after it. Tokens without
    text, such as EOS, do not count and join the macro action before them. A sentence without a tree falls back to one
    macro action per token; the share of such sentences is the metric `fallback_rate`.

    Args:
        parser: one of this package's, or any function from a text to a list of `ParsedSentence`, see `Parser`.
    """

    def __init__(self, parser: Parser, cutoff: int = 5, inclusive: bool = False):
        super().__init__()
        self.parser = parser
        self.cutoff = cutoff
        self.inclusive = inclusive
        # Of the last call: how many `sentences`, and how many of them are `without_tree`.
        self._counts: Counter[str] = Counter()

    def segment(self, mask: Tensor, **context: Any) -> MacroActions:
        """Return the macro actions, and count the sentences without a tree for `metrics`.

        Equal texts are parsed once.
        """
        responses = self._responses(mask, **context)
        different_texts = list(dict.fromkeys(response.text for response in responses))
        parsed = self.parse(different_texts)
        self._counts = Counter(sentences=0, without_tree=0)
        flags = []
        for response in responses:
            sentences = list(_with_gaps(parsed[response.text], response.text))
            self._counts["sentences"] += len(sentences)
            self._counts["without_tree"] += sum(sentence.tree is None for sentence in sentences)
            if sentences:
                pieces = self._pieces(response, sentences)
                flags.append(response.starts(pieces))
            else:  # without any text every token stands alone, as in token-level PPO
                flags.append([True] * response.count)
        return _macro_actions(flags, mask)

    def parse(self, texts: Sequence[str]) -> dict[str, list[ParsedSentence]]:
        """Return the sentences of each text. Override it if a parser takes many texts at once."""
        return {text: list(self.parser(text)) for text in texts}

    def metrics(self) -> dict[str, float]:
        """Return `fallback_rate`, the share of the last call's sentences that have no tree and are cut at every token.

        It counts all processes, so all must call it.
        """
        counts_of_all_processes = sum(gather_object([self._counts]), Counter())
        sentences = max(counts_of_all_processes["sentences"], 1)
        return {"fallback_rate": counts_of_all_processes["without_tree"] / sentences}

    def check(self) -> None:
        """Raise `InputError` in all processes if more than half of the last call's sentences had no tree."""
        share = self.metrics()["fallback_rate"]
        if share > FALLBACK_LIMIT:
            raise InputError(
                f"--termination parsing: {type(self.parser).__name__} found no tree for {share:.0%} of the sentences, "
                "so most macro actions are single tokens: take --parser python for programs, or for English the rule "
                "--termination link_phrases:Phrases of the examples"
            )

    def _pieces(
        self, response: ResponseTokens, sentences: list[ParsedSentence]
    ) -> Iterator[tuple[int, str]]:
        """Yield the runs of numbered tokens into which the trees cut a response, as `(end, kind)`.

        They are what `ResponseTokens.starts` takes: `begin` for a phrase, `join` for a node with a single leaf, and
        `single` for a sentence without a tree.
        """
        # A phrase with at most this many tokens stays whole.
        most = self.cutoff if self.inclusive else self.cutoff - 1
        done = 0  # tokens of earlier sentences: a token that straddles two belongs to the first
        for sentence in sentences:
            end = max(done, response.count_before(sentence.end))
            if sentence.tree is None:
                yield end, "single"
            else:
                # The tokens of leaf i are bounds[i] … bounds[i+1]−1. The last leaf takes all that are left.
                bounds = [done]
                for leaf in leaves(sentence.tree)[:-1]:
                    after_leaf = response.count_before(sentence.start + leaf.end)
                    bounds.append(max(done, after_leaf))
                bounds.append(end)
                for phrase_end, has_one_leaf in cut(sentence.tree, bounds, most):
                    kind = "join" if has_one_leaf else "begin"
                    if done < phrase_end:  # else its tokens belong to the leaf before it
                        yield phrase_end, kind
                    done = phrase_end
                yield end, "join"  # this run is empty, unless the tree has no leaves
            done = end


def _with_gaps(sentences: Sequence[ParsedSentence], text: str) -> Iterator[ParsedSentence]:
    """Yield the sentences that are not empty, and the text between and after them as sentences without a tree.

    White space alone is not yielded: it belongs to the sentence after it.
    """
    last_end = 0
    # An empty sentence at the end, so that the text after the last sentence is one that stands before a sentence.
    end_of_text = ParsedSentence(len(text), len(text), tree=None)
    for sentence in [*sentences, end_of_text]:
        between = text[last_end : sentence.start].rstrip()
        if between:
            yield ParsedSentence(last_end, last_end + len(between), tree=None)
        if sentence.start < sentence.end:
            yield sentence
        last_end = sentence.end
