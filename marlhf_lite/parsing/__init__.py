"""Parse responses into constituency trees, and trees into macro actions (§3.2.1, Appendix B.4).

termination    the rules `Parsing` and `Sentence`
base           what a parser gives: sentences with trees whose leaves know their characters
grammar        a parser of the embedded corpus; `extras.parsers` has those of English and Python
spans          tokens of a response on the characters of its text
"""

from marlhf_lite.parsing.base import Leaf, ParsedSentence, Parser, split_sentences
from marlhf_lite.parsing.grammar import GrammarParser
from marlhf_lite.parsing.spans import TokenText
from marlhf_lite.parsing.termination import Parsing, Sentence
