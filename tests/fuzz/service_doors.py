"""Doors of a running service: gRPC, the OpenAI API, HTTP administration, and the command line."""

from __future__ import annotations

import json
from random import Random
from typing import Any, ClassVar
from unittest import mock

import grpc
import httpx
from click import Command, Group
from click.testing import CliRunner

from cluster.api.anthropic.schema import MessagesRequest
from cluster.api.openai.schemas.chat_schema import ChatRequest
from cluster.api.openai.schemas.completion_schema import CompletionRequest
from cluster.api.openai.schemas.responses_schema import ResponsesRequest
from cluster.api.sglang.schema import GenerateRequest as SglGenerateRequest
from cluster.api.sglang.schema import SglSamplingParams
from cluster.cli import main
from tests.e2e.conftest import RunningService
from tests.e2e.random_messages import TEXTS
from tests.e2e.test_grpc_fuzz import check_mutated, check_one
from tests.fuzz.doors import Door, ViolationError
from tests.fuzz.mutations import mutated, mutated_bytes, wild

TIMEOUT_S = 60.0
MAX_NUMBER = 10**9


class GrpcDoor(Door):
    """Messages of every method, random ones and those with changed bytes."""

    name, share, is_concurrent = "gRPC", 30, True

    def __init__(self, service: RunningService) -> None:
        self._channel = grpc.insecure_channel(service.grpc_address)

    def enter(self, random: Random) -> str:
        number = random.randrange(MAX_NUMBER)
        if random.random() < 0.3:
            return str(check_mutated(self._channel, number))
        return str(check_one(self._channel, number)[1])


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")


def _answer(http: httpx.Client, method: str, path: str, content: bytes, media: str) -> str:
    """Send a request; return its status. Raises ViolationError for an internal error."""
    headers = {"content-type": media, "x-request-timeout-s": "20"}
    with http.stream(method, path, content=content, headers=headers) as response:
        text = response.read().decode()
    if response.status_code >= 500 and response.status_code not in (503, 504):
        raise ViolationError(
            f"{response.status_code} {method} {path}: {text[:300]} to {content[:1000]!r}"
        )
    if '"type":"server_error"' in text.replace(" ", ""):
        raise ViolationError(f"an event of an internal error: {text[-300:]} to {content[:1000]!r}")
    if "Traceback" in text or "/site-packages/" in text:
        raise ViolationError(f"internal texts from {method} {path}: {text[:300]}")
    return str(response.status_code)


class OpenAIDoor(Door):
    """Bodies of the OpenAI API: fields with wild values, and changed bytes."""

    name, share, is_concurrent = "OpenAI", 25, True

    _messages = ({"role": "system", "content": "Short."}, {"role": "user", "content": "Hello"})
    _drafted: ClassVar[dict[str, Any]] = {
        "prompt": "The river",
        "max_tokens": 3,
        "speculation": {
            "num_speculative_tokens": 2,
            "draft_confidence_threshold": 0.4,
            "prediction": "The river runs",
            "verifier": "confidence",
            "acceptance_threshold": 0.3,
        },
    }
    _bodies = (
        ("/v1/completions", CompletionRequest, {"prompt": "The river", "max_tokens": 3}),
        ("/v1/completions", CompletionRequest, _drafted),
        ("/v1/chat/completions", ChatRequest, {"messages": [*_messages], "max_tokens": 3}),
        ("/v1/responses", ResponsesRequest, {"input": "Hello", "max_output_tokens": 16}),
        ("/v1/messages", MessagesRequest, {"messages": [_messages[1]], "max_tokens": 3}),
        ("/generate", SglGenerateRequest, {"text": "The river"}),
        ("/generate", SglSamplingParams, {"input_ids": [1, 2], "sampling_params": {}}),
        ("/tokenize", None, {"prompt": "The river"}),
        ("/tokenize", None, {"messages": [*_messages]}),
        ("/detokenize", None, {"tokens": [1, 2, 3]}),
    )

    def __init__(self, service: RunningService) -> None:
        self._http = httpx.Client(base_url=service.http_url, timeout=TIMEOUT_S)

    def enter(self, random: Random) -> str:
        path, model, valid = random.choice(self._bodies)
        body: dict[str, Any] = dict(valid)
        names = list(model.model_fields) if model else []
        for name in random.sample(names, min(len(names), random.choice((0, 1, 2, 5)))):
            body.setdefault(name, wild(random))
        body["stream"] = random.random() < 0.3 if model else body.get("stream", False)
        content = _json(mutated(body, random) if random.random() < 0.7 else body)
        if random.random() < 0.15:
            content = mutated_bytes(content, random)
        media = "application/json" if random.random() < 0.95 else random.choice(TEXTS)[:20].strip()
        media = media if media.isascii() and media.isprintable() else "text/plain"
        return _answer(self._http, "POST", path, content, media)


class AdminDoor(Door):
    """HTTP administration, the dashboard, metrics, and paths that do not exist."""

    name, share, is_concurrent = "HTTP admin", 15, True

    _bodies = (
        ("PUT", "/v1/admin/speculation", {"mode": "auto", "threshold": 8, "reason": "why"}),
        ("PATCH", "/v1/admin/speculation", {"num_speculative_tokens": 2}),
        ("POST", "/v1/admin/speculation/preview", {"mode": "off"}),
        ("DELETE", "/v1/admin/speculation", {}),
        ("POST", "/v1/admin/profile", {"num_steps": 2, "timeout_s": 0.2}),
        ("POST", "/dashboard/generate", {"prompt": "The river", "max_tokens": 3}),
    )
    _paths = (
        "/v1/admin/status",
        "/v1/admin/speculation",
        "/v1/admin/audit-log",
        "/v1/admin/replicas",
    )
    _queries = ("", "?count=5", "?count=-1", "?count=x", "?model=tiny", "?limit=1e9", "?%00=%ff")

    def __init__(self, service: RunningService) -> None:
        self._http = httpx.Client(base_url=service.http_url, timeout=TIMEOUT_S)

    def enter(self, random: Random) -> str:
        if random.random() < 0.3:
            path = random.choice((*self._paths, "/metrics", "/dashboard/../x", "/v1/%2e%2e/"))
            query = random.choice(self._queries)
            return _answer(self._http, "GET", path + query, b"", "application/json")
        method, path, valid = random.choice(self._bodies)
        content = _json(mutated(valid, random))
        if random.random() < 0.15:
            content = mutated_bytes(content, random)
        return _answer(self._http, method, path, content, "application/json")


class _WouldStart(SystemExit):
    """A configuration that `specdec serve` accepts; it is not started here."""


class CommandLineDoor(Door):
    """Arguments of the commands that end, against the running service."""

    name, share = "CLI", 6

    _left_out = ("bench", "fetch", "doctor")  # take minutes, or need a network

    def __init__(self, service: RunningService) -> None:
        self._address = service.grpc_address
        self._commands = [
            each for each in _commands(main.main, ()) if not {*each[0]} & {*self._left_out}
        ]

    def enter(self, random: Random) -> str:
        words, command = random.choice(self._commands)
        arguments = [*words, *self._arguments(command, random)]
        if words[-1] == "watch":
            arguments += ["--count", "1"]
        if "address" in {each.name for each in command.params}:
            arguments += ["--address", self._address]
        with mock.patch("cluster.serve.processes._fork", side_effect=_WouldStart(0)):
            result = CliRunner().invoke(main.main, arguments, input="Hello\n")
        output = result.output
        if result.exit_code not in (0, 1, 2, 130):
            raise ViolationError(f"exit code {result.exit_code} of {arguments}: {output[-300:]}")
        if "Traceback" in output or "error: unexpected " in output or "INTERNAL" in output:
            raise ViolationError(f"{arguments}: {output[-300:]}")
        return f"exit {result.exit_code}"

    @staticmethod
    def _arguments(command: Command, random: Random) -> list[str]:
        chosen: list[str] = []
        flags = [flag for each in command.params for flag in each.opts if flag.startswith("--")]
        for flag in random.choices(flags or ["--json"], k=random.choice((0, 1, 1, 2, 3))):
            chosen.append(flag)
            if random.random() < 0.8:
                chosen.append(_word(random))
        return chosen + [_word(random) for _ in range(random.choice((0, 0, 1)))]


def _word(random: Random) -> str:
    value = wild(random) if random.random() < 0.5 else random.choice(("1", "0.5", "ngram", "on"))
    text = value if isinstance(value, str) else json.dumps(value)
    return text.replace("\0", "")[:300]


def _commands(group: Group, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], Command]]:
    found: list[tuple[tuple[str, ...], Command]] = []
    for name, command in group.commands.items():
        if isinstance(command, Group):
            found += _commands(command, (*path, name))
        else:
            found.append(((*path, name), command))
    return found


def service_doors(service: RunningService) -> list[Door]:
    """Return the doors of a running service."""
    return [GrpcDoor(service), OpenAIDoor(service), AdminDoor(service), CommandLineDoor(service)]
