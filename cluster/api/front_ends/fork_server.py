"""The Router's end of the process that its front ends are forked from (`process`).

Orders and answers are packets of a socket pair. "fork" has the descriptors of a channel, of a
listening socket and of memory with the pickled tokenizer; its answer is the pid of a front end with
a descriptor of its process, or the reason of a failure without one. "wait" has the pid of a front
end that has ended; its answer is the exit status.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

logger = logging.getLogger(__name__)

FORK, WAIT = "fork", "wait"
MAX_PACKET_BYTES = 512

_RESTART_S = 1.0
_STOP_S = 10.0
_ANSWER_S = 60.0
"""Limit of an answer; the first one includes imports and the tokenizer, which take seconds."""
_SINGLE_THREADED = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1"}
"""No library may start a thread before the fork, nor does a front end have work for several."""


@dataclass(frozen=True)
class ForkedProcess:
    """The process of a front end. descriptor: its pidfd, which `ForkServer.ended` closes."""

    pid: int
    descriptor: int

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)

    async def ended(self) -> None:
        """Wait for its end, and kill it if that does not come."""
        loop, has_ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self.descriptor, has_ended.set)
        try:
            async with asyncio.timeout(_STOP_S):
                await has_ended.wait()
        except TimeoutError:
            self.kill()
            await has_ended.wait()
        finally:
            loop.remove_reader(self.descriptor)


class ForkServer:
    """Starts that process when a front end is needed first, and again when it has ended.

    Front ends do not end with it, but with the Router.
    """

    def __init__(self, counters: int, make_tokenizer: Callable[[], bytes]) -> None:
        """counters: descriptor of SharedCounters. make_tokenizer: returns a pickled Tokenizer."""
        self._counters = counters
        self._make_tokenizer = make_tokenizer
        self._tokenizer: int | None = None  # descriptor of memory that holds it
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at_s = 0.0
        self._control = socket.socket()
        self._lock = asyncio.Lock()

    async def fork(self, channel: int, http: int) -> ForkedProcess:
        """Start a front end. Raises OSError, and SpecdecError if there is no tokenizer."""
        async with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            if self._tokenizer is None:  # while the process imports its modules
                self._tokenizer = await asyncio.to_thread(_in_memory, self._make_tokenizer)
            descriptors = channel, http, self._tokenizer
            answer, [*process] = await asyncio.to_thread(self._ask, FORK, *descriptors)
        if not process:
            raise OSError(answer)
        return ForkedProcess(int(answer), process[0])

    async def ended(self, process: ForkedProcess) -> str:
        """Wait for the end of a front end, and return its exit status."""
        await process.ended()
        try:
            async with self._lock:
                status, _ = await asyncio.to_thread(self._ask, f"{WAIT} {process.pid}")
        except OSError as error:
            status = f"unknown, {error}"
        os.close(process.descriptor)
        return status

    def restart_if_ended(self) -> None:
        """Start the process again if it has ended, soon; an order starts it at once."""
        process = self._process
        if process is None or process.poll() is None or self._lock.locked():
            return
        if time.monotonic() > self._started_at_s + _RESTART_S:
            logger.warning("the process that forks front ends has ended: %s", process.returncode)
            with suppress(OSError):
                self._start()

    def kill(self) -> None:
        """End the process, and an order that waits for its answer."""
        if self._process is not None:
            self._process.kill()

    async def close(self) -> None:
        """End the process."""
        self.kill()
        async with self._lock:
            self._control.close()
            if self._process is not None:
                await asyncio.to_thread(self._process.wait)
            if self._tokenizer is not None:
                os.close(self._tokenizer)

    def _start(self) -> None:
        self._started_at_s = time.monotonic()
        self._control.close()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_ANSWER_S)
        descriptors = theirs.fileno(), self._counters
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "cluster.api.front_ends.process", *map(str, descriptors)],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **_SINGLE_THREADED, "PYTHONPATH": os.pathsep.join(sys.path)},
            )

    def _ask(self, order: str, *descriptors: int) -> tuple[str, list[int]]:
        """Return the answer to an order. Raises OSError if none comes, and ends the process."""
        try:
            socket.send_fds(self._control, [order.encode()], descriptors)
            answer, received, *_ = socket.recv_fds(self._control, MAX_PACKET_BYTES, 1)
            if not answer:
                raise ConnectionResetError("the process that forks front ends has ended")
        except OSError:
            self.kill()
            raise
        return answer.decode(), received


def _in_memory(make: Callable[[], bytes]) -> int:
    """Return the descriptor of memory that holds what `make` returns."""
    content = make()
    descriptor = os.memfd_create("tokenizer")
    with open(descriptor, "wb", closefd=False) as memory:
        memory.write(content)
    return descriptor
