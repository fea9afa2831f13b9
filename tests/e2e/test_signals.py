"""Every end of the real service, while it starts and when it is ready, leaves no process alive."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil
import pytest

from cluster.serve.guard import EXIT_LOST
from specdec.client import Client, ClientError
from specdec.types.sampling.sampling_params import SamplingParams
from tests.chaos.traffic import processes
from tests.e2e.conftest import START_TIMEOUT_S, free_ports

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="guards exist on Linux only"),
]

END_TIMEOUT_S = 60.0
READY = "press Ctrl-C to stop"
NUM_STREAMS = 24
NOT_READY = "before the service was ready"


@dataclass(frozen=True)
class Service:
    command: subprocess.Popen
    log: Path
    known: set[int] = field(default_factory=set)  # also the guard, whose environment is empty

    def wait_for(self, sign):
        """Wait for a text in the log, or for a process whose command line has it."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while sign not in self.log.read_text():
            assert self.command.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            if processes(psutil.Process(self.command.pid), sign):
                break
            time.sleep(0.05)
        self.known.update(self.processes())

    def processes(self):
        """Return its processes, found by their environment, and by descent from the command."""
        mark = str(self.log).encode()
        found = {each.pid for each in psutil.process_iter() if mark in environment(each.pid)}
        with suppress(psutil.NoSuchProcess):
            found |= {each.pid for each in psutil.Process(self.command.pid).children(True)}
        return found

    def end(self):
        """Return the exit code and the last line; assert that no process is left."""
        started = self.known | self.processes()
        exit_code = self.command.wait(END_TIMEOUT_S)
        deadline = time.monotonic() + END_TIMEOUT_S  # a killed command waits for nothing
        while left := [pid for pid in started | self.processes() if is_alive(pid)]:
            assert time.monotonic() < deadline, [psutil.Process(pid).cmdline() for pid in left]
            time.sleep(0.05)
        return exit_code, self.log.read_text().splitlines()[-1]


def environment(pid):
    with suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def is_alive(pid):
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@contextmanager
def starting(model: Path, log: Path, *flags: str) -> Iterator[Service]:
    """Start the service; kill what is left of it at the end."""
    grpc_port, http_port = free_ports(2)
    ports = ["--grpc-port", str(grpc_port), "--http-port", str(http_port)]
    state = ["--state-dir", str(log.parent / "state")]
    command = [sys.executable, "-m", "cluster", "serve", "--model", str(model)]
    with log.open("wb") as output:
        popen = subprocess.Popen(
            [*command, *ports, *state, *flags],
            stdout=output,
            stderr=output,
            env=os.environ | {"MARK": str(log)},
            start_new_session=True,
        )
    service = Service(popen, log)
    try:
        yield service
    finally:
        for pid in {popen.pid, *service.known, *service.processes()}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        popen.wait()


@pytest.mark.parametrize(
    ("number", "exit_code", "sign", "count"),
    [
        (signal.SIGINT, 130, "starting Ray", 1),
        (signal.SIGTERM, 143, "gcs_server", 1),
        (signal.SIGINT, 130, "raylet/raylet", 2),
        (signal.SIGHUP, 129, "ray::ServeController", 1),
        (signal.SIGTERM, 143, "loading", 1),
        (signal.SIGINT, 130, ":Router", 1),
        (signal.SIGINT, 130, "ray::TargetWorker", 2),
    ],
)
def test_a_signal_while_it_starts(tiny_model_dir, tmp_path, number, exit_code, sign, count):
    with starting(tiny_model_dir, tmp_path / "log") as service:
        service.wait_for(sign)
        for _ in range(count):
            service.command.send_signal(number)
            time.sleep(0.1)
        line = f"stopped by {number.name} {NOT_READY}"
        assert service.end() == (exit_code, line)
        assert "Traceback" not in service.log.read_text()


@pytest.mark.parametrize("sign", ["gcs_server", "ray::TargetWorker", READY])
def test_a_killed_command(tiny_model_dir, tmp_path, sign):
    with starting(tiny_model_dir, tmp_path / "log") as service:
        service.wait_for(sign)
        service.command.kill()
        line = "error: the command was killed, so the service has ended"
        assert service.end() == (-signal.SIGKILL, line)


def test_the_command_and_its_guard_load_neither_ray_nor_torch(tiny_model_dir, tmp_path):
    with starting(tiny_model_dir, tmp_path / "log") as service:
        service.wait_for("loading")
        command = psutil.Process(service.command.pid)
        [guard] = command.children()
        for process in (command, guard):
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            assert not any(each in maps for each in ("_raylet", "libtorch", "numpy"))
            assert process.num_threads() == 1
        assert "Ray" not in " ".join(guard.cmdline())
        service.command.send_signal(signal.SIGHUP)
        assert service.end()[0] == 129


LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True, n=8)
DRAIN_S = 0.5


def end_of(pool, client):
    """Start a long stream; return the future of the error that ends it, if one does."""
    stream = client.generate_stream("The river", LONG, resume=False)
    next(stream)

    def read():
        try:
            list(stream)
        except ClientError as error:
            return error
        return None

    return pool.submit(read)


@contextmanager
def serving_streams(model: Path, log: Path):
    """Run a service with a short drain and streams that take longer."""
    with starting(model, log, "--drain-timeout-s", str(DRAIN_S)) as service:
        service.wait_for(READY)
        address = service.log.read_text().partition("gRPC  ")[2].split()[0]
        with Client(address, timeout_s=60) as client, ThreadPoolExecutor(NUM_STREAMS) as pool:
            yield service, [end_of(pool, client) for _ in range(NUM_STREAMS)]


def test_a_drain_that_takes_too_long(tiny_model_dir, tmp_path):
    with serving_streams(tiny_model_dir, tmp_path / "log") as (service, ends):
        started_at = time.monotonic()
        service.command.terminate()
        assert service.end()[0] == 0
        assert time.monotonic() - started_at > DRAIN_S
        errors = [error for end in ends if (error := end.result()) is not None]
        assert errors, "every stream was complete in time"
        assert all(error.code is grpc.StatusCode.UNAVAILABLE for error in errors)
        assert all("stopped before the answer was complete" in str(error) for error in errors)


@pytest.mark.parametrize("name", ["every process", "ServeController", "Router", "gcs_server"])
def test_a_stop_with_processes_that_have_ended(tiny_model_dir, tmp_path, name):
    """A process manager may have signalled or killed any of them."""
    with serving_streams(tiny_model_dir, tmp_path / "log") as (service, _):
        for each in psutil.Process(service.command.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if name == "every process":
                    each.terminate()
                elif name in " ".join(each.cmdline()):
                    each.kill()
        service.command.terminate()
        exit_code, line = service.end()
        assert exit_code in (0, 143)
        assert exit_code == 0 or "while the service stopped" in line or "did not stop" in line


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_the_end_of_ray_ends_the_service_with_the_reason(tiny_model_dir, tmp_path, name):
    """A private Ray does not survive it; systemd and Compose restart the service."""
    with serving_streams(tiny_model_dir, tmp_path / "log") as (service, ends):
        [lost] = [
            each
            for each in psutil.Process(service.command.pid).children(recursive=True)
            if each.name() == name
        ]
        lost.kill()
        exit_code, line = service.end()
        assert exit_code == EXIT_LOST
        assert line.startswith(f"error: Ray's {name} (process {lost.pid})")
        assert line.endswith("so the service has ended")
        assert {error.code for end in ends if (error := end.result())} <= {
            grpc.StatusCode.UNAVAILABLE
        }
