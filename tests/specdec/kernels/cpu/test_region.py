import mmap
import os
import re
import socket
import threading
import time
from pathlib import Path

import pytest

from specdec.kernels.cpu.shared_memory import shared_region
from tests.specdec.processes import results, run_processes

OTHER_USER = 65534


def write_and_read(rank, size, directory):
    with shared_region(rank, size, 4096, directory / "address", 30) as region:
        memory = mmap.mmap(region, 4096)
        assert memory[rank] == 0
        memory[rank] = rank + 1
    named = [path for path in Path("/dev/shm").iterdir() if "specdec" in path.name]
    return memory[:size], named, os.fstat(region).st_nlink


@pytest.mark.parametrize("size", [2, 3])
def test_region_is_shared_by_ranks_and_has_no_name(tmp_path, size):
    for seen, named, num_links in results(run_processes(size, write_and_read, tmp_path)):
        assert seen == bytes(range(1, size + 1))
        assert named == []
        assert num_links == 0


def shrink(rank, size, directory):
    with (
        shared_region(rank, size, 4096, directory / "address", 30) as region,
        pytest.raises(PermissionError),
    ):
        os.truncate(region, 0)


def test_region_cannot_be_truncated(tmp_path):
    results(run_processes(2, shrink, tmp_path))


def end_early(rank, size, directory):
    with shared_region(rank, size, 4096, directory / "address", 30):
        if rank == 1:
            os._exit(1)


def test_rank_that_ends_early_is_an_error(tmp_path):
    outcomes = run_processes(3, end_early, tmp_path)
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, RuntimeError | ConnectionError), outcomes[rank]


@pytest.mark.parametrize("rank", [0, 1])
def test_missing_rank_times_out(tmp_path, rank):
    with pytest.raises(TimeoutError), shared_region(rank, 2, 4096, tmp_path / "address", 0.2):
        pytest.fail("entered the context alone")


def run_as_other_user(work):
    """Run `work` in a process of another user; return its exit code."""
    if (pid := os.fork()) == 0:
        os.setgroups([])
        os.setgid(OTHER_USER)
        os.setuid(OTHER_USER)
        os._exit(work())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def world_writable_address(tmp_path):
    """Yield an address in a directory that other users can enter and write to."""
    if os.geteuid() != 0:
        pytest.skip("only root can change its user")
    directory = Path("/tmp") / f"specdec-test-{os.getpid()}-{time.monotonic_ns()}"
    directory.mkdir()
    directory.chmod(0o777)
    yield directory / "address"
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()


def test_server_rejects_another_user(world_writable_address):
    failures = []

    def serve():
        try:
            with shared_region(0, 2, 4096, world_writable_address, 3):
                failures.append("another user was accepted")
        except TimeoutError:
            pass

    def connect():
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(world_writable_address))
        connection.settimeout(30)
        return 0 if connection.recv(1) == b"" else 1

    first = threading.Thread(target=serve)
    first.start()
    while not world_writable_address.exists():
        time.sleep(0.01)
    world_writable_address.chmod(0o777)
    time.sleep(0.1)
    assert run_as_other_user(connect) == 0
    first.join()
    assert failures == []


def test_client_rejects_another_user(world_writable_address):
    def listen():
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(world_writable_address))
        world_writable_address.chmod(0o777)
        server.listen()
        server.accept()
        time.sleep(0.5)
        return 0

    first = threading.Thread(target=run_as_other_user, args=(listen,))
    first.start()
    message = re.escape(f"{world_writable_address} belongs to user {OTHER_USER}, not to 0")
    with (
        pytest.raises(PermissionError, match=message),
        shared_region(1, 2, 4096, world_writable_address, 10),
    ):
        pytest.fail("another user was accepted")
    first.join()
