"""Get the content of a file, here or at an address, and unpack it, with limits on seconds and bytes.

An address may never answer, or send a byte a minute; a small archive may unpack to more than the memory.
"""

import io
import urllib.request
from collections.abc import Callable

from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.interrupts import time_limit

WEB = ("http://", "https://")
PIECE = 1 << 16  # bytes that an address has to send within `SECONDS`: about 2 kB a second
SECONDS = 30.0
LARGEST = 8 << 30  # bytes of a file, sent or unpacked: its rows are held in memory
UNPACKED = 1 << 20  # bytes that are unpacked at a time
# A text packs to a hundredth of its size at best. A larger share, in a file of some size, is a trap.
LARGEST_RATIO = 200
SMALL = 256 << 20


def content_at(address: str) -> bytes:
    """Return the bytes at an address. Raises `InputError` if it is too slow or sends too much.

    Pages of the web are opened by the standard library, because `fsspec` opens them only if aiohttp is installed.
    """
    try:
        with time_limit(SECONDS):
            if address.startswith(WEB):
                file = urllib.request.urlopen(address, timeout=SECONDS)
            else:
                import fsspec  # takes long to import, and local files need none of it

                file = fsspec.open(address).open()
        with file:
            return _read_at_least_speed(file.read)
    except TimeoutError:
        fix = "check the address, or download the file and give its path"
        raise InputError(
            f"no answer, or less than {PIECE} bytes in {SECONDS:g} seconds: {fix}"
        ) from None


def _read_at_least_speed(read: Callable[[int], bytes]) -> bytes:
    """Read to the end; `PIECE` bytes must come within each `SECONDS`, so that an address that drips is refused."""
    content = bytearray()
    while True:
        with time_limit(SECONDS):
            piece = read(PIECE)
        if not piece:
            return bytes(content)
        content += piece
        if len(content) > LARGEST:
            raise InputError(f"more than {LARGEST >> 30} GiB: {_SMALLER}")


_SMALLER = "give parts of it as files of their own, or Parquet in a folder"


def unpack(content: bytes, suffix: str) -> bytes:
    """Return the content of a packed file (`.gz`, `.bz2`, `.xz`); other content as it is.

    Raises `InputError` if it unpacks to too much, and what the module raises for a damaged file.
    """
    packed = _open_packed(content, suffix)
    if packed is None:
        return content
    unpacked = bytearray()
    with packed:
        while piece := packed.read(UNPACKED):
            unpacked += piece
            is_trap = len(unpacked) > max(SMALL, LARGEST_RATIO * len(content))
            if is_trap or len(unpacked) > LARGEST:
                size = f"{len(content)} bytes unpack to more than {len(unpacked) >> 20} MiB"
                raise InputError(
                    f"{size}, as in an archive that is made to fill the memory: {_SMALLER}"
                )
    return bytes(unpacked)


def _open_packed(content: bytes, suffix: str):
    """Return a file that reads the unpacked content; None if the suffix is not that of a packed file."""
    if suffix == ".gz":
        import gzip

        return gzip.open(io.BytesIO(content))
    if suffix == ".bz2":
        import bz2

        return bz2.open(io.BytesIO(content))
    if suffix == ".xz":
        import lzma

        return lzma.open(io.BytesIO(content))
    return None
