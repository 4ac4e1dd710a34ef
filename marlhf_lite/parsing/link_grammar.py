"""Trees of English sentences by link-grammar, a Debian, Ubuntu, Colab and Homebrew package; needs no download."""

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
import time
from queue import Empty, LifoQueue

import nltk

from marlhf_lite.parsing.base import SentenceParser
from marlhf_lite.parsing.trees import place_leaves
from marlhf_lite.utils.errors import InputError

COMMAND = "link-parser"
# Spelling guesses would change words; panic mode only starts after link-parser's own time limit.
OPTIONS = ("-constituents=1", "-graphics=0", "-verbosity=0", "-spell=0", "-panic=0")
MARKER, MARKED = b"!walls=0\n", b"walls set to 0\n"  # a harmless command, and what it answers: the end of a reply
LONGEST = 2000  # characters; sentences beyond it are not asked
START_SECONDS = 20.0  # for the dictionary to load
# Characters that link-grammar writes otherwise, one for one: round brackets are structure in what it prints.
_ALIKE = str.maketrans("‘’“”([)]\n\r\t", "''\"\"{{}}   ")
_TOKEN = re.compile(r"[()]|[^\s()]+")


class LinkGrammarParser(SentenceParser):
    """Parses English with the command ``link-parser``: one long-lived process for each thread that
    parses at the same time.

    A sentence that takes longer than `time_limit` seconds has no tree, nor has one that link-grammar splits into other
    words than stand in the text, or one of more than 2000 characters. A process that is slow is ended, and a new one
    started for the next sentence. Words that could not be linked stay in the tree where they stand.

    Raises InputError, when made, if the package is missing or does not work.
    """

    def __init__(self, time_limit: float = 1.0, cache: int = 8192, command: str = COMMAND):
        super().__init__(cache)
        if shutil.which(command) is None:
            raise InputError(
                f"parser link: the command {command} is not installed: apt-get install link-grammar (Debian, Ubuntu, "
                "Colab) or brew install link-grammar"
            )
        if not time_limit > 0:
            raise InputError(f"time_limit: expected seconds above 0, got {time_limit!r}")
        self.time_limit, self.command = time_limit, command
        self.workers = min(4, os.cpu_count() or 1)
        self._idle: LifoQueue[LinkProcess] = LifoQueue()
        if self.parse_sentence("This is a test.") is None:
            raise InputError(
                f"parser link: {command} did not parse a test sentence: install the English dictionary, "
                "apt-get install link-grammar-dictionaries-en"
            )

    def parse_sentence(self, sentence: str) -> nltk.Tree | None:
        if len(sentence) > LONGEST:
            return None
        asked = sentence.translate(_ALIKE)
        process = self._process()
        reply = process.ask(asked, self.time_limit)
        if process.alive:
            self._idle.put(process)
        tree = None if reply is None else read_constituents(reply)
        spans = tree and align([str(leaf) for leaf in tree.leaves()], asked)
        return place_leaves(tree, spans, [sentence[a:b] for a, b in spans]) if spans else None

    def _process(self) -> LinkProcess:
        """One that no other thread uses, started if there is none."""
        while True:
            try:
                process = self._idle.get_nowait()
            except Empty:
                return LinkProcess(self.command)
            if process.alive:
                return process


class LinkProcess:
    """One running link-parser. Its replies come through a terminal device, since it keeps them back in a pipe."""

    def __init__(self, command: str = COMMAND):
        import pty
        import tty

        self._output, terminal = pty.openpty()
        tty.setraw(terminal)
        self._process = subprocess.Popen(
            [command, "en", *OPTIONS], stdin=subprocess.PIPE, stdout=terminal, stderr=subprocess.DEVNULL
        )
        os.close(terminal)
        self._open = True
        self._send(b"")
        self._receive(START_SECONDS)

    def ask(self, sentence: str, seconds: float) -> str | None:
        """The reply to a sentence of one line; None, and the process ended, if there is none in time."""
        # The space keeps `!` and `%` at the start of a sentence from being read as commands and comments.
        self._send(b" " + sentence.encode(errors="replace").replace(b"\0", b" ") + b"\n")
        return self._receive(seconds)

    @property
    def alive(self) -> bool:
        """Can it be asked? It ends by `close`, or by itself."""
        return self._open and self._process.poll() is None

    def close(self) -> None:
        """End the process."""
        if self._open:
            self._open = False
            self._process.kill()
            self._process.wait()
            self._process.stdin.close()
            os.close(self._output)

    def _send(self, line: bytes) -> None:
        if not self._open:
            return
        try:
            self._process.stdin.write(line + MARKER)
            self._process.stdin.flush()
        except OSError:
            self.close()

    def _receive(self, seconds: float) -> str | None:
        reply, end = b"", time.monotonic() + seconds
        while self._open and not reply.endswith(MARKED):
            if not select.select([self._output], [], [], max(0.0, end - time.monotonic()))[0]:
                self.close()
                break
            try:
                piece = os.read(self._output, 65536)
            except OSError:  # what a terminal answers when the other side is gone
                piece = b""
            reply += piece
            if not piece:
                self.close()
        return reply.removesuffix(MARKED).decode(errors="replace") if reply.endswith(MARKED) else None

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self.close()


def read_constituents(reply: str) -> nltk.Tree | None:
    """The first tree of a reply in brackets, leaves as link-grammar writes them; None if there is none."""
    start = reply.find("(S")
    if start < 0:
        return None
    stack: list[nltk.Tree] = []
    words = iter(_TOKEN.findall(reply, start))
    for word in words:
        if word == "(":
            stack.append(nltk.Tree(next(words, ""), []))
        elif word != ")":
            stack[-1].append(word)
        elif len(stack) == 1:
            return stack[0]
        else:
            done = stack.pop()
            stack[-1].append(done)
    return None


def align(leaves: list[str], text: str) -> list[tuple[int, int]] | None:
    """Where link-grammar's leaves stand in the text it was asked; None if they do not spell it out."""
    spans, place = [], 0
    for leaf in leaves:
        while text[place : place + 1].isspace():
            place += 1
        form = next((f for f in _forms(leaf) if f and text[place : place + len(f)].casefold() == f.casefold()), None)
        if form is None:
            return None
        spans.append((place, place + len(form)))
        place += len(form)
    return None if text[place:].strip() or not spans else spans


def _forms(leaf: str) -> list[str]:
    """What a leaf may look like in the text, longest first: without a subscript (`cat.n`), a mark for a word that is
    not in the dictionary (`asdf{?}.n`), or the braces around a word that could not be linked (`{the}`)."""
    found = {leaf, leaf[1:-1] if leaf.startswith("{") and leaf.endswith("}") else leaf}
    for _ in range(2):
        found |= {re.sub(r"\.[\w#=,-]+$", "", f) for f in found} | {re.sub(r"\{[?!~&]\}$", "", f) for f in found}
    return sorted(found, key=len, reverse=True)
