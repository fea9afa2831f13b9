# Modules: cluster.api.front_ends.fork_server, cluster.api.front_ends.process
"""Orders that fail. For forks see test_front_ends."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from cluster.api.front_ends import fork_server as module
from cluster.api.front_ends.fork_server import FORK, WAIT, ForkedProcess, ForkServer
from cluster.api.front_ends.process import fork_front_ends
from specdec.types.errors import UnsupportedModelError


def unreadable():
    raise UnsupportedModelError("no tokenizer")


def test_orders_that_cannot_be_executed_are_answered():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        socket.send_fds(ours, [FORK.encode()], [0])  # the others were lost on the way
        ours.send(f"{WAIT} 1".encode())  # no child of this process
        ours.shutdown(socket.SHUT_WR)
        assert fork_front_ends(theirs) is None
        assert b"too many open files" in ours.recv(100)
        assert ours.recv(100) == b"unknown, of an earlier process"


@pytest.mark.parametrize(
    ("make_tokenizer", "error"), [(lambda: b"", OSError), (unreadable, UnsupportedModelError)]
)
async def test_a_front_end_that_cannot_be_forked_is_an_error(monkeypatch, make_tokenizer, error):
    monkeypatch.setattr(sys, "executable", "/bin/false")  # ends at once
    server = ForkServer(0, make_tokenizer)
    for _ in range(2):
        with pytest.raises(error):
            await server.fork(0, 0)
    await server.close()


async def test_a_process_that_does_not_answer_is_killed(monkeypatch):
    monkeypatch.setattr(module, "_ANSWER_S", 0.05)
    monkeypatch.setattr(ForkServer, "_start", stopped)
    server = ForkServer(0, lambda: b"")
    with pytest.raises(TimeoutError):
        await server.fork(0, 0)
    assert server._process.wait() == -signal.SIGKILL
    await server.close()


def stopped(server):
    """Start a process that executes no order."""
    server._control, server.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server._control.settimeout(module._ANSWER_S)
    server._process = subprocess.Popen(["/bin/sleep", "60"])


async def test_a_front_end_that_does_not_end_is_killed(monkeypatch):
    monkeypatch.setattr(module, "_STOP_S", 0.05)
    process = subprocess.Popen(["/bin/sleep", "60"])
    descriptor = os.pidfd_open(process.pid)
    await ForkedProcess(process.pid, descriptor).ended()
    assert process.wait() == -signal.SIGKILL
    os.close(descriptor)
