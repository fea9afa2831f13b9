# Modules: specdec.client.attempts, specdec.client.errors
"""Calls of every client to a service that stops, is killed, freezes or vanishes: all of them end.

`pytest -m slow -s tests/specdec/client/test_lost_services.py` prints the figures.
"""

import asyncio
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest

from specdec.client import AdminClient, AsyncClient, Client, ClientError, admin_client
from tests.specdec.client.dying_service import ENDS, dying_service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TIMEOUT_S = 6.0
LATE_S = 1.0
STREAMING_S = 1.0
NUM_ROUNDS, NUM_CALLS = 4, 10  # of each client
HANG_S = 60.0


class Call(threading.Thread):
    """A call on its own thread: its error, and the seconds from its begin to its end."""

    def __init__(self, client, run, address):
        super().__init__(daemon=True)
        self.client, self.error, self.seconds = client, None, None
        self._run, self._address = run, address

    def run(self):
        began_at = time.monotonic()
        try:
            self._run(self._address)
        except ClientError as error:
            self.error = str(error)
        self.seconds = time.monotonic() - began_at


def stream(address):
    with Client(address, timeout_s=TIMEOUT_S) as client:
        for _ in client.generate_stream("Why?"):
            pass


def call(address):
    with Client(address, timeout_s=TIMEOUT_S) as client:
        client.generate("Why?")


def stream_async(address):
    async def run():
        async with AsyncClient(address, timeout_s=TIMEOUT_S) as client:
            async for _ in client.generate_stream("Why?"):
                pass

    asyncio.run(run())


def call_async(address):
    async def run():
        async with AsyncClient(address, timeout_s=TIMEOUT_S) as client:
            await client.generate("Why?")

    asyncio.run(run())


def status(address):
    with AdminClient(address, timeout_s=TIMEOUT_S) as client:
        client.status()


def watch(address):
    with AdminClient(address) as client:
        for _ in client.watch(0.0):
            pass


class CommandLine(Call):
    """`specdec generate --stream`: from its first output to its last line on standard error.

    The start and the end of an interpreter take seconds on a busy machine.
    """

    def __init__(self, address):
        super().__init__("command line", None, address)
        self._has_output = threading.Event()

    def run(self):
        flags = ["--address", self._address, "--timeout", str(TIMEOUT_S), "--stream"]
        with subprocess.Popen(
            [sys.executable, "-m", "cluster", "generate", "Why?", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            guard = threading.Timer(HANG_S, process.kill)
            guard.start()
            process.stdout.read(1)
            began_at = time.monotonic()
            self._has_output.set()
            self.error = ""
            for line in process.stderr:
                ended_at = time.monotonic()
                self.error += line
            if process.wait() == 1:  # otherwise it was killed
                self.seconds = ended_at - began_at
            guard.cancel()

    def wait_for_output(self):
        assert self._has_output.wait(60)


CLIENTS = {each.__name__: each for each in (stream, call, stream_async, call_async, status, watch)}


@pytest.mark.parametrize("end", ENDS)
def test_no_call_outlives_its_deadline(end, monkeypatch):
    monkeypatch.setattr(admin_client, "_STALL_S", TIMEOUT_S)
    calls = [each for _ in range(NUM_ROUNDS) for each in one_round(end)]
    hanging = Counter(each.client for each in calls if each.seconds is None)
    latest = dict.fromkeys((*CLIENTS, "command line"), 0.0)
    for each in calls:
        latest[each.client] = max(latest[each.client], each.seconds or HANG_S)
    longest = {name: round(seconds, 2) for name, seconds in latest.items()}
    print({"end": end, "calls": len(calls), "hangs": sum(hanging.values()), "longest_s": longest})
    assert hanging == Counter()
    for each in calls:
        assert each.error, f"{each.client} ended without a reason"
        # A watch has no deadline: it ends after a time without a message.
        limit_s = TIMEOUT_S + LATE_S + (STREAMING_S if each.client == "watch" else 0.0)
        assert each.seconds <= limit_s, (each.client, each.seconds, each.error)
    if end == "killed":
        assert all("trying again" in each.error for each in calls if type(each) is CommandLine)


def one_round(end):
    with dying_service() as service:
        commands = [CommandLine(service.address) for _ in range(NUM_CALLS)]
        for each in commands:
            each.start()
        for each in commands:
            each.wait_for_output()
        calls = [
            Call(name, run, service.address)
            for name, run in CLIENTS.items()
            for _ in range(NUM_CALLS)
        ]
        for each in calls:
            each.start()
        time.sleep(STREAMING_S)
        service.lose(end)
        for each in (*calls, *commands):
            each.join(HANG_S)
    return [*calls, *commands]
