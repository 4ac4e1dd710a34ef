"""A parser of your own: link-grammar's trees of English, after `apt-get install link-grammar` (Debian, Ubuntu, Colab)
or `brew install link-grammar`. With this file in the current folder: marlhf run --termination link_phrases:Phrases"""

import re
import shutil
import subprocess

import nltk

from marlhf_lite.parsing import ParsedSentence, Parsing, split_sentences
from marlhf_lite.parsing.base import place_leaves
from marlhf_lite.utils.errors import InputError

COMMAND = "link-parser"
# Spelling guesses would change words; panic mode would only retry sentences that link-parser has given up.
OPTIONS = ("-constituents=3", "-graphics=0", "-verbosity=0", "-spell=0", "-panic=0")
# A harmless command that follows each sentence. Its answer, `MARKED`, shows where the reply to the sentence ends.
MARKER = "!walls=0\n"
MARKED = re.compile(r"^walls set to 0$", re.MULTILINE)
LONGEST = 2000  # characters; longer sentences are not parsed
START_SECONDS = 20.0  # for the dictionary to load
# Characters that link-grammar writes differently, one for one: in its output round brackets are structure.
_ALIKE = str.maketrans("‘’“”([)]\n\r\t\0", "''\"\"{{}}    ")


class Phrases(Parsing):
    """Phrases of fewer than `cutoff` tokens from link-grammar's trees."""

    def __init__(self, cutoff=5):
        super().__init__(LinkGrammarParser(), cutoff)

    def parse(self, texts):
        return self.parser.parse(texts)


class LinkGrammarParser:
    """A function from a text to its sentences with their trees; `parse` takes many texts, with one process for all.

    A sentence has no tree if link-parser does not finish it within `time_limit` seconds, if it changes the
    words, or if the sentence has more than 2000 characters. If the process ends or hangs, the sentences without an
    answer have no tree. Words that could not be linked stay in the tree.
    """

    def __init__(self, time_limit=1, command=COMMAND):
        if shutil.which(command) is None:
            fix = (
                "apt-get install link-grammar (Debian, Ubuntu, Colab) or brew install link-grammar"
            )
            raise InputError(f"the command {command} is not installed: {fix}")
        self.time_limit = time_limit
        self.command = command
        if self("This is a test.")[0].tree is None:
            fix = "install the English dictionary, apt-get install link-grammar-dictionaries-en"
            raise InputError(f"{command} did not parse a test sentence: {fix}")

    def __call__(self, text):
        return self.parse([text])[text]

    def parse(self, texts):
        """Return the sentences of each text: text -> list of `ParsedSentence`."""
        # 1. The different sentences of all texts, without a tree so far.
        spans = {text: split_sentences(text) for text in texts}
        trees = {}
        for text in texts:
            for start, end in spans[text]:
                trees[text[start:end]] = None
        # 2. Ask link-parser for the trees of those that are not too long and not blank.
        lines = {}
        for sentence in trees:
            line = sentence.translate(_ALIKE)
            if len(sentence) <= LONGEST and line.strip():
                lines[sentence] = line
        replies = self._run(list(lines.values()))
        # There may be fewer replies than sentences: then the last sentences keep no tree.
        for (sentence, line), reply in zip(lines.items(), replies, strict=False):
            tree = read_constituents(reply)
            if tree is None:
                continue
            places = align([str(leaf) for leaf in tree.leaves()], line)
            if places:  # else link-parser has changed the words
                words = [sentence[start:end] for start, end in places]
                trees[sentence] = place_leaves(tree, places, words)
        # 3. The sentences of each text, with their trees.
        parsed = {}
        for text in texts:
            parsed[text] = [
                ParsedSentence(start, end, trees[text[start:end]]) for start, end in spans[text]
            ]
        return parsed

    def _run(self, lines):
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
        # Before the first marker nothing was asked, and what follows the last one is not complete.
        return MARKED.split(output.decode(errors="replace"))[1:-1]


def read_constituents(reply):
    """Return the first tree of a reply, with leaves as link-grammar writes them; None if there is no tree."""
    lines_with_tree = [line for line in reply.splitlines() if "(S" in line]
    if not lines_with_tree:
        return None
    try:
        tree = nltk.Tree.fromstring(lines_with_tree[0])
    except ValueError:  # no brackets that match
        return None
    # An incomplete sentence may be inside another phrase, which is left out.
    return next(tree.subtrees(lambda node: node.label().startswith("S")), None)


def align(leaves, text):
    """Return the spans of link-grammar's leaves in its input text; None if the leaves do not spell out the text."""
    spans = []
    place = 0
    for leaf in leaves:
        while text[place : place + 1].isspace():
            place += 1
        end = end_of_leaf(leaf, text, place)
        if end is None:
            return None
        spans.append((place, end))
        place = end
    has_more_text = text[place:].strip() != ""
    return None if has_more_text or not spans else spans


def end_of_leaf(leaf, text, place):
    """Return where a leaf ends that begins at a place of the text; None if none of its forms stands there."""
    for form in _forms(leaf):
        end = place + len(form)
        if form and text[place:end].casefold() == form.casefold():
            return end
    return None


def _forms(leaf):
    """Return the forms that a leaf may have in the text, longest first.

    They lack a subscript (`cat.n`), the mark of a word outside the dictionary (`asdf{?}.n`), or the braces around a
    word that could not be linked (`{the}`).
    """
    forms = {leaf}
    if leaf.startswith("{") and leaf.endswith("}"):
        forms.add(leaf[1:-1])
    for _ in range(2):  # a mark may stand before a subscript
        without_subscript = {re.sub(r"\.[\w#=,-]+$", "", form) for form in forms}
        without_mark = {re.sub(r"\{[?!~&]\}$", "", form) for form in forms}
        forms |= without_subscript | without_mark
    return sorted(forms, key=len, reverse=True)
