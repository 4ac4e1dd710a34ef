"""One client for servers that speak OpenAI's protocol: those that sample (vLLM) and those that judge.

Nothing that a server sends is taken on trust. An answer is bounded in size and time, and must not be compressed or
nested too deeply. The key is masked in it before anything reads it, so that no message, file or log can quote the key.
"""

import json
import time
from collections.abc import Callable
from multiprocessing.pool import ThreadPool
from typing import TYPE_CHECKING, Any

from marlhf_lite.utils.errors import InputError

if TYPE_CHECKING:
    import openai

ANSWER_BYTES = 16 * 2**20
ANSWER_SECONDS = 60.0  # from the head of an answer to its end; time-outs of the client are for each read
# What an answer of another form than the protocol's raises when its fields are read.
BAD_ANSWER = (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError)


def connect(url: str, key: str, key_name: str, **settings) -> "openai.OpenAI":
    """Return a client of the server at `url`. Raises `InputError` with `key_name` for a key that cannot be sent."""
    import openai

    if not (key.isascii() and key.isprintable()):
        raise InputError(f"{key_name}: not a key: export the server's key")
    hooks = {"response": [lambda response: _take(response, key)]}
    http = openai.DefaultHttpxClient(event_hooks=hooks, headers={"Accept-Encoding": "identity"})
    return openai.OpenAI(base_url=url, api_key=key or "none", http_client=http, **settings)


def within(seconds: float, ask: Callable, *args) -> Any:
    """Return `ask(*args)`. Raises `multiprocessing.TimeoutError` if that takes longer; it is then left to itself."""
    with ThreadPool(1) as pool:
        return pool.apply_async(ask, args).get(seconds)


def _take(response, key: str) -> None:
    """Read an answer and mask the key; an answer that is refused becomes an error of the server's, not asked again."""
    body, fault = _read(response)
    try:  # JSON has many ways to write one text: here it gets one
        body = json.dumps(json.loads(body)).encode()
    except RecursionError:
        fault = "it is nested too deeply"
    except ValueError:
        pass  # no JSON
    if fault:
        response.status_code = 502
        response.headers.update({"Content-Type": "application/json", "x-should-retry": "false"})
        body = json.dumps({"error": {"message": f"its answer is refused: {fault}"}}).encode()
    if key:
        body = body.replace(json.dumps(key)[1:-1].encode(), b"[key]")
    response.stream = type(response)(200, content=body).stream


def _read(response) -> tuple[bytes, str]:
    """Return the body of an answer, and why it is refused, if it is."""
    body, end = bytearray(), time.monotonic() + ANSWER_SECONDS
    try:
        if response.headers.pop("Content-Encoding", "identity") != "identity":
            return b"", "it is compressed, which was not asked for"
        for part in response.stream:
            body += part
            if len(body) > ANSWER_BYTES:
                return b"", f"it has more than {ANSWER_BYTES // 2**20} MB"
            if time.monotonic() > end:
                return b"", f"it did not end within {ANSWER_SECONDS:g} seconds"
    finally:
        response.stream.close()
    return bytes(body), ""
