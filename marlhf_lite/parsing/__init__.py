"""Parse responses into constituency trees, and trees into macro actions (§3.2.1, Appendix B.4).

termination    the rules `Parsing` and `Sentence`
base           what a parser gives: sentences with trees whose leaves know their characters
grammar, link_grammar, stanza, python_code   parsers of the embedded corpus, of English (two), of Python
spans          tokens of a response on the characters of its text
registry       rules and parsers by the names that options give them
"""

from marlhf_lite.parsing.base import Leaf, ParsedSentence, Parser, split_sentences
from marlhf_lite.parsing.grammar import GrammarParser
from marlhf_lite.parsing.link_grammar import LinkGrammarParser
from marlhf_lite.parsing.python_code import PythonParser
from marlhf_lite.parsing.spans import TokenText
from marlhf_lite.parsing.stanza import StanzaParser
from marlhf_lite.parsing.termination import Parsing, Sentence
