"""Small tokenizers of every family, trained on a few lines, and a fake one whose pieces are given."""

import json
from functools import cache

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

LINES = [
    "The old cat sat on the mat, and the dog didn't care at all.",
    "My sister Marla moved to Marwick. She waited 56 days for 3.5 dollars!",
    "def f(x):\n    return [x + 1 for x in range(10)]  # the end of the line",
    "Naïve café prices: 5 € for a “soup” … really?",
] * 4
SPECIALS = ["<pad>", "<eos>", "<bos>", "<unk>"]
BYTES = [f"<0x{i:02X}>" for i in range(256)]


class Pieces:
    """Pretends to be a tokenizer: the token i is the text pieces[i]."""

    def __init__(self, *pieces: str):
        self.pieces = pieces

    def decode(self, ids, skip_special_tokens=False, clean_up_tokenization_spaces=False):
        return "".join(self.pieces[i] for i in ids)


def _trained_bpe(splitter, vocab_size: int, byte_pieces: bool = True) -> models.BPE:
    """A BPE model that is trained on LINES, in texts that `splitter` splits if there is one.

    With `byte_pieces`, spaces are written as ▁, and there is a piece for each byte, which in the model is an ordinary
    token and not special. Without, `splitter` must map bytes to letters itself, as GPT-2's does.
    """
    raw = Tokenizer(models.BPE(unk_token="<unk>"))
    raw.normalizer = normalizers.Replace(" ", "▁") if byte_pieces else None
    if splitter is not None:
        raw.pre_tokenizer = splitter
    alphabet = [] if byte_pieces else pre_tokenizers.ByteLevel.alphabet()
    specials = SPECIALS + (BYTES if byte_pieces else [])
    raw.train_from_iterator(
        LINES,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=specials,
            show_progress=False,
            initial_alphabet=alphabet,
        ),
    )
    # Only vocabulary and merges are kept. The byte pieces were special tokens of the trainer alone.
    model = json.loads(raw.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    return models.BPE(
        model["vocab"], merges, byte_fallback=byte_pieces, unk_token="<unk>", fuse_unk=True
    )


def _byte_level() -> Tokenizer:
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw = Tokenizer(_trained_bpe(splitter, 420, byte_pieces=False))
    raw.pre_tokenizer = splitter
    raw.decoder = decoders.ByteLevel()
    raw.post_processor = processors.ByteLevel(trim_offsets=False)
    return raw


def _with_spaces(vocab_size: int, split: bool = True, space_first: bool = False) -> Tokenizer:
    """A tokenizer in whose pieces spaces are ▁.

    With `split`, a piece spans no two words. With `space_first`, encoding puts a space before the text, and decoding
    takes it off again.
    """
    splitter = pre_tokenizers.Split("▁", "merged_with_next") if split else None
    raw = Tokenizer(_trained_bpe(splitter, vocab_size))
    prepend = []
    strip = []
    if space_first:
        prepend = [normalizers.Prepend("▁")]
        strip = [decoders.Strip(" ", 1, 0)]
    raw.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return raw


def _word_piece() -> Tokenizer:
    """A tokenizer whose pieces begin with ## inside words; no piece has spaces, so decoding puts them in."""
    raw = Tokenizer(models.WordPiece(unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    raw.train_from_iterator(
        LINES,
        trainers.WordPieceTrainer(vocab_size=160, special_tokens=SPECIALS, show_progress=False),
    )
    return raw


FAMILIES = {
    "byte_level": _byte_level,  # as GPT-2's
    "metaspace": lambda: _with_spaces(450, space_first=True),  # as Llama's
    # as Gemma's, with so few merges that words fall into many pieces
    "byte_fallback": lambda: _with_spaces(330),
    "word_piece": _word_piece,  # as BERT's
    # pieces run over spaces, such as `on▁the▁mat`
    "merged_spaces": lambda: _with_spaces(520, split=False),
}
NAMES = tuple(FAMILIES)


@cache
def small_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of this name, one of NAMES."""
    special = {f"{kind}_token": f"<{kind}>" for kind in ("pad", "eos", "bos", "unk")}
    return PreTrainedTokenizerFast(tokenizer_object=FAMILIES[name](), **special)
