"""Relay of IP packets between two network namespaces, whose loss and delay can be changed.

It needs the kernel's `tun` devices only, where iptables and netem need modules of their own. As a
program, `python -m tests.e2e.link NAMESPACE NAMESPACE INTERFACE`, it reads a Condition as JSON from
each line of standard input, prints a line when that is in force, and ends with its input.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import secrets
import selectors
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from heapq import heappop, heappush
from itertools import count

_TUNSETIFF = 0x400454CA  # linux/if_tun.h
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_MAX_PACKET_BYTES = 65_536
_MAX_BURST = 64
"""Packets that are read from one end before the other end has its turn."""


@dataclass(frozen=True)
class Condition:
    """Loss and delay of each packet, in both directions.

    loss: probability; 1 is a partition. delay_s: one way. seed: of the losses.
    """

    loss: float = 0.0
    delay_s: float = 0.0
    seed: int = 0


class Link:
    """The program, controlled from another process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._confirm()

    def set(self, condition: Condition) -> None:
        """Return when the condition is in force."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(condition)) + "\n")
        self._process.stdin.flush()
        self._confirm()

    def _confirm(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline(), "the link has ended"


@contextmanager
def link(first: str, second: str, interface: str) -> Iterator[Link]:
    """Connect two namespaces, in each of which the device is called `interface`."""
    command = [sys.executable, "-m", "tests.e2e.link", first, second, interface]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield Link(process)
        finally:
            process.kill()


class Relay:
    """Packets on their way between two devices, the earliest first."""

    def __init__(self, first: int, second: int) -> None:
        """Take the file descriptors of the devices, which do not block."""
        self._other = {first: second, second: first}
        self._numbers = count()
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self.set(Condition())

    def set(self, condition: Condition) -> None:
        """Apply a condition to packets from now on."""
        self._random = random.Random(condition.seed)
        self._condition = condition

    def run(self, commands: int) -> None:
        """Relay until the end of the commands; that is their file descriptor."""
        with selectors.DefaultSelector() as selector:
            for each in (commands, *self._other):
                selector.register(each, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(self._pause_s()):
                    if key.fd != commands:
                        self._receive(key.fd)
                    elif not self._obey(os.read(commands, 4096)):
                        return
                self._send()

    def _pause_s(self) -> float | None:
        return max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None

    def _obey(self, line: bytes) -> bool:
        if line:
            self.set(Condition(**json.loads(line)))
            print("in force", flush=True)
        return bool(line)

    def _receive(self, end: int) -> None:
        for _ in range(_MAX_BURST):
            try:
                packet = os.read(end, _MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            if self._random.random() >= self._condition.loss:
                due_s = time.monotonic() + self._condition.delay_s
                heappush(self._waiting, (due_s, next(self._numbers), self._other[end], packet))

    def _send(self) -> None:
        now_s = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now_s:
            _, _, end, packet = heappop(self._waiting)
            with suppress(OSError):  # a full queue and a device that is down lose packets
                os.write(end, packet)


def _device(namespace: str, interface: str) -> int:
    """Make a device and move it into a namespace; return its file descriptor."""
    name = f"sd{secrets.token_hex(4)}"
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    command = ["ip", "link", "set", name, "netns", namespace, "name", interface]
    subprocess.run(command, check=True)
    return device


if __name__ == "__main__":
    *namespaces, interface = sys.argv[1:]
    first, second = (_device(each, interface) for each in namespaces)
    print("ready", flush=True)
    Relay(first, second).run(sys.stdin.fileno())
