import mmap
import os
import re
import socket
import threading
import time
from pathlib import Path

import pytest

from specdec.kernels.cpu.region import shared_region
from tests.specdec.processes import results, run_processes

NOBODY = 65534


def write_and_read(rank, size, directory):
    with shared_region(rank, size, 4096, directory / "address", 30) as region:
        memory = mmap.mmap(region, 4096)
        assert memory[rank] == 0
        memory[rank] = rank + 1
    named = [path for path in Path("/dev/shm").iterdir() if "specdec" in path.name]
    return memory[:size], named, os.fstat(region).st_nlink


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_see_the_same_memory_and_nobody_else_finds_it(tmp_path, size):
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


def test_no_rank_can_take_the_memory_away(tmp_path):
    results(run_processes(2, shrink, tmp_path))


def end_early(rank, size, directory):
    with shared_region(rank, size, 4096, directory / "address", 30):
        if rank == 1:
            os._exit(1)


def test_a_rank_that_ends_before_all_are_there_is_an_error(tmp_path):
    outcomes = run_processes(3, end_early, tmp_path)
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, RuntimeError | ConnectionError), outcomes[rank]


@pytest.mark.parametrize("rank", [0, 1])
def test_nobody_is_waited_for_for_ever(tmp_path, rank):
    began_at = time.monotonic()
    with pytest.raises(TimeoutError), shared_region(rank, 2, 4096, tmp_path / "address", 0.2):
        pytest.fail("it is alone")
    assert time.monotonic() - began_at < 5


def as_nobody(work):
    """Runs `work` in a process of another user; its exit code."""
    if (pid := os.fork()) == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        os._exit(work())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def open_to_all(tmp_path):
    """An address in a directory that another user may enter and write to."""
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    directory = Path("/tmp") / f"specdec-test-{os.getpid()}-{time.monotonic_ns()}"
    directory.mkdir()
    directory.chmod(0o777)
    yield directory / "address"
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()


def test_another_user_gets_nothing(open_to_all):
    failures = []

    def be_first():
        try:
            with shared_region(0, 2, 4096, open_to_all, 3):
                failures.append("somebody was let in")
        except TimeoutError:
            pass

    def knock():
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(open_to_all))
        connection.settimeout(2)
        return 0 if connection.recv(1) == b"" else 1

    first = threading.Thread(target=be_first)
    first.start()
    while not open_to_all.exists():
        time.sleep(0.01)
    open_to_all.chmod(0o777)
    time.sleep(0.1)
    assert as_nobody(knock) == 0
    first.join()
    assert failures == []


def test_another_user_is_not_believed(open_to_all):
    def pretend():
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(open_to_all))
        open_to_all.chmod(0o777)
        server.listen()
        server.accept()
        time.sleep(0.5)
        return 0

    first = threading.Thread(target=as_nobody, args=(pretend,))
    first.start()
    message = re.escape(f"{open_to_all} belongs to user {NOBODY}, not to 0")
    with (
        pytest.raises(PermissionError, match=message),
        shared_region(1, 2, 4096, open_to_all, 10),
    ):
        pytest.fail("it was believed")
    first.join()
