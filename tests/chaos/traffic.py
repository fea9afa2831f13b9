"""Mixed traffic on a running service, recorded as a history.

Every request is one of a fixed set, whose answers the undisturbed service gave before: what it may
answer later is therefore known. Clients send them until they are stopped.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Protocol

import httpx
import psutil

from specdec.client import Client, ClientError
from specdec.types.sampling.sampling_params import (
    SamplingParams,
    SpeculationOptions,
    StructuredOutput,
)
from tests.chaos.history import CANCELLED, FINISHED, Call, Tokens

TIMEOUT_S = 100.0
SHORT_TIMEOUT_S = 1.0
GRACE_S = 15.0
"""A call may end this much after its deadline: machines of a test are slow."""
BROKEN = "BROKEN"
"""An HTTP answer whose connection was closed before its end."""
REFUSALS = frozenset(
    {"UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "429", "503", "504"}
    | {"rate_limit_exceeded", "service_unavailable", "deadline_exceeded"}
)
"""Statuses of gRPC and HTTP, and the codes of an error event over HTTP."""
HAS_DEADLINE = "grpc deadline"
"""Kind of the calls that may run past their deadline, undisturbed."""
NUM_PROMPTS = 12
BURST = 10

Ask = Callable[["Traffic", Call, "Question", random.Random], None]


@dataclass(frozen=True)
class Question:
    """One request of the set. params: fix the answer, with the prompt."""

    prompt: str
    params: SamplingParams
    priority: int = 0

    def as_http(self, model: str) -> dict[str, object]:
        """Return the body of a completion with the same answer."""
        params = self.params
        return {
            **({"model": model} if model else {}),
            "prompt": self.prompt,
            "temperature": params.temperature,
            "seed": params.seed,
            "max_tokens": params.max_tokens,
            "ignore_eos": params.ignore_eos,
            "presence_penalty": params.presence_penalty,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }


def questions() -> list[Question]:
    """Return the set: greedy and sampled, with penalties, logprobs, grammars and choices."""
    made = []
    for index in range(NUM_PROMPTS):
        params = SamplingParams(
            temperature=0.8 * (index % 2),
            seed=index,
            max_tokens=20 + 15 * index,
            ignore_eos=True,
            presence_penalty=0.5 * (index % 3 == 2),
        )
        made.append(Question(f"The river {index}", params, priority=index % 3 - 1))
    first = made[1].params
    grammar = StructuredOutput(regex="[a-f ]{30,60}")
    made.append(Question("A name:", replace(first, structured_output=grammar, ignore_eos=False)))
    made.append(Question("Numbers:", replace(first, logprobs=2, max_tokens=60)))
    made.append(Question("Three of:", replace(first, n=3, max_tokens=40)))
    plain = SpeculationOptions(enabled=False)
    made.append(Question("Slowly:", replace(first, speculation=plain, max_tokens=50)))
    return made


@dataclass(frozen=True)
class Outcome:
    """A recorded call, when it began, and how long it took."""

    call: Call
    kind: str
    began_at_s: float
    took_s: float


class Traffic:
    """Clients of one service. `start` begins, `stop` ends and waits for them."""

    def __init__(self, grpc_address: str, http_url: str, seed: int, model: str = "") -> None:
        """model: of all requests; "" stands for the first one."""
        self.grpc_address = grpc_address
        self.model = model
        self.http_url = http_url
        self.outcomes: list[Outcome] = []
        self.overdue: list[str] = []
        self._seed = seed
        self._answers: list[tuple[Question, tuple[Tokens, ...]]] = []
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def learn(self) -> None:
        """Ask the undisturbed service for every answer."""
        with Client(self.grpc_address, timeout_s=TIMEOUT_S) as client:
            for question in questions():
                answer = client.generate(question.prompt, question.params, model=self.model)
                tokens = tuple(choice.token_ids for choice in answer.choices)
                self._answers.append((question, tokens))

    def start(self, num_clients: int) -> None:
        """Start more clients."""
        for _ in range(num_clients):
            index = len(self._threads)
            thread = threading.Thread(target=self._run, args=(index,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def burst(self, num_clients: int) -> None:
        """Send BURST requests a client at once, and wait for them."""
        threads = [
            threading.Thread(target=self._ask, args=(random.Random(index), index), daemon=True)
            for index in range(num_clients * BURST)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S + GRACE_S)

    def stop(self) -> None:
        """Wait for the open calls; report those that run past their deadline."""
        self._stopping.set()
        ends_at_s = time.monotonic() + TIMEOUT_S + GRACE_S
        for index, thread in enumerate(self._threads):
            thread.join(max(0.0, ends_at_s - time.monotonic()))
            if thread.is_alive():
                self.overdue.append(f"client {index}: a call never returned")

    def _run(self, index: int) -> None:
        generator, number = random.Random(f"{self._seed} {index}"), 0
        while not self._stopping.is_set():
            self._ask(generator, f"{index}.{number}")
            number += 1

    def _ask(self, generator: random.Random, name: object) -> None:
        question, expected = generator.choice(self._answers)
        kind, ask = generator.choice(_KINDS)
        if kind.startswith("http") and (question.params.n > 1 or _needs_grpc(question)):
            kind, ask = _KINDS[0]
        call = Call(f"{kind} {name} {question.prompt!r}", expected)
        began_at_s = time.monotonic()
        try:
            ask(self, call, question, generator)
        except ClientError as error:
            call.end(error.code.name)
        except httpx.HTTPError:
            call.end(BROKEN)
        took_s = time.monotonic() - began_at_s
        self.outcomes.append(Outcome(call, kind, began_at_s, took_s))
        if took_s > TIMEOUT_S + GRACE_S:
            self.overdue.append(f"{call.name}: ended {took_s - TIMEOUT_S:.0f} s after its deadline")
        if not call.ends or call.ends[0].status != FINISHED:
            self._stopping.wait(0.2)


def _needs_grpc(question: Question) -> bool:
    params = question.params
    return bool(params.structured_output or params.logprobs or params.speculation.enabled is False)


def _read(
    traffic: Traffic,
    call: Call,
    question: Question,
    *,
    timeout_s: float = TIMEOUT_S,
    pause_s: float = 0.0,
    num_messages: float = float("inf"),
) -> None:
    """Read a gRPC stream; leave it after `num_messages`."""
    with Client(traffic.grpc_address, timeout_s=timeout_s) as client:
        stream = client.generate_stream(
            question.prompt, question.params, model=traffic.model, priority=question.priority
        )
        with closing(stream) as chunks:
            for chunk in chunks:
                is_end = chunk.finish_reason is not None
                call.receive(chunk.choice, chunk.token_ids, ends_choice=is_end)
                if chunk.usage is not None:
                    call.end(FINISHED, chunk.usage.completion_tokens)
                    return
                num_messages -= 1
                if num_messages <= 0:
                    call.end(CANCELLED)
                    return
                time.sleep(pause_s)


def _stream(traffic: Traffic, call: Call, question: Question, _: random.Random) -> None:
    _read(traffic, call, question)


def _cancel(traffic: Traffic, call: Call, question: Question, generator: random.Random) -> None:
    _read(traffic, call, question, num_messages=generator.randint(1, 10))


def _read_slowly(traffic: Traffic, call: Call, question: Question, _: random.Random) -> None:
    _read(traffic, call, question, pause_s=0.1)


def _with_deadline(traffic: Traffic, call: Call, question: Question, _: random.Random) -> None:
    _read(traffic, call, question, timeout_s=SHORT_TIMEOUT_S)


def _unary(traffic: Traffic, call: Call, question: Question, _: random.Random) -> None:
    with Client(traffic.grpc_address, timeout_s=TIMEOUT_S) as client:
        answer = client.generate(
            question.prompt, question.params, model=traffic.model, priority=question.priority
        )
    for choice in answer.choices:
        call.receive(choice.index, choice.token_ids, ends_choice=True)
    call.end(FINISHED, answer.usage.completion_tokens)


def _http_stream(traffic: Traffic, call: Call, question: Question, _: random.Random) -> None:
    _read_http(traffic, call, question)


def _http_vanish(
    traffic: Traffic, call: Call, question: Question, generator: random.Random
) -> None:
    _read_http(traffic, call, question, num_events=generator.randint(1, 10))


def _read_http(
    traffic: Traffic, call: Call, question: Question, num_events: float = float("inf")
) -> None:
    """Read a stream of server-sent events; close the connection after `num_events`."""
    url, body = traffic.http_url + "/v1/completions", question.as_http(traffic.model)
    usage = None
    with httpx.stream("POST", url, json=body, timeout=TIMEOUT_S) as response:
        if response.status_code != 200:
            response.read()
            call.end(status_of(response))
            return
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                call.end(FINISHED, usage)
                return
            if line.startswith("data: "):
                event = json.loads(data)
                if "error" in event:
                    call.end(str(event["error"].get("code") or event["error"].get("type")))
                    return
                usage = (event.get("usage") or {}).get("completion_tokens", usage)
                _receive_http(call, event.get("choices", ()))
                num_events -= 1
            if num_events <= 0:
                call.end(CANCELLED)
                return
    call.end(BROKEN)


def status_of(response: httpx.Response) -> str:
    """Return the status of an error; with what it lacks, unless it is typed as the API's are."""
    status = str(response.status_code)
    if not response.headers.get("content-type", "").startswith("application/json"):
        return f"{status} that is not typed"
    if status == "503" and "retry-after" not in response.headers:
        return f"{status} without Retry-After"
    return status


def _receive_http(call: Call, choices: Sequence[dict[str, object]]) -> None:
    for choice in choices:
        token_ids = choice.get("token_ids") or ()
        assert isinstance(token_ids, list | tuple)
        call.receive(0, token_ids, ends_choice=choice.get("finish_reason") is not None)


_KINDS: tuple[tuple[str, Ask], ...] = (
    ("grpc stream", _stream),
    ("grpc stream", _stream),
    ("grpc unary", _unary),
    ("grpc cancelled", _cancel),
    ("grpc slow reader", _read_slowly),
    (HAS_DEADLINE, _with_deadline),
    ("http stream", _http_stream),
    ("http vanished", _http_vanish),
)


class ProcessTree(Protocol):
    """The processes of a service: those below one process, or those of several nodes."""

    def children(self, recursive: bool = False) -> list[psutil.Process]:
        """Return the living processes."""


def processes(root: ProcessTree, name: str) -> list[psutil.Process]:
    """Return the living processes below `root` with this actor name."""
    return [each for each in root.children(recursive=True) if name in _command_of(each)]


def _command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return ""
