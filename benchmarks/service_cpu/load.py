"""Closed-loop loads on the service, by client processes that are cheap beside it.

HTTP is read by an asyncio protocol on uvloop, gRPC by raw bytes without decoding; a client process
is one gRPC connection. Prompts are random token ids by a seed, and requests are encoded before a
load begins.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Literal, NamedTuple, cast
from urllib.parse import urlsplit

import grpc
import uvloop

from protos.specdec.v1 import inference_pb2

Api = Literal["sse", "grpc", "http-whole", "grpc-whole"]
MODEL_NAME = "clocked"
NUM_PROCESSES = 2
_PREPARE_S = 1.0  # for a client process to encode its requests
_LAST_CHUNK = b"0\r\n\r\n"
_FIRST_PROMPT_TOKEN, _LAST_PROMPT_TOKEN = 1000, 40_000


@dataclass(frozen=True)
class Load:
    """A number of streams that are open at all times, until all requests were sent.

    last_prompt_token: prompts have random tokens below it.
    """

    api: Api
    streams: int
    num_requests: int
    max_tokens: int
    prompt_tokens: int = 128
    last_prompt_token: int = _LAST_PROMPT_TOKEN

    @property
    def num_tokens(self) -> int:
        """Output tokens of all requests."""
        return self.num_requests * self.max_tokens

    def prompts(self, seed: int) -> list[list[int]]:
        """Return prompts that no other load has; the prefix cache would find equal ones."""
        generator = random.Random(f"{self.api} {self.streams} {self.max_tokens} {seed}")
        span = range(min(_FIRST_PROMPT_TOKEN, self.last_prompt_token // 2), self.last_prompt_token)
        return [generator.choices(span, k=self.prompt_tokens) for _ in range(self.num_requests)]


class Times(NamedTuple):
    """Times of one request by `time.perf_counter`; a whole answer has one time."""

    sent_at_s: float
    first_at_s: float
    last_at_s: float


class RequestFailedError(Exception):
    """The service answered a request of a load with something else than all of its tokens."""


class LoadGenerator:
    """The client processes; the same ones for all loads."""

    def __init__(self, address: str, http_url: str) -> None:
        """Start no process yet. Addresses: of gRPC and of HTTP."""
        self._address, self._http_url = address, http_url
        self._pool = ProcessPoolExecutor(NUM_PROCESSES, get_context("spawn"))

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown()

    def begin(self, load: Load, seed: int) -> RunningLoad:
        """Have the processes encode their requests, and send them from a common time on."""
        count = min(NUM_PROCESSES, load.streams)
        prompts, starts_at_s = load.prompts(seed), time.perf_counter() + _PREPARE_S
        target = self._address if load.api.startswith("grpc") else self._http_url
        futures = [
            self._pool.submit(_run, target, load, len(own), prompts[own[0] :: count], starts_at_s)
            for own in (range(index, load.streams, count) for index in range(count))
        ]
        return RunningLoad(starts_at_s, futures)


@dataclass(frozen=True)
class RunningLoad:
    """A load that begins at a time."""

    starts_at_s: float
    processes: Sequence[Future[list[Times]]]

    def wait(self) -> list[Times]:
        """Return the times of all requests once they have ended. Raises RequestFailedError."""
        return [times for each in self.processes for times in each.result()]


def _run(
    target: str, load: Load, streams: int, prompts: Sequence[list[int]], starts_at_s: float
) -> list[Times]:
    """Run a process's share of a load."""
    is_grpc = load.api.startswith("grpc")
    encode = _grpc_request if is_grpc else _http_request
    requests = [encode(target, load, prompt) for prompt in prompts]
    run = _run_grpc if is_grpc else _run_http
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run(target, load, streams, requests, starts_at_s))


def _http_request(url: str, load: Load, prompt: list[int]) -> bytes:
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": load.max_tokens,
        "min_tokens": load.max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": load.api == "sse",
    }
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def _grpc_request(address: str, load: Load, prompt: list[int]) -> bytes:
    del address
    request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=prompt))
    request.sampling.temperature = 0
    request.sampling.max_tokens = request.sampling.min_tokens = load.max_tokens
    request.sampling.ignore_eos = True
    return request.SerializeToString()


class _Stream(asyncio.Protocol):
    """One connection, which sends requests of a shared list one after the other."""

    def __init__(self, load: Load, requests: list[bytes], found: list[Times]) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_stream = load.api == "sse"
        self._requests, self._found = requests, found
        self._parts: list[bytes] = []
        self._sent_at_s = self._first_at_s = 0.0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def connection_lost(self, error: Exception | None) -> None:
        """Fail the stream, unless it has ended."""
        if not self.ended.done():
            self.ended.set_exception(error or RequestFailedError("the connection was closed"))

    def send_next(self) -> None:
        """Send a request, or end."""
        assert self._transport is not None, "not connected"
        if not self._requests:
            self.ended.set_result(None)
            self._transport.close()
            return
        self._parts, self._first_at_s = [], 0.0
        self._sent_at_s = time.perf_counter()
        self._transport.write(self._requests.pop())

    def data_received(self, data: bytes) -> None:
        """Note the time of the first token, and of the end."""
        self._parts.append(data)
        if not self._first_at_s and (not self._is_stream or b"data: {" in data):
            self._first_at_s = time.perf_counter()
        if data.endswith(_LAST_CHUNK) if self._is_stream else self._is_whole():
            self._end(time.perf_counter())

    def _is_whole(self) -> bool:
        head, blank, body = b"".join(self._parts).partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
        return bool(blank) and len(body) >= int(length or 0)

    def _end(self, now_s: float) -> None:
        text = b"".join(self._parts)
        if not text.startswith(b"HTTP/1.1 200") or b'"finish_reason":"length"' not in text:
            self.ended.set_exception(RequestFailedError(text[:300].decode(errors="replace")))
            return
        self._found.append(Times(self._sent_at_s, self._first_at_s, now_s))
        self.send_next()


async def _run_http(
    url: str, load: Load, streams: int, requests: list[bytes], starts_at_s: float
) -> list[Times]:
    found: list[Times] = []
    host, _, port = urlsplit(url).netloc.partition(":")
    loop = asyncio.get_running_loop()
    open_streams = []
    for _ in range(streams):
        make = lambda: _Stream(load, requests, found)  # noqa: E731
        open_streams.append((await loop.create_connection(make, host, int(port)))[1])
    await asyncio.sleep(starts_at_s - time.perf_counter())
    for each in open_streams:
        each.send_next()
    await asyncio.gather(*(each.ended for each in open_streams))
    return found


async def _run_grpc(
    address: str, load: Load, streams: int, requests: list[bytes], starts_at_s: float
) -> list[Times]:
    found: list[Times] = []
    async with grpc.aio.insecure_channel(address) as channel:
        await channel.channel_ready()
        service = "/specdec.v1.InferenceService/"
        stream = channel.unary_stream(f"{service}GenerateStream")
        whole = channel.unary_unary(f"{service}Generate")

        async def client() -> None:
            while requests:
                request, sent_at_s, first_at_s = requests.pop(), time.perf_counter(), 0.0
                if load.api == "grpc":
                    async for _ in stream(request):
                        first_at_s = first_at_s or time.perf_counter()
                else:
                    await whole(request)
                now_s = time.perf_counter()
                found.append(Times(sent_at_s, first_at_s or now_s, now_s))

        await asyncio.sleep(starts_at_s - time.perf_counter())
        await asyncio.gather(*(client() for _ in range(streams)))
    return found
