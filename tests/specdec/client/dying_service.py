"""A service in its own process that streams slowly, and the ways in which clients lose it.

`python -m tests.specdec.client.dying_service` prints its port. After SIGTERM it ends streams and
refuses calls for a while, as a service that drains does, and then stops.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime

import grpc

from protos.specdec.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from specdec.client.codec.admin import FLEET
from specdec.types.control import SpeculationControl, SpeculationState
from specdec.types.reports.fleet import FleetStatistics, ServiceStatus
from specdec.types.reports.stats import Counts

INTERVAL_S = 0.05
DRAIN_S = 2.0
ENDS = ("stops", "killed", "frozen", "network gone")
_CONTROL = SpeculationControl("auto", 4, 3)
_STATE = SpeculationState(_CONTROL, _CONTROL, _CONTROL, (), 0, None, "", "")
NO_REPLICAS = FLEET.encode(
    FleetStatistics(datetime.now(UTC), ServiceStatus((), _STATE, 0), 0.0, Counts())
)
_SIGNALS = {"stops": signal.SIGTERM, "killed": signal.SIGKILL, "frozen": signal.SIGSTOP}


class Dying(inference_pb2_grpc.InferenceServiceServicer, admin_pb2_grpc.AdminServiceServicer):
    """Streams without an end; other calls are never answered, until the service drains."""

    def __init__(self):
        self.draining = asyncio.Event()

    def _refuse(self, context):
        context.set_code(grpc.StatusCode.UNAVAILABLE)
        context.set_details("the service is stopping")

    async def GenerateStream(self, request, context):  # noqa: N802
        num_tokens = len(request.resume_token_ids)
        while not self.draining.is_set():
            yield inference_pb2.GenerateStreamResponse(
                request_id="r", seed=1, text=f"{num_tokens} ", token_ids=[num_tokens]
            )
            num_tokens += 1
            await asyncio.sleep(INTERVAL_S)
        self._refuse(context)

    async def Generate(self, request, context):  # noqa: N802
        await self.draining.wait()
        self._refuse(context)
        return inference_pb2.GenerateResponse()

    async def GetStatus(self, request, context):  # noqa: N802
        await self.draining.wait()
        self._refuse(context)
        return admin_pb2.GetStatusResponse()

    async def WatchStats(self, request, context):  # noqa: N802
        while not self.draining.is_set():
            yield NO_REPLICAS
            await asyncio.sleep(INTERVAL_S)
        self._refuse(context)


async def serve():
    server, servicer = grpc.aio.server(), Dying()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, servicer.draining.set)
    print(port, flush=True)
    await servicer.draining.wait()
    await asyncio.sleep(DRAIN_S)
    await server.stop(DRAIN_S)


class Network:
    """A TCP forwarder that can stop forwarding without closing a connection."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._gone = threading.Event()
        self._sockets = [socket.create_server(("127.0.0.1", 0))]
        self.port: int = self._sockets[0].getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def vanish(self) -> None:
        self._gone.set()

    def close(self) -> None:
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._sockets[0].accept()
                self._sockets.append(client)
                if self._gone.is_set():
                    continue
                try:
                    service = socket.create_connection(("127.0.0.1", self._port))
                except ConnectionRefusedError:
                    client.close()
                    continue
                self._sockets.append(service)
                for ends in ((client, service), (service, client)):
                    threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if not self._gone.is_set():
                    sink.sendall(data)
        with suppress(OSError):
            if not self._gone.is_set():
                sink.shutdown(socket.SHUT_RDWR)


class Service:
    """The running service: `address`, and `lose`, which ends it in one of `ENDS`."""

    def __init__(self, process: subprocess.Popen[str], network: Network) -> None:
        self.address = f"127.0.0.1:{network.port}"
        self._process = process
        self._network = network

    def lose(self, end: str) -> None:
        if end in _SIGNALS:
            self._process.send_signal(_SIGNALS[end])
        else:
            self._network.vanish()


@contextmanager
def dying_service() -> Iterator[Service]:
    command = [sys.executable, "-m", "tests.specdec.client.dying_service"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        network = Network(int(process.stdout.readline()))
        yield Service(process, network)
        network.close()
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    asyncio.run(serve())
