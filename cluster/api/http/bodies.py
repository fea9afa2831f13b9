"""Bodies of requests: their limits, in an ASGI middleware for all paths, and their JSON.

JSON is read as text that can be sent back: UTF-8 without lone surrogates.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from json import JSONDecodeError
from typing import Any

from fastapi import Request
from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.api.base.anthropic_errors import failure_response
from cluster.api.base.authentication import Lease
from cluster.api.base.byte_budget import HeldBytes
from cluster.api.base.openai_errors import failure_of, invalid_value
from cluster.api.base.openai_schema import RequestModel
from cluster.api.http.connection import BODY_ARRIVED
from cluster.api.http.limits import HttpLimits
from specdec.types.deadline import TimeLimit
from specdec.types.errors import (
    BodyTooLargeError,
    EncodedBodyError,
    InvalidValueError,
    SlowBodyError,
)

_MAX_DISCARDED_BYTES = 64 * 1024
"""The remainder of a body that is read and discarded to keep a connection open."""


BODY_TIMEOUT_S: float = 20
"""Limit for the next part of a body to arrive."""

MIN_BYTES_PER_S = 32 * 1024
"""Least rate of a body beyond its first BODY_TIMEOUT_S. A client that sends single bytes would hold
its part of the budget for all requests indefinitely."""

MAX_JSON_DEPTH = 64

_COMPRESSIONS = frozenset({b"gzip", b"x-gzip", b"deflate", b"br", b"zstd", b"compress"})


class BoundedBody:
    """The body of one request, of which at most a number of bytes is read."""

    def __init__(self, scope: Scope, receive: Receive, max_bytes: int, held: HeldBytes) -> None:
        """Raise BodyTooLargeError if the declared length exceeds `max_bytes`.

        held: grows with what is read.
        """
        self._receive = receive
        self._max_bytes = max_bytes
        self._held = held
        self._num_bytes = 0
        self._began_at_s = time.monotonic()
        self._has_arrived = BODY_ARRIVED in scope.get("state", ())
        headers = dict(scope["headers"])
        declared = headers.get(b"content-length", b"0")
        self._declared_bytes = int(declared) if declared.isdigit() else 0
        self._is_chunked = b"transfer-encoding" in headers
        self._is_complete = not (self._is_chunked or self._declared_bytes)
        self._check(self._declared_bytes)

    def require_uncompressed(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raise EncodedBodyError for a compressed body. Other codings, as utf-8, are ignored."""
        if self._is_complete:
            return
        for value in (value for name, value in headers if name == b"content-encoding"):
            if not _COMPRESSIONS.isdisjoint(each.strip() for each in value.lower().split(b",")):
                raise EncodedBodyError(value.decode("latin-1"))

    @property
    def has_large_remainder(self) -> bool:
        """Return whether much of the body, or an unknown part, has not been read."""
        if self._is_complete:
            return False
        return self._is_chunked or self._declared_bytes - self._num_bytes > _MAX_DISCARDED_BYTES

    async def receive(self) -> Message:
        """Receive the next message.

        Raise BodyTooLargeError once the body is too large, OverloadedError if all requests together
        are, and SlowBodyError if nothing arrives.
        """
        if self._is_complete:
            return await self._receive()
        if self._has_arrived:
            message = await self._receive()
        else:
            with TimeLimit(self._timeout_s, lambda: SlowBodyError(BODY_TIMEOUT_S)):
                message = await self._receive()
        if message["type"] == "http.request":
            self._num_bytes += len(message.get("body", b""))
            self._is_complete = not message.get("more_body", False)
            self._check(self._num_bytes)
            self._held.grow_to(self._num_bytes)
        return message

    @property
    def _timeout_s(self) -> float:
        """Seconds for the next part: the limit of each, or what the whole body has left."""
        total_s = BODY_TIMEOUT_S + self._num_bytes / MIN_BYTES_PER_S
        return max(0.0, min(BODY_TIMEOUT_S, self._began_at_s + total_s - time.monotonic()))

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise BodyTooLargeError(self._max_bytes)


class LimitBodies:
    """ASGI middleware that refuses bodies above a limit with 413, before it reads the rest.

    A compressed body is refused with 415. Beyond the budget for all requests the status is 429. A
    connection whose request has a large remainder is closed after the response: the server would
    read it to keep the connection open.
    """

    def __init__(self, app: ASGIApp, get_limits: Callable[[], HttpLimits]) -> None:
        """get_limits: called for each request."""
        self._app = app
        self._get_limits = get_limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limits = self._get_limits()
        with limits.budget.hold() as held:
            try:
                body = BoundedBody(scope, receive, limits.max_body_bytes, held)
                body.require_uncompressed(scope["headers"])
            except (BodyTooLargeError, EncodedBodyError) as error:
                await failure_response(failure_of(error), scope["path"])(scope, receive, send)
                return

            def send_and_close(message: Message) -> Awaitable[None]:
                if message["type"] == "http.response.start" and body.has_large_remainder:
                    message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
                return send(message)

            await self._app(scope, body.receive, send_and_close)


def read_json(body: bytes) -> Any:
    """Parse JSON in UTF-8.

    Raise JSONDecodeError for other text, UnicodeDecodeError for another encoding,
    UnicodeEncodeError for lone surrogates, ValueError for very long numbers, and RecursionError.
    From bytes, `json.loads` would accept the encoding of lone surrogates, and UTF-16.
    """
    try:
        # What it accepts, it reads as json does. Texts of a client stay in no cache.
        return from_json(body, cache_strings="keys")
    except ValueError:
        content = json.loads(body.decode("utf-8-sig"))
    if b"\\ud" in body.lower():  # an escape, perhaps of half a character
        json.dumps(content, ensure_ascii=False).encode()
    return content


class ApiRequest(Request):
    """A request with plain headers, whose JSON has a limited depth. `LimitBodies` limits its size.

    headers: by their names in lower case; of several with the same name the first one.
    request_id: of logs, answers and their header. lease: held until the answer is complete.
    get_names: returns the names that errors call fields by; None where the body was not read.
    """

    headers: Mapping[str, str] = {}  # type: ignore[assignment]  # a property of the base class

    def __init__(self, scope: Scope, receive: Receive) -> None:
        super().__init__(scope, receive)
        pairs = reversed(scope["headers"])
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in pairs}
        self.request_id = ""
        self.lease = Lease()
        self.get_names: Callable[[], Mapping[str, str]] | None = None

    @property
    def cookies(self) -> dict[str, str]:
        """No cookies: FastAPI asks for them, and no route has any."""
        return {}

    async def body(self) -> bytes:
        """Return the whole body. Raise ClientDisconnect where the client leaves before its end."""
        if not hasattr(self, "_body"):
            parts, has_more = list[bytes](), True
            while has_more:
                message = await self.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                parts.append(message.get("body", b""))
                has_more = message.get("more_body", False)
            self._body = b"".join(parts)
        return self._body

    async def json(self) -> Any:
        """Parse the body. Raise JSONDecodeError, or InvalidValueError for too deep a nesting."""
        body = await self.body()
        limit = f"JSON in UTF-8, nested at most {MAX_JSON_DEPTH} levels deep"
        try:
            content = read_json(body)
        except JSONDecodeError:
            raise
        except UnicodeEncodeError as error:
            raise InvalidValueError("body", "malformed", "JSON without lone surrogates") from error
        except (ValueError, RecursionError) as error:  # not UTF-8, or very long numbers
            raise InvalidValueError("body", "malformed", limit) from error
        if _may_be_deeper(body, MAX_JSON_DEPTH) and _is_deeper(content, MAX_JSON_DEPTH):
            raise InvalidValueError("body", "too deep", limit)
        return content

    async def read(self, model: type[RequestModel]) -> Any:
        """Return the body as an instance of `model`. Raise InvalidValueError."""
        if not await self.body():
            raise InvalidValueError("body", None, "a JSON object")
        try:
            content = await self.json()
            return model.model_validate(content)
        except JSONDecodeError as error:
            where = f"JSON: {error.msg} at character {error.pos}"
            raise InvalidValueError("body", error.doc, where) from error
        except ValidationError as error:
            raise invalid_value(error, content, model) from error


def _may_be_deeper(body: bytes, depth: int) -> bool:
    """Return whether there are enough brackets in a text, perhaps within strings."""
    return body.count(b"[") + body.count(b"{") >= depth


def _is_deeper(content: Any, depth: int) -> bool:
    level = [content]
    for _ in range(depth):
        lists = [part for part in level if isinstance(part, list)]
        lists += [[*part.values()] for part in level if isinstance(part, dict)]
        level = [each for part in lists for each in part]
        if not level:
            return False
    return True
