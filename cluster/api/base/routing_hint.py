"""The facts about a request that decide its replica, computed where it arrives.

Serve's proxies compute a hint from the body of an HTTP request or the message of a gRPC call, and
pass it as Serve's session id, which reaches the request router of every handle
(`cluster.serve.request_router`). A proxy has no tokenizer: prefixes are compared by bytes.
"""

from __future__ import annotations

import struct
from array import array
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import islice, pairwise
from typing import Any, Self

from pydantic_core import from_json

BYTES_PER_TOKEN = 4
"""Bytes of text that are counted as one token; token ids have this size, too."""

MAX_OUTPUT_TOKENS = 256
"""Output that is expected of a request, unless its limit is lower."""

MAX_READ_BYTES = 2**20
"""Larger bodies are not parsed on the event loop of a proxy; they have no hint."""

MAX_PARTS = 2**13
"""Values and names in a prompt of which a hint is made; the rest counts as not sent. A body of many
small ones would occupy the event loop for a second."""

_KEY_BYTES = 8
_MIN_CHUNK_BYTES = 128
_CHUNKS_OF_PREFIX = 32
_MARK = "specdec-"
_HEAD = struct.Struct("<IIB")  # prompt tokens, output tokens, bytes of the session

_SCOPE_FIELDS = ("model", "lora_path", "cache_salt")
_PROMPT_FIELDS = (
    "tools",
    "system",
    "instructions",
    "messages",
    "input",
    "prompt",
    "text",
    "input_ids",
)
"""The fields of the HTTP APIs that become the prompt, in the order in which templates have them."""

_LIMIT_FIELDS = ("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens")


def boundaries(num_bytes: int) -> Iterator[int]:
    """Yield the ends of the prefixes with a key, up to `num_bytes`.

    Prefixes grow by 128 bytes, and beyond 4 KiB by a 32nd, so that a long prompt has few hundred.
    """
    end = 0
    while (end := end + max(_MIN_CHUNK_BYTES, end // _CHUNKS_OF_PREFIX)) <= num_bytes:
        yield end


@dataclass(frozen=True)
class RoutingHint:
    """The prefixes of a prompt, and an estimate of the work.

    prefix_keys: hashes of growing prefixes, the shortest first, which end at `boundaries`. Prompts
        of different models, adapters and values of `cache_salt` share none.
    session: hash of the client's session id or `prompt_cache_key`; empty without one.
    """

    prefix_keys: tuple[bytes, ...]
    prompt_tokens: int
    output_tokens: int
    session: bytes = b""

    @classmethod
    def of(
        cls, scope: tuple[str, ...], prompt: bytes, max_tokens: int | None, session: str = ""
    ) -> Self:
        """Return the hint of a prompt in canonical bytes. scope: what KV is never shared across."""
        digest = blake2b(b"".join(map(_hash, scope)), digest_size=_KEY_BYTES)
        keys, view = [], memoryview(prompt)
        for begin, end in pairwise((0, *boundaries(len(prompt)))):
            digest.update(view[begin:end])
            keys.append(digest.copy().digest())
        limit = MAX_OUTPUT_TOKENS if max_tokens is None else max(1, max_tokens)
        return cls(
            tuple(keys),
            max(1, min(len(prompt) // BYTES_PER_TOKEN, 2**32 - 1)),
            min(limit, MAX_OUTPUT_TOKENS),
            _hash(session) if session else b"",
        )

    @classmethod
    def of_body(cls, body: bytes, session: str = "") -> Self | None:
        """Return the hint of a JSON body of any of the HTTP APIs; None if it is no such body."""
        fields = read_fields(body)
        return None if fields is None else cls.of_fields(fields, session)

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any], session: str = "") -> Self | None:
        """Return the hint of the fields of a body; None if they contain no prompt."""
        parts = list(_pieces(fields.get(name) for name in _PROMPT_FIELDS))
        if not parts:
            return None
        scope = tuple(str(fields.get(name) or "") for name in _SCOPE_FIELDS)
        session = session or str(fields.get("prompt_cache_key") or "")
        return cls.of(scope, b"".join(parts), _max_tokens(fields), session)

    def encode(self) -> str:
        """Return the hint as printable ASCII."""
        head = _HEAD.pack(self.prompt_tokens, self.output_tokens, len(self.session))
        return _MARK + urlsafe_b64encode(head + self.session + b"".join(self.prefix_keys)).decode()

    @classmethod
    def decode(cls, text: str) -> Self | None:
        """Return an encoded hint; None for a text that is none."""
        if not claims_hint(text):
            return None
        try:
            data = urlsafe_b64decode(text.removeprefix(_MARK))
            prompt_tokens, output_tokens, num_session = _HEAD.unpack_from(data)
        except (Base64Error, ValueError, struct.error):
            return None
        begin = _HEAD.size + num_session
        keys = [data[at : at + _KEY_BYTES] for at in range(begin, len(data), _KEY_BYTES)]
        return cls(tuple(keys), prompt_tokens, output_tokens, data[_HEAD.size : begin])

    @property
    def tokens_by_key(self) -> tuple[int, ...]:
        """Number of tokens that each key adds to the prefix before it."""
        return _tokens_by_key(len(self.prefix_keys))


def read_fields(body: bytes) -> dict[str, Any] | None:
    """Return the fields of a JSON body; None if it is no JSON object, or too large to be parsed."""
    if len(body) > MAX_READ_BYTES:
        return None
    try:
        fields = from_json(body)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None


def claims_hint(session: str) -> bool:
    """Return whether a session id claims to be a hint, which only proxies make.

    A client that made one could attribute any load and any prefix to a replica.
    """
    return session.startswith(_MARK)


def _hash(text: str) -> bytes:
    """Return a hash of a fixed size, so that no text can run on into what is hashed after it."""
    return blake2b(text.encode(errors="surrogatepass"), digest_size=_KEY_BYTES).digest()


@lru_cache(maxsize=512)
def _tokens_by_key(count: int) -> tuple[int, ...]:
    ends = pairwise((0, *islice(boundaries(2**63), count)))
    return tuple((end - begin) // BYTES_PER_TOKEN for begin, end in ends)


def _pieces(values: Iterable[Any]) -> Iterator[bytes]:
    """Yield the texts and numbers in JSON values, so that appending to a list appends bytes.

    Stops after MAX_PARTS values and names.
    """
    waiting = list(values)[::-1]
    for _ in range(MAX_PARTS):
        if not waiting:
            return
        value = waiting.pop()
        if isinstance(value, str):
            yield value.encode(errors="surrogatepass") + b"\0"
        elif isinstance(value, dict):
            waiting += [each for item in value.items() for each in item][::-1]
        elif isinstance(value, list):
            if (token_ids := token_bytes(value)) is not None:
                yield token_ids
            else:
                waiting += value[::-1]
        elif value is not None:
            yield str(value).encode() + b"\0"


def token_bytes(values: Any) -> bytes | None:
    """Return token ids as bytes; None for other values."""
    try:
        return array("i", values).tobytes() or None
    except (TypeError, OverflowError):
        return None


def _max_tokens(fields: Mapping[str, Any]) -> int | None:
    params = fields.get("sampling_params")
    places = [fields, params if isinstance(params, dict) else {}]
    limits = [place.get(name) for place in places for name in _LIMIT_FIELDS]
    return next((each for each in limits if isinstance(each, int)), None)
