"""Backend for the OpenAI HTTP API of this service or of any other."""

from __future__ import annotations

import json
import socket
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import httpx

from cluster.cli.bench.backend import RequestFailedError, StreamEvent, TokenUsage
from cluster.cli.bench.dataset import SampleRequest
from specdec.types.errors import InvalidValueError, SpecdecError
from specdec.types.network import trusting
from specdec.types.reports.stats import SpeculationStats
from specdec.types.sampling.sampling_params import SamplingParams

Endpoint = Literal["chat", "completions"]

_PATHS: Mapping[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_NO_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None)
_MAX_ERROR_CHARS = 300
_OPENED = ("connection.connect_tcp.complete", "connection.start_tls.complete")


class ServiceError(SpecdecError):
    """The service is unreachable or does not implement the OpenAI API."""


class OpenAIBackend:
    """Sends prompts as chat messages or as completion prompts, depending on the endpoint.

    An event with text counts as an event with tokens: the API does not report their number.
    """

    def __init__(
        self,
        base_url: str,
        endpoint: Endpoint,
        options: SamplingParams,
        *,
        timeout_s: float | None,
        model: str | None = None,
        api_key: str | None = None,
        tls_ca_file: Path | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Connect, and request the name of the served model unless it is given.

        tls_ca_file: CA certificates (PEM) of an https service; None for those of the system.
        transport: replaces the network in tests. Raises ServiceError or InvalidValueError.
        """
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._path = _PATHS[endpoint]
        self._is_chat = endpoint == "chat"
        self._options = options
        self._sockets = _OpenSockets()
        headers = _authorization(api_key)
        verify = tls_ca_file is None or trusting("tls_ca_file", tls_ca_file)[0]
        try:
            self._http = httpx.Client(
                base_url=self._base_url,
                headers=headers,
                timeout=timeout_s,
                limits=_NO_LIMITS,
                verify=verify,
                transport=transport,
                trust_env=False,
            )
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            limit = "a URL such as http://host:8000"
            raise InvalidValueError("base_url", base_url, limit) from error
        self.model = model or self._served_model()

    def stream(self, request: SampleRequest) -> Iterator[StreamEvent]:
        """Send a streaming request and yield its events."""
        try:
            with self._http.stream(
                "POST",
                self._path,
                json=self._body(request),
                extensions={"trace": self._sockets.trace},
            ) as response:
                if response.status_code != httpx.codes.OK:
                    raise RequestFailedError(f"HTTP {response.status_code}")
                yield from self._events(response)
        except httpx.HTTPError as error:
            raise RequestFailedError(type(error).__name__) from error

    def close(self) -> None:
        """Close all connections, including those that other threads read from."""
        self._sockets.shut_down()
        self._http.close()

    def _served_model(self) -> str:
        try:
            response = self._http.get("/v1/models")
            response.raise_for_status()
            return str(response.json()["data"][0]["id"])
        except httpx.HTTPError as error:
            reason = " ".join(str(error).split())[:_MAX_ERROR_CHARS]
            raise ServiceError(
                f"{self._base_url}/v1/models failed: {reason}; check --base-url"
            ) from error
        except (ValueError, LookupError, TypeError) as error:
            message = f"{self._base_url}/v1/models lists no model in the format of the OpenAI API"
            raise ServiceError(message) from error

    def _body(self, request: SampleRequest) -> dict[str, Any]:
        options = self._options
        body: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": request.max_tokens,
            "temperature": options.temperature,
            "seed": options.seed,
            "ignore_eos": options.ignore_eos or None,
            "cache_salt": request.cache_salt or None,
            "speculation": _speculation(options) or None,
        }
        if self._is_chat:
            body["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            body["prompt"] = request.prompt
        return {name: value for name, value in body.items() if value is not None}

    def _events(self, response: httpx.Response) -> Iterator[StreamEvent]:
        """Parse server-sent events of one data line each, as all known services send them."""
        for line in response.iter_lines():
            data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
            if data == "[DONE]":
                return
            if data:
                yield _event(data)
        raise RequestFailedError("the stream ended before [DONE]")


def _authorization(api_key: str | None) -> dict[str, str]:
    """Return the authorization header; check the key first, as httpx would quote it in errors."""
    if not api_key:
        return {}
    if not (api_key.isascii() and api_key.isprintable() and " " not in api_key):
        limit = "printable ASCII characters, without spaces"
        raise InvalidValueError("api_key", "not shown", limit)
    return {"Authorization": f"Bearer {api_key}"}


def _speculation(options: SamplingParams) -> dict[str, Any]:
    return {name: value for name, value in asdict(options.speculation).items() if value is not None}


def _event(data: str) -> StreamEvent:
    try:
        event: Any = json.loads(data)
        if "error" in event:
            raise RequestFailedError(f"error in the stream: {_kind(event['error'])}")
        has_tokens = any(map(_has_text, event.get("choices") or []))
        usage = event.get("usage")
        return StreamEvent(has_tokens, None if usage is None else _usage(usage))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise RequestFailedError("an event that is not of the OpenAI API") from error


def _kind(error: Any) -> str:
    return str(error.get("code") or error.get("type")) if isinstance(error, dict) else "unnamed"


def _has_text(choice: Mapping[str, Any]) -> bool:
    content = choice.get("delta") or choice
    names = ("content", "text", "reasoning_content", "reasoning", "tool_calls")
    return any(content.get(name) for name in names)


def _usage(usage: Mapping[str, Any]) -> TokenUsage:
    """Parse token counts, and the speculation statistics that our own service adds."""
    stats = (usage.get("completion_tokens_details") or {}).get("speculation")
    speculation = None
    if stats is not None:
        speculation = SpeculationStats(
            stats["num_drafts"], stats["num_draft_tokens"], stats["num_accepted_tokens"]
        )
    return TokenUsage(usage["prompt_tokens"], usage["completion_tokens"], speculation)


class _OpenSockets:
    """The open sockets of an httpx client.

    Closing the client does not wake a thread that reads from it; shutting down its socket does.
    """

    def __init__(self) -> None:
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._are_shut_down = False
        self._lock = threading.Lock()  # of both

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Record new sockets; the callback of httpx's `trace` extension."""
        if event in _OPENED:
            opened: socket.socket = info["return_value"].get_extra_info("socket")
            with self._lock:
                self._sockets.add(opened)
                is_late = self._are_shut_down
            if is_late:
                _shut_down(opened)

    def shut_down(self) -> None:
        """Shut down all sockets, including those that are still connecting; thread-safe."""
        with self._lock:
            self._are_shut_down = True
            found = tuple(self._sockets)
        for each in found:
            _shut_down(each)


def _shut_down(opened: socket.socket) -> None:
    """Shut down without the TLS closing handshake, which the reading thread would have to serve."""
    with suppress(OSError):  # already closed
        socket.socket.shutdown(opened, socket.SHUT_RDWR)
