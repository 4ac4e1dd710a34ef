"""Text to constituency trees, and trees to macro actions (§3.2.1, Appendix B.4).

rule           ζ: `Parsing` and `Sentence`
parser         what a parser is: sentences with trees whose leaves know their characters
grammar        the embedded corpus, by its own grammar
link_grammar   English, by the package link-grammar
stanza_parser  English, by stanza
python_code    Python, by tree-sitter
sentences, offsets, spans, trees   what these are made of
"""

from marlhf_lite.parsing.base import ParsedSentence, Parser, SentenceParser
from marlhf_lite.parsing.grammar import GrammarParser
from marlhf_lite.parsing.link_grammar import LinkGrammarParser
from marlhf_lite.parsing.offsets import TokenText
from marlhf_lite.parsing.python_code import PythonParser
from marlhf_lite.parsing.sentences import split_sentences
from marlhf_lite.parsing.stanza import StanzaParser
from marlhf_lite.parsing.termination import Parsing, Sentence
from marlhf_lite.parsing.trees import Leaf

__all__ = [
    "GrammarParser",
    "Leaf",
    "LinkGrammarParser",
    "ParsedSentence",
    "Parser",
    "Parsing",
    "PythonParser",
    "Sentence",
    "SentenceParser",
    "StanzaParser",
    "TokenText",
    "split_sentences",
]
