"""Decode text files, and name the encoding that a file probably has if it is not UTF-8."""

import re

from marlhf_lite.utils.errors import InputError

MARKS = {  # the longer ones first: the mark of UTF-32 begins like that of UTF-16
    b"\xff\xfe\x00\x00": "utf-32",
    b"\x00\x00\xfe\xff": "utf-32",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
    b"\xef\xbb\xbf": "utf-8-sig",
}
SAMPLE = 1 << 16  # bytes that show which encoding a file has
HAN = r"[\u4e00-\u9fff\u3000-\u303f\uff00-\uffef]"  # Chinese characters and their punctuation
# Encoding, its letters, and which share of the characters beyond ASCII they have in a text of that encoding.
LIKELY = (
    ("cp1251", r"[\u0400-\u04ff]", 0.95),
    ("euc-kr", r"[\uac00-\ud7a3]", 0.8),
    ("euc-jp", r"[\u3040-\u30ff]", 0.2),
    ("cp932", r"[\u3040-\u30ff]", 0.2),
    ("gb2312", HAN, 0.9),
    ("big5", HAN, 0.9),
)


def decode(content: bytes) -> str:
    """Return the text of a file in UTF-8, or in UTF-16 or UTF-32 with or without a mark.

    Carriage returns alone, as old Macs ended lines, become line breaks. Raises `InputError` for other encodings.
    """
    encoding = _marked_encoding(content) or _encoding_by_zeros(content[:SAMPLE]) or "utf-8"
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        likely = _likely_encoding(content)
        fix = f"save it as UTF-8, as by iconv -f {likely} -t utf-8"
        raise InputError(
            f"cannot be read (not UTF-8: {error}): {fix}, or check that it is whole, and its name and path"
        ) from None
    return text.replace("\r", "\n") if "\n" not in text else text


def _marked_encoding(content: bytes) -> str:
    for mark, encoding in MARKS.items():
        if content.startswith(mark):
            return "gb18030" if encoding == "gb2312" else encoding  # its larger form
    return ""


def _encoding_by_zeros(sample: bytes) -> str:
    """Return the UTF-16 of a file without a mark: half of the bytes of its ASCII characters are zero, all on one side.

    Empty if it is not UTF-16. Line breaks, quotes and commas are ASCII in every language.
    """
    high, low = sample[0::2].count(0), sample[1::2].count(0)
    if not high and not low:
        return ""
    if low and not high:
        return "utf-16-le"
    if high and not low:
        return "utf-16-be"
    return ""


def _likely_encoding(content: bytes) -> str:
    """Return the name for iconv of the encoding that a text probably has.

    Encodings of Chinese, Japanese and Korean write a character as two bytes, so bytes above 127 come in long runs; in
    western European ones an accented letter is alone between ASCII letters. The letters tell which one it is.
    """
    runs = [len(run) for run in re.findall(rb"[\x80-\xff]+", content)]
    if sum(runs) <= 2 * len(runs):
        return "cp1252"
    for encoding, letters, share in LIKELY:
        if _share_of_letters(content, encoding, letters) > share:
            return "gb18030" if encoding == "gb2312" else encoding  # its larger form
    return "gb18030"


def _share_of_letters(content: bytes, encoding: str, letters: str) -> float:
    """Return which share of the characters beyond ASCII is of these letters; 0 if the text has another encoding."""
    try:
        beyond = re.findall(r"[^\x00-\x7f]", content.decode(encoding))
    except UnicodeDecodeError:
        return 0.0
    matching = sum(re.fullmatch(letters, character) is not None for character in beyond)
    return matching / max(len(beyond), 1)
