"""Requests with JSON bodies, read as text that can be sent back: UTF-8 without lone surrogates."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from json import JSONDecodeError
from typing import Any

from fastapi import Request
from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from cluster.api.base.authentication import Lease
from cluster.api.base.openai_errors import invalid_value
from cluster.api.base.openai_schema import RequestModel
from specdec.types.errors import InvalidValueError

MAX_JSON_DEPTH = 64


def read_json(body: bytes) -> Any:
    """Parse JSON in UTF-8.

    Raise JSONDecodeError for other text, UnicodeDecodeError for another encoding,
    UnicodeEncodeError for lone surrogates, ValueError for very long numbers, and RecursionError.
    From bytes, `json.loads` would accept the encoding of lone surrogates, and UTF-16.
    """
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
