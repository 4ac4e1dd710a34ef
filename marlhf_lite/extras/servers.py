"""The client for servers that speak OpenAI's protocol: judges, and servers that sample (`extras.vllm`).

Every answer is limited in size and time, and refused if it is compressed or nested too deeply. The key is masked in it
before anything else reads it, so messages, files and logs cannot quote the key.
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
# From the head of an answer to its end. The client's own time-outs are for each read, not for a whole answer.
ANSWER_SECONDS = 60.0
# Raised when fields are read from an answer that does not have the protocol's form.
BAD_ANSWER = (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError)


def connect(url: str, key: str, key_name: str, **settings) -> "openai.OpenAI":
    """Return a client of the server at `url`; `key` may be empty, and `settings` are those of the client.

    Every answer passes `_limit_and_mask`, which limits its size and time and masks the key. Raises `InputError` with
    `key_name` if the key cannot be sent.
    """
    import openai

    if not (key.isascii() and key.isprintable()):
        raise InputError(f"{key_name}: not a key: export the server's key")
    hooks = {"response": [lambda response: _limit_and_mask(response, key)]}
    # Answers must not be compressed, because a small one could expand to more than memory holds.
    http = openai.DefaultHttpxClient(event_hooks=hooks, headers={"Accept-Encoding": "identity"})
    return openai.OpenAI(base_url=url, api_key=key or "none", http_client=http, **settings)


def within(seconds: float, ask: Callable, *args) -> Any:
    """Return `ask(*args)`. Raises `multiprocessing.TimeoutError` if it takes longer; its thread is then abandoned."""
    with ThreadPool(1) as pool:
        return pool.apply_async(ask, args).get(seconds)


def _limit_and_mask(response, key: str) -> None:
    """Read an answer and mask the key in it; a refused answer becomes a server error that is not retried.

    The client calls this before it reads `response` itself. `response` is changed in place.
    """
    body, fault = _body_or_fault(response)
    # In JSON any letter of the key may be escaped, and then the key would not be found. So the body is written again,
    # which gives each text one form.
    try:
        body = json.dumps(json.loads(body)).encode()
    except RecursionError:
        fault = "it is nested too deeply"
    except ValueError:
        pass  # not JSON
    if fault:
        response.status_code = 502
        response.headers.update({"Content-Type": "application/json", "x-should-retry": "false"})
        body = json.dumps({"error": {"message": f"its answer is refused: {fault}"}}).encode()
    if key:
        key_in_json = json.dumps(key)[1:-1]  # without its quotation marks
        body = body.replace(key_in_json.encode(), b"[key]")
    # The stream is used up: the client gets that of another response, which has this body.
    response.stream = type(response)(200, content=body).stream


def _body_or_fault(response) -> tuple[bytes, str]:
    """Return the body of an answer and "", or, if the answer is to be refused, an empty body and the reason."""
    body = bytearray()
    end = time.monotonic() + ANSWER_SECONDS
    try:
        if response.headers.pop("Content-Encoding", "identity") != "identity":
            return b"", "it is compressed, against the request"
        for part in response.stream:
            body += part
            if len(body) > ANSWER_BYTES:
                return b"", f"it has more than {ANSWER_BYTES // 2**20} MB"
            if time.monotonic() > end:
                return b"", f"it did not end within {ANSWER_SECONDS:g} seconds"
    finally:
        response.stream.close()
    return bytes(body), ""
