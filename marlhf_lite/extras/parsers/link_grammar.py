"""Parse English with link-grammar, a Debian, Ubuntu, Colab and Homebrew package; nothing else is downloaded."""

import re
import shutil
import subprocess
from collections.abc import Sequence

import nltk

from marlhf_lite.parsing.base import ParsedSentence, place_leaves, split_sentences
from marlhf_lite.utils.errors import InputError

COMMAND = "link-parser"
# Spelling guesses would change words; panic mode would only retry sentences that link-parser has given up.
OPTIONS = ("-constituents=3", "-graphics=0", "-verbosity=0", "-spell=0", "-panic=0")
MARKER = "!walls=0\n"  # a harmless command after each sentence; its answer ends the reply to the sentence
MARKED = re.compile(r"^walls set to 0$", re.MULTILINE)
LONGEST = 2000  # characters; longer sentences are not parsed
START_SECONDS = 20.0  # for the dictionary to load
# Characters that link-grammar writes differently, one for one: in its output round brackets are structure.
_ALIKE = str.maketrans("‘’“”([)]\n\r\t\0", "''\"\"{{}}    ")


class LinkGrammarParser:
    """Parse English with the command ``link-parser``: one process for all sentences of a batch of texts.

    A sentence has no tree if link-parser does not finish it within `time_limit` seconds, if it changes the
    words, or if the sentence has more than 2000 characters. If the process ends or hangs, the sentences without an
    answer have no tree. Words that could not be linked stay in the tree.

    The constructor raises `InputError` if the package is missing or does not work.
    """

    background = True  # another process does the work

    def __init__(self, time_limit: int = 1, command: str = COMMAND):
        if shutil.which(command) is None:
            fix = "apt-get install link-grammar (Debian, Ubuntu, Colab) or brew install link-grammar"
            raise InputError(f"--parser link: the command {command} is not installed: {fix}")
        self.time_limit, self.command = time_limit, command
        self._trees: dict[str, nltk.Tree | None] = {}
        if self("This is a test.")[0].tree is None:
            fix = "install the English dictionary, apt-get install link-grammar-dictionaries-en"
            raise InputError(f"--parser link: {command} did not parse a test sentence: {fix}")

    def __call__(self, text: str) -> list[ParsedSentence]:
        self.prepare([text])
        return [ParsedSentence(start, end, self._trees[text[start:end]]) for start, end in split_sentences(text)]

    def prepare(self, texts: Sequence[str]) -> None:
        """Parse the sentences of these texts in one process, if some are new; keep only their trees."""
        sentences = dict.fromkeys(text[start:end] for text in texts for start, end in split_sentences(text))
        if sentences.keys() <= self._trees.keys():
            return
        lines = {s: s.translate(_ALIKE) for s in sentences if len(s) <= LONGEST}
        asked = {sentence: line for sentence, line in lines.items() if line.strip()}
        self._trees = sentences  # None: no tree
        for (sentence, line), reply in zip(asked.items(), self._run(list(asked.values())), strict=False):
            tree = read_constituents(reply)
            spans = tree and align([str(leaf) for leaf in tree.leaves()], line)
            if spans:
                self._trees[sentence] = place_leaves(tree, spans, [sentence[start:end] for start, end in spans])

    def _run(self, lines: Sequence[str]) -> list[str]:
        """Return link-parser's replies, up to the first line that it did not answer."""
        if not lines:
            return []
        # With a space before them, `!` and `%` at the start of a sentence are not commands or comments.
        text = MARKER + "".join(f" {line}\n{MARKER}" for line in lines)
        try:
            output = subprocess.run(
                [self.command, "en", *OPTIONS, f"-timeout={self.time_limit}"],
                input=text.encode(errors="replace"),
                capture_output=True,
                timeout=START_SECONDS + self.time_limit * len(lines),
            ).stdout
        except subprocess.TimeoutExpired as error:
            output = error.stdout or b""
        return MARKED.split(output.decode(errors="replace"))[1:-1]  # the first part precedes all sentences


def read_constituents(reply: str) -> nltk.Tree | None:
    """Return the first tree of a reply, with leaves as link-grammar writes them; None if there is no tree."""
    line = next((line for line in reply.splitlines() if "(S" in line), "")
    try:
        tree = nltk.Tree.fromstring(line)
    except ValueError:
        return None
    # An incomplete sentence may be inside another phrase, which is left out.
    return next(tree.subtrees(lambda node: node.label().startswith("S")), None)


def align(leaves: list[str], text: str) -> list[tuple[int, int]] | None:
    """Return the spans of link-grammar's leaves in its input text; None if the leaves do not spell out the text."""
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
    """Return the forms that a leaf may have in the text, longest first.

    They lack a subscript (`cat.n`), the mark of a word outside the dictionary (`asdf{?}.n`), or the braces around a
    word that could not be linked (`{the}`).
    """
    forms = {leaf, leaf[1:-1] if leaf.startswith("{") and leaf.endswith("}") else leaf}
    for _ in range(2):
        forms |= {re.sub(r"\.[\w#=,-]+$", "", f) for f in forms} | {re.sub(r"\{[?!~&]\}$", "", f) for f in forms}
    return sorted(forms, key=len, reverse=True)
