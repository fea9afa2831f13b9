"""A fake replica, and a picker in this process that is called over gRPC as Envoy does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict

from cluster.api.endpoint_picker.exchange import DESTINATION
from cluster.api.endpoint_picker.scraper import ScrapeConfig
from cluster.api.endpoint_picker.server import SERVICE, PickerConfig, PickerServer
from protos.ext_proc import external_processor_pb2 as pb
from tests.cluster.http_server import running_server
from tests.waiting import eventually

INTERVAL_S = 0.02


@dataclass
class FakeReplica:
    """An HTTP server with the metrics of the model server protocol, and without a model."""

    waiting: int = 0
    models: tuple[str, ...] | None = ("m",)
    ready_status: int = 200
    delay_s: float = 0.0
    metrics: str = "vllm:num_requests_running 0\nvllm:num_requests_waiting {waiting}\n"
    set_cookie: str = ""
    address: str = ""
    may_answer: asyncio.Event | None = None
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, as ASGI has it."""
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.requests.append((scope["path"], scope["query_string"].decode(), headers))
        await asyncio.sleep(self.delay_s)
        if self.may_answer is not None:
            await self.may_answer.wait()
        status, body = self._answer(scope["path"])
        headers = [(b"set-cookie", self.set_cookie.encode())] if self.set_cookie else []
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body.encode()})

    def _answer(self, path: str) -> tuple[int, str]:
        if path == "/v1/models" and self.models is not None:
            cards = [{"id": name, "parent": "m" if name != "m" else None} for name in self.models]
            return 200, json.dumps({"data": cards})
        if path == "/ready":
            return self.ready_status, ""
        if path == "/metrics/replica":
            return 200, self.metrics.replace("{waiting}", str(self.waiting))
        return 404, ""

    @asynccontextmanager
    async def running(self, **options: Any) -> AsyncIterator[FakeReplica]:
        async with running_server(self, **options) as port:
            self.address = f"127.0.0.1:{port}"
            yield self


@dataclass(frozen=True)
class Picking:
    """A running picker, and a channel to it."""

    server: PickerServer
    channel: grpc.aio.Channel

    async def pick(self, body: dict[str, Any] | None = None) -> str | int:
        """Send a request and end it; return its endpoint, or the status of a refusal."""
        async with self.stream() as stream:
            return await chosen(stream, body)

    def call(self) -> Any:
        """Begin the stream of one HTTP request."""
        return self.channel.stream_stream(
            f"/{SERVICE}/Process",
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )()

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[Any]:
        """Yield the stream of one HTTP request."""
        call = self.call()
        yield call
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass

    async def until_up(self, *addresses: str) -> None:
        """Wait until exactly these endpoints are up."""
        endpoints = self.server.pool.endpoints
        await eventually(
            lambda: {each.address for each in endpoints if each.is_up} == set(addresses)
        )


async def chosen(stream: Any, body: dict[str, Any] | None = None) -> str | int:
    """Send a request in full duplex; return its endpoint, or the status of a refusal."""
    await stream.write(pb.ProcessingRequest(request_headers=pb.HttpHeaders()))
    return await chosen_after_headers(stream, body)


async def chosen_after_headers(stream: Any, body: dict[str, Any] | None = None) -> str | int:
    """Send the body of a request whose headers are sent."""
    data = json.dumps(body or {"model": "m", "prompt": "x"}).encode()
    await stream.write(
        pb.ProcessingRequest(request_body=pb.HttpBody(body=data, end_of_stream=True))
    )
    answer = await stream.read()
    if answer.HasField("immediate_response"):
        return int(answer.immediate_response.status.code)
    assert (await stream.read()).HasField("request_body")
    return str(MessageToDict(answer.dynamic_metadata)["envoy.lb"][DESTINATION])


@asynccontextmanager
async def running_picker(config: PickerConfig, **credentials: Any) -> AsyncIterator[Picking]:
    """Run a picker on a free port. credentials: of a secure channel."""
    server = PickerServer(replace(config, port=0))
    try:
        await server.start()
        target = f"localhost:{server.port}"
        make = grpc.aio.secure_channel if credentials else grpc.aio.insecure_channel
        async with make(target, **credentials) as channel:
            yield Picking(server, channel)
    finally:
        await server.close()


@asynccontextmanager
async def picking(*replicas: FakeReplica, **settings: Any) -> AsyncIterator[Picking]:
    """Run replicas and a picker of them; wait until all are up."""
    async with AsyncExitStack() as stack:
        for each in replicas:
            await stack.enter_async_context(each.running())
        addresses = tuple(each.address for each in replicas)
        settings = {"scrape": ScrapeConfig(INTERVAL_S), **settings}
        config = PickerConfig(endpoints=addresses, **settings)
        found = await stack.enter_async_context(running_picker(config))
        await found.until_up(*addresses)
        yield found
