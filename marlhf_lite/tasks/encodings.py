"""Decode text files, and name the encoding that a file probably has if it is not UTF-8."""

import codecs
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
    """Return the text of a file in UTF-8, in UTF-16 with or without a mark, or in UTF-32 with a mark.

    Carriage returns alone, as old Macs ended lines, become line breaks. Raises `InputError` for other encodings, and
    for a text with a zero byte.
    """
    encoding = _marked_encoding(content)
    if not encoding:
        encoding = _utf_16_by_zeros(content[:SAMPLE])
    if not encoding:
        encoding = "utf-8"
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        likely = _likely_encoding(content)
        fix = f"save it as UTF-8, as by iconv -f {likely} -t utf-8"
        raise InputError(
            f"cannot be read (not UTF-8: {error}): {fix}, or check that it is whole, and its name and path"
        ) from None
    has_lines_of_old_macs = "\n" not in text
    if has_lines_of_old_macs:
        text = text.replace("\r", "\n")
    # A computer that stopped while it wrote leaves zeros, which would be read as characters.
    lines_before_zero = text.partition("\0")[0].count("\n")
    if "\0" in text:
        fix = "copy it again, or delete such bytes by tr -d '\\000'"
        raise InputError(f"line {lines_before_zero + 1}: a zero byte, as in a damaged file: {fix}")
    return text


def _marked_encoding(content: bytes) -> str:
    """Return the encoding of the byte order mark with which a file begins; empty without one."""
    for mark, encoding in MARKS.items():
        if content.startswith(mark):
            return encoding
    return ""


def _utf_16_by_zeros(sample: bytes) -> str:
    """Return utf-16-le or utf-16-be for the start of such a file without a mark; empty for any other.

    In UTF-16 one of the two bytes of an ASCII character is zero, always on the same side. Line breaks, quotes and
    commas are ASCII in every language. A text in UTF-8 has no zero, unless it is damaged: then zeros are few.
    """
    zeros_at_even_bytes = sample[0::2].count(0)
    zeros_at_odd_bytes = sample[1::2].count(0)
    has_few_zeros = 20 * (zeros_at_even_bytes + zeros_at_odd_bytes) < len(sample)
    if has_few_zeros and _is_utf_8(sample):
        return ""
    if zeros_at_odd_bytes and not zeros_at_even_bytes:
        return "utf-16-le"
    if zeros_at_even_bytes and not zeros_at_odd_bytes:
        return "utf-16-be"
    return ""


def _is_utf_8(sample: bytes) -> bool:
    """Return whether this start of a file is UTF-8; its last character may be cut."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(sample)
    except UnicodeDecodeError:
        return False
    return True


def _likely_encoding(content: bytes) -> str:
    """Return the name for iconv of the encoding that a text probably has.

    Encodings of Chinese, Japanese and Korean write a character as two bytes, so bytes above 127 come in long runs; in
    western European ones an accented letter is alone between ASCII letters. The letters tell which one it is.
    """
    runs = [len(run) for run in re.findall(rb"[\x80-\xff]+", content)]
    is_western = sum(runs) <= 2 * len(runs)  # runs have at most two bytes on average
    if is_western:
        return "cp1252"
    for encoding, letters, least_share in LIKELY:
        if _share_of_letters(content, encoding, letters) > least_share:
            # gb18030 has all characters of gb2312, and more.
            return "gb18030" if encoding == "gb2312" else encoding
    return "gb18030"


def _share_of_letters(content: bytes, encoding: str, letters: str) -> float:
    """Return which share of the characters beyond ASCII is of these letters; 0 for content in another encoding."""
    try:
        beyond = re.findall(r"[^\x00-\x7f]", content.decode(encoding))
    except UnicodeDecodeError:
        return 0.0
    matching = sum(re.fullmatch(letters, character) is not None for character in beyond)
    return matching / max(len(beyond), 1)
