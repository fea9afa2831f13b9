"""Asks over the OpenAI HTTP API, of this service or of any other."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import httpx

from cluster.cli.bench.backend import Heard, RequestFailedError, TokenUsage
from cluster.cli.bench.open_sockets import OpenSockets
from cluster.cli.bench.questions import HowToAsk, Question
from specdec.types.errors import InvalidValueError, SpecdecError
from specdec.types.stats import SpeculationStats

Endpoint = Literal["chat", "completions"]

_PATHS: Mapping[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_NO_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None)
_MAX_TOLD_CHARS = 300


class ServiceError(SpecdecError):
    """The service cannot be asked at all."""


class OpenAIBackend:
    """Prompts are a user's messages, or texts to go on with, by the endpoint.

    An event counts as bringing tokens where it has text: the API does not say how many.
    """

    def __init__(
        self,
        base_url: str,
        endpoint: Endpoint,
        how: HowToAsk,
        *,
        timeout_s: float,
        model: str | None = None,
        api_key: str | None = None,
        tls_ca_file: Path | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Asks which model there is, unless it is given. Raises ServiceError or InvalidValueError.

        tls_ca_file: certificates (PEM) that vouch for an https service; None: those of the system.
        transport: in place of the network, for tests.
        """
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._path = _PATHS[endpoint]
        self._is_chat = endpoint == "chat"
        self._how = how
        self._sockets = OpenSockets()
        headers, verify = _authorization(api_key), _trust(tls_ca_file)
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

    def ask(self, question: Question) -> Iterator[Heard]:
        """As Backend has it."""
        try:
            with self._http.stream(
                "POST",
                self._path,
                json=self._body(question),
                extensions={"trace": self._sockets.trace},
            ) as response:
                if response.status_code != httpx.codes.OK:
                    raise RequestFailedError(f"HTTP {response.status_code}")
                yield from self._events(response)
        except httpx.HTTPError as error:
            raise RequestFailedError(type(error).__name__) from error

    def close(self) -> None:
        """As Backend has it."""
        self._sockets.shut_down()
        self._http.close()

    def _served_model(self) -> str:
        try:
            response = self._http.get("/v1/models")
            response.raise_for_status()
            return str(response.json()["data"][0]["id"])
        except httpx.HTTPError as error:
            told = " ".join(str(error).split())[:_MAX_TOLD_CHARS]
            raise ServiceError(f"{self._base_url} tells of no model: {told}") from error
        except (ValueError, LookupError, TypeError) as error:
            message = f"{self._base_url}/v1/models lists no model as OpenAI's API does"
            raise ServiceError(message) from error

    def _body(self, question: Question) -> dict[str, Any]:
        how = self._how
        body: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": question.max_tokens,
            "temperature": how.temperature,
            "seed": how.seed,
            "ignore_eos": how.ignore_eos or None,
            "cache_salt": question.cache_salt or None,
            "speculation": _given(how),
        }
        if self._is_chat:
            body["messages"] = [{"role": "user", "content": question.prompt}]
        else:
            body["prompt"] = question.prompt
        return {name: value for name, value in body.items() if value is not None}

    def _events(self, response: httpx.Response) -> Iterator[Heard]:
        """Server-sent events with a line of data each, as all services write them."""
        for line in response.iter_lines():
            data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
            if data == "[DONE]":
                return
            if data:
                yield _heard(data)


def _authorization(api_key: str | None) -> dict[str, str]:
    """Refuses what no header can have; httpx would quote it."""
    if not api_key:
        return {}
    if not (api_key.isascii() and api_key.isprintable() and " " not in api_key):
        limit = "printable ASCII characters, without spaces"
        raise InvalidValueError("api_key", "not shown", limit)
    return {"Authorization": f"Bearer {api_key}"}


def _trust(tls_ca_file: Path | None) -> ssl.SSLContext | bool:
    if tls_ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=tls_ca_file)
    except (ssl.SSLError, OSError) as error:
        limit = "a file of certificates (PEM)"
        raise InvalidValueError("tls_ca_file", str(tls_ca_file), limit) from error


def _given(how: HowToAsk) -> dict[str, Any] | None:
    if how.speculation is None:
        return None
    return {name: value for name, value in asdict(how.speculation).items() if value is not None}


def _heard(data: str) -> Heard:
    try:
        event: Any = json.loads(data)
        if "error" in event:
            raise RequestFailedError(f"error in the stream: {_kind(event['error'])}")
        brings_tokens = any(map(_has_text, event.get("choices") or []))
        usage = event.get("usage")
        return Heard(brings_tokens, None if usage is None else _usage(usage))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise RequestFailedError("an event that is none of OpenAI's API") from error


def _kind(error: Any) -> str:
    return str(error.get("code") or error.get("type")) if isinstance(error, dict) else "unnamed"


def _has_text(choice: Mapping[str, Any]) -> bool:
    said = choice.get("delta") or choice
    names = ("content", "text", "reasoning_content", "tool_calls")
    return any(said.get(name) for name in names)


def _usage(usage: Mapping[str, Any]) -> TokenUsage:
    """With the statistics of speculation, where it is our own service that tells."""
    details = usage.get("completion_tokens_details") or {}
    told = details.get("speculation")
    speculation = None
    if told is not None:
        speculation = SpeculationStats(
            told["num_drafts"], told["num_draft_tokens"], told["num_accepted_tokens"]
        )
    return TokenUsage(usage["prompt_tokens"], usage["completion_tokens"], speculation)
