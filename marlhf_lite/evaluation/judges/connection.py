"""Options to a connection with an endpoint: its address, the fields of a request, the key."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from marlhf_lite.config.options import EndpointConfig
from marlhf_lite.utils.errors import InputError

_OURS = ("model", "messages", "stream", "n")
LIMITS = ("max_tokens", "max_completion_tokens")


def request_fields(options: EndpointConfig) -> dict:
    """The request's fields besides model and messages. Raises `InputError`."""
    if not options.judge_model.strip():
        raise InputError("--judge_model: not given: name the model that the endpoint is to judge with")
    _check_url(options.judge_url)
    try:
        more = json.loads(options.judge_request or "{}")
    except ValueError:
        more = None
    if not isinstance(more, dict):
        raise InputError(f"--judge_request {options.judge_request}: give a JSON object, such as '{{\"seed\": 1}}'")
    taken = [name for name in _OURS if name in more]
    if taken:
        raise InputError(f"--judge_request: {taken[0]} is set by other options: leave it out")
    for name in LIMITS:
        if not isinstance(more.get(name), int | None):
            raise InputError(f"--judge_request: {name} {more[name]!r}: give a whole number, or null to leave it out")
    fields = {"temperature": options.judge_temperature, "max_tokens": options.judge_max_tokens} | more
    return {name: value for name, value in fields.items() if value is not None}


def _check_url(url: str) -> None:
    mend = "give one such as https://api.openai.com/v1 or http://localhost:8000/v1"
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        whole = False
    if not whole:
        raise InputError(f"--judge_url: no http address: {mend}")
    if parts.username or parts.password or parts.query:
        # It is written beside the verdicts, so it must hold no secret; nor is it repeated here.
        raise InputError("--judge_url: it holds a user, a password or a query: give the key by --judge_key_env instead")


def find_key(name: str, environ: Mapping[str, str]) -> str:
    """The key that stands in `environ` under `name`; none for an empty name. No message of it quotes the key."""
    if not name:
        return ""
    key = environ.get(name, "").strip()
    if not key:
        raise InputError(f"--judge_key_env {name}: not set: export the endpoint's key under this name")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise InputError(f"--judge_key_env {name}: it holds characters that no key has: copy the key again")
    return key


def connect(options: EndpointConfig, key: str) -> Callable:
    """The client's function that posts a chat completion and returns the raw answer. It never tries twice."""
    try:
        import openai
    except ImportError:
        raise InputError("--judge endpoint needs the openai package: pip install 'marlhf-lite[judge]'") from None
    client = openai.OpenAI(
        api_key=key or "none",  # some value there must be
        base_url=options.judge_url,
        timeout=options.judge_timeout,
        max_retries=0,  # tries are counted, waited for and paid for here
    )
    return client.chat.completions.with_raw_response.create
