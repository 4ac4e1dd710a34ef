"""Pairs to verdicts: which order, what is stored already, and how the rest is asked."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tqdm.auto import tqdm

from marlhf_lite.evaluation.judges.judge import Answer, Judge, Question, Quit, Stopped, to_answer, to_verdict
from marlhf_lite.evaluation.judges.pairs import Pair, Verdict
from marlhf_lite.evaluation.judges.store import Store, content_key
from marlhf_lite.utils.errors import InputError

ORDERS = ("random", "both")
GIVE_UP = 3  # questions in a row without an answer that end a run
_SAME = Answer("tie", raw="the texts are the same")


def judge_pairs(
    judge: Judge, pairs: Sequence[Pair], folder: str | Path, order: str = "random", seed: int = 0
) -> list[Verdict]:
    """A verdict on each pair, or two with `order="both"`; see `combine` for what two of them mean together.

    Each verdict is written to `folder` when it arrives, and what is there is not asked again: a run that was
    interrupted goes on, a repeated one costs nothing. Responses that are the same text are a tie without asking.

    Args:
        judge: who judges.
        pairs: what; their ids differ.
        folder: the judge's file of verdicts stands here.
        order: `random` shows one of the two responses first, drawn from `seed` and the pair's id, so that it does
            not depend on which other pairs there are; `both` asks twice. A judge that sees no order is asked once.
        seed: a different one may ask about a pair in the other order, which is another question.

    Returns:
        Verdicts in the order of the pairs; without those that a person who stopped early has not reached. A pair that
        the judge could not be asked about is `skipped` and asked again next time.

    Raises:
        InputError: bad arguments, or a judge that cannot go on; verdicts until then are kept.
    """
    work = Judging(judge, pairs, folder, order, seed)
    waiting = work.waiting()
    if waiting:
        judge.prepare(waiting)
        work.ask(waiting)
    return work.verdicts()


class Judging:
    """A judge's work on some pairs: `questions` with their keys, and what has been answered so far."""

    def __init__(self, judge: Judge, pairs: Sequence[Pair], folder: str | Path, order: str = "random", seed: int = 0):
        _check(pairs, order)
        self.judge = judge
        self.questions = {}
        for pair in pairs:
            for shown in _orders(judge, pair, order, seed):
                question = Question(pair, shown)
                self.questions[question] = content_key(judge, question)
        self.store = Store(folder, judge)
        self._now: dict[str, tuple[Answer, float]] = {}  # of this run, by key
        self._lock, self._failures = threading.Lock(), 0

    def waiting(self) -> list[Question]:
        """What is to be asked: one question for each content, without those that are answered."""
        found: dict[str, Question] = {}
        for question, key in self.questions.items():
            if self._answer(question, key)[0] is None:
                found.setdefault(key, question)
        return list(found.values())

    def ask(self, questions: Sequence[Question]) -> None:
        """Asks them all; see `judge_pairs`."""
        size = self.judge.batch_size
        batches = [questions[start : start + size] for start in range(0, len(questions), size)]
        with tqdm(total=len(questions), desc=f"verdicts of {self.judge.name}", disable=not self.judge.bar) as bar:
            try:
                if self.judge.workers:
                    self._in_threads(batches, bar)
                else:
                    for batch in batches:
                        bar.update(self._one(batch))
            except Quit:
                return
        failed = [answer.raw for answer, _ in self._now.values() if not answer.keep]
        if failed and len(failed) == len(questions):
            raise InputError(f"{self.judge.name}: nothing could be judged ({failed[-1]}): mend that and run it again")

    def _in_threads(self, batches: list, bar: tqdm) -> None:
        pool = ThreadPoolExecutor(self.judge.workers)
        try:
            bar.update(pool.submit(self._one, batches[0]).result())  # alone: if it is refused, no other is sent
            for done in as_completed([pool.submit(self._one, batch) for batch in batches[1:]]):
                with suppress(Stopped):  # another call has failed, and says why
                    bar.update(done.result())
        finally:
            # What is under way has been paid for: it is waited for and written, also after Ctrl-C.
            self.judge.interrupt()
            pool.shutdown(wait=True, cancel_futures=True)

    def _one(self, batch: Sequence[Question]) -> int:
        start = time.monotonic()
        try:
            answers = self.judge(batch)
            seconds = (time.monotonic() - start) / len(batch)
            for question, answer in zip(batch, answers, strict=True):
                self.record(question, answer, seconds)
        except BaseException:
            self.judge.interrupt()  # at once: this thread would take up the next batch
            raise
        return len(batch)

    def record(self, question: Question, answer: Answer, seconds: float) -> None:
        """Takes an answer in and writes it, unless the judge could not be asked.

        Raises `InputError` at the third question in a row without an answer.
        """
        key = self.questions[question]
        if answer.keep:
            self.store.add(key, to_verdict(self.judge, question, answer, seconds))
        with self._lock:
            self._now[key] = (answer, seconds)
            self._failures = 0 if answer.keep else self._failures + 1
            if self._failures >= GIVE_UP:
                raise InputError(
                    f"{self.judge.name}: {self._failures} questions in a row got no answer ({answer.raw}): "
                    "verdicts so far are kept, run it again to go on"
                )

    def verdicts(self) -> list[Verdict]:
        """Of every question that has an answer. One answer to several questions counts its tokens and cost once."""
        out, seen = [], set()
        for question, key in self.questions.items():
            answer, seconds = self._answer(question, key)
            if answer is None:
                continue
            if key in seen:
                answer, seconds = replace(answer, prompt_tokens=0, completion_tokens=0, cost=0.0), 0.0
            seen.add(key)
            out.append(to_verdict(self.judge, question, answer, seconds))
        return out

    def _answer(self, question: Question, key: str) -> tuple[Answer | None, float]:
        if _same(question):
            return _SAME, 0.0
        if key in self._now:
            return self._now[key]
        stored = None if self.judge.free else self.store.get(key)
        return (None, 0.0) if stored is None else (to_answer(stored), stored.seconds)


def _same(question: Question) -> bool:
    return question.pair.first == question.pair.second


def _orders(judge: Judge, pair: Pair, order: str, seed: int) -> tuple[str, ...]:
    if not judge.ordered or pair.first == pair.second:
        return ("none",)
    if order == "both":
        return ("first", "second")
    return (random.Random(ascii((seed, judge.order_salt, pair.id))).choice(("first", "second")),)


def _check(pairs: Sequence[Pair], order: str) -> None:
    if order not in ORDERS:
        raise InputError(f"order {order!r}: choose from {', '.join(ORDERS)}")
    if not pairs:
        raise InputError("pairs: none to judge: give at least one")
    seen: set[str] = set()
    for pair in pairs:
        if pair.id in seen:
            raise InputError(f"pairs: id {pair.id} twice: give each pair an id of its own")
        seen.add(pair.id)
