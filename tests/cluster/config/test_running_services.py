"""The files by which commands find the services of this user."""

import json
import os
import threading
from contextlib import contextmanager
from dataclasses import asdict, replace
from socketserver import BaseRequestHandler, ThreadingTCPServer

import psutil
import pytest

from cluster.config.running_services import (
    RunningService,
    recorded,
    running_services,
    services_dir,
    started_at_s,
)
from tests.cluster.cli.conftest import run_cli
from tests.specdec.client.fake_service import FakeService, running


class Refuses(BaseRequestHandler):
    def handle(self):
        self.request.recv(1024)
        self.request.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")


@contextmanager
def http_port():
    """Yield the address of a server that refuses what is no HTTP/1.1, as the service's does."""
    server = ThreadingTCPServer(("127.0.0.1", 0), Refuses)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def service(monkeypatch, tmp_path):
    """Return a service of this process, in a directory of the test."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return RunningService.of_this_process("127.0.0.1:9009", "127.0.0.1:8009", ("tiny", "b"))


def test_a_service_is_listed_until_it_ends(service):
    assert running_services() == []
    with recorded(service):
        assert running_services() == [service]
        [path] = services_dir().iterdir()
        assert (path.stat().st_mode & 0o777, services_dir().stat().st_mode & 0o777) == (
            0o600,
            0o700,
        )
    assert running_services() == list(services_dir().iterdir()) == []


@pytest.mark.parametrize(
    "changes",
    [{"pid": 2**22 + 1}, {"started_at_s": 1.0}, {"boot": "another"}],
    ids=["ended", "another process", "another boot"],
)
def test_a_service_that_was_killed_is_forgotten(service, changes):
    with recorded(replace(service, **changes)):
        assert running_services() == []
        assert list(services_dir().iterdir()) == []


def test_a_service_is_listed_after_the_clock_was_set(service, monkeypatch):
    """As at a boot, before the time of the network is known. The system's times follow it."""
    created_at_s, boot_at_s = psutil.Process().create_time(), psutil.boot_time()
    with recorded(service):
        monkeypatch.setattr(psutil.Process, "create_time", lambda self: created_at_s + 3600)
        monkeypatch.setattr(psutil, "boot_time", lambda: boot_at_s + 3600)
        assert running_services() == [service]


def test_the_file_of_a_former_version_is_read(service):
    """As it is after an upgrade, while the service goes on."""
    fields = asdict(replace(service, started_at_s=psutil.Process().create_time()))
    del fields["boot"]
    services_dir().mkdir(mode=0o700, parents=True)
    (services_dir() / f"{service.pid}.json").write_text(json.dumps(fields))
    assert [each.grpc_address for each in running_services()] == [service.grpc_address]


@pytest.mark.parametrize("text", ["", "[]", '{"pid": 1}', "[" * 4000])
def test_other_files_are_removed(service, text):
    services_dir().mkdir(mode=0o700, parents=True)
    (services_dir() / "1.json").write_text(text)
    assert running_services() == list(services_dir().iterdir()) == []


def test_a_directory_that_others_can_write_is_not_used(service):
    with recorded(service):
        services_dir().chmod(0o777)
        assert running_services() == []
    with pytest.raises(PermissionError, match="written by others"), recorded(service):
        pass


def test_the_directory_without_a_runtime_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path))
    assert services_dir() == tmp_path / "services"


def test_commands_call_the_only_service(service):
    with running(FakeService()) as fake:
        with recorded(replace(service, grpc_address=fake.address)):
            assert run_cli("generate", "Why?").exit_code == 0
        assert len(fake.requests) == 1
        assert "127.0.0.1:9000" in run_cli("generate", "--timeout", "0.5", "Why?").stderr


def test_several_services_have_to_be_named(service):
    pid = os.getppid()
    other = replace(service, pid=pid, started_at_s=started_at_s(pid, service.boot))
    with recorded(service), recorded(replace(other, grpc_address="127.0.0.1:9010")):
        result = run_cli("generate", "Why?")
    assert result.exit_code == 2
    services = ("tiny, b at 127.0.0.1:9009", "tiny, b at 127.0.0.1:9010")
    assert all(each in result.stderr for each in services), result.stderr
    with recorded(service), recorded(replace(other, grpc_address="127.0.0.1:9000")):
        assert "127.0.0.1:9000" in run_cli("generate", "--timeout", "0.5", "Why?").stderr


def test_the_http_port_is_answered_with_the_right_one(service):
    with http_port() as address:
        result = run_cli("generate", "--address", address, "Why?")
        text = f"{address} is an HTTP port; use that of the gRPC API, 9000 by default"
        assert (result.exit_code, result.stderr) == (1, f"error: {text}\n")
        with recorded(replace(service, http_address=address)):
            result = run_cli("generate", "--address", address, "Why?")
        assert result.stderr == f"error: {address} is the HTTP port; use 127.0.0.1:9009\n"
