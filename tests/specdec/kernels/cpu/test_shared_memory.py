import os
import random
import signal
import time
from functools import reduce

import pytest
import torch
import torch.distributed as dist

from specdec.kernels.cpu import SharedMemory, native_library
from tests.specdec.processes import Outcome, results, run_processes
from tests.specdec.threads import num_threads, threads_started_by

pytestmark = pytest.mark.skipif(native_library() is None, reason="no C++ compiler")

# A round transfers 256 KiB: these take a part of one round, exactly one, and several.
SHAPES = [(), (1,), (8, 576), (3, 0), (2, 32768), (5, 40_001)]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
]


def join(rank, size, directory, timeout_s=30.0, num_threads=1):
    torch.set_num_threads(num_threads)
    return SharedMemory(native_library(), rank, size, directory / "address", timeout_s)


def tensor_of(rank, shape, dtype):
    """Return random values, of very different magnitudes for floating-point types."""
    generator = torch.Generator().manual_seed(rank + 1)
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        return torch.randint(limits.min, limits.max, shape, dtype=dtype, generator=generator)
    scales = torch.randn(shape, generator=generator).mul(2).exp()
    return torch.randn(shape, generator=generator).mul(scales).to(dtype)


def same_bits(one, other):
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def sum_of_ranks(size, shape, dtype):
    """Return the sum in rank order; 16-bit types are rounded once."""
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    return reduce(torch.add, (tensor_of(r, shape, dtype).to(wide) for r in range(size))).to(dtype)


def collect_all(rank, size, directory, num_threads):
    """Check every shape and dtype; return the number of checks."""
    memory, count = join(rank, size, directory, num_threads=num_threads), 0
    for shape in SHAPES:
        for dtype in DTYPES:
            own = tensor_of(rank, shape, dtype)
            gathered = memory.all_gather(own)
            assert gathered.shape == (size, *shape)
            for peer in range(size):
                assert same_bits(gathered[peer], tensor_of(peer, shape, dtype)), (shape, dtype)
            parts = tensor_of(rank, (size, *shape), dtype)
            received = memory.all_to_all(parts)
            assert received.untyped_storage().nbytes() == parts.nbytes, "no more than is needed"
            for peer in range(size):
                sent = tensor_of(peer, (size, *shape), dtype)[rank]
                assert same_bits(received[peer], sent), (shape, dtype)
            memory.all_reduce(own)
            memory.check()
            assert same_bits(own, sum_of_ranks(size, shape, dtype)), (shape, dtype)
            count += 1
    return count


@pytest.mark.parametrize(("size", "num_threads"), [(2, 1), (3, 1), (2, 3)])
def test_collectives_are_exact(tmp_path, size, num_threads):
    counts = results(run_processes(size, collect_all, tmp_path, num_threads))
    assert counts == [len(SHAPES) * len(DTYPES)] * size


@pytest.mark.parametrize(("count", "num_started"), [(65_536, 0), (65_537, 2)])
@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "all_to_all"])
def test_larger_tensors_use_as_many_threads_as_torch_in_a_new_thread(
    tmp_path, name, count, num_started
):
    tensor = torch.ones(1, count)
    with num_threads(3):
        memory = join(0, 1, tmp_path, num_threads=3)
        started = threads_started_by(lambda: getattr(memory, name)(tensor))
    memory.close()
    assert len(started) == num_started, "beside the new thread"


def compare_with_gloo(rank, size, directory):
    memory = join(rank, size, directory)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/gloo", rank=rank, world_size=size
    )
    for shape in SHAPES:
        for dtype in DTYPES:
            ours, theirs = tensor_of(rank, shape, dtype), tensor_of(rank, shape, dtype)
            memory.all_reduce(ours)
            dist.all_reduce(theirs)
            assert same_bits(ours, theirs), (shape, dtype)
    dist.destroy_process_group()


def test_two_ranks_equal_gloo(tmp_path):
    results(run_processes(2, compare_with_gloo, tmp_path))


def reduce_special_values(rank, size, directory):
    memory, sums = join(rank, size, directory), []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        largest = torch.finfo(dtype).max
        values = [[-0.0, torch.inf, torch.inf, torch.nan, largest, 1.0]]
        values.append([-0.0, torch.inf, -torch.inf, 1.0, largest, -torch.nan])
        own = torch.tensor(values[rank], dtype=dtype)
        memory.all_reduce(own)
        sums.append(own.float().tolist())
    return sums


def test_sums_of_zeros_infinities_and_nan(tmp_path):
    for sums in results(run_processes(2, reduce_special_values, tmp_path)):
        for zero, infinity, *nans, overflow, nan in sums:
            assert str(zero) == "-0.0"
            assert infinity == overflow == torch.inf
            assert all(each != each for each in [*nans, nan])


def reduce_a_column(rank, size, directory):
    table = torch.arange(6.0).reshape(3, 2) * (rank + 1)
    memory = join(rank, size, directory)
    memory.all_reduce(table[:, 1])
    return table.tolist(), memory.all_gather(table.t()[1]).tolist()


def test_non_contiguous_tensors(tmp_path):
    first, second = results(run_processes(2, reduce_a_column, tmp_path))
    gathered = [[3.0, 9.0, 15.0]] * 2
    assert first == ([[0.0, 3.0], [2.0, 9.0], [4.0, 15.0]], gathered)
    assert second == ([[0.0, 3.0], [4.0, 9.0], [8.0, 15.0]], gathered)


def reduce_booleans(rank, size, directory):
    join(rank, size, directory).all_reduce(torch.tensor([True]))


def test_unsupported_dtype_is_rejected(tmp_path):
    for outcome in run_processes(2, reduce_booleans, tmp_path):
        assert "dtype is torch.bool; it must be one of torch.float32, " in str(outcome.error)


def reduce_with_pauses(rank, size, directory):
    """Run random collectives with random delays of each rank."""
    memory, own, shared = join(rank, size, directory), random.Random(rank), random.Random(9)
    for index in range(1500):
        if own.random() < 0.1:
            time.sleep(own.random() * 2e-3)
        count = shared.choice([1, 7, 4608, 70_000])
        tensor = torch.full((count,), float(rank + index))
        if shared.random() < 0.5:
            memory.all_reduce(tensor)
            assert (tensor == sum(r + index for r in range(size))).all(), index
        else:
            gathered = memory.all_gather(tensor)
            assert (gathered == torch.arange(size).unsqueeze(1) + index).all(), index


@pytest.mark.parametrize("size", [2, 3])
def test_slots_are_not_overwritten_while_read(tmp_path, size):
    results(run_processes(size, reduce_with_pauses, tmp_path))


def reduce_and_be_killed(rank, size, directory, num_threads):
    memory = join(rank, size, directory, num_threads=num_threads)
    tensor = torch.ones(200_000)
    for index in range(1000):
        if rank == 1 and index == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        began_at = time.monotonic()
        try:
            memory.all_reduce(tensor)
        except RuntimeError as error:
            first_s, began_at = time.monotonic() - began_at, time.monotonic()
            with pytest.raises(RuntimeError, match="rank 1 has ended"):
                memory.all_gather(tensor)
            with pytest.raises(RuntimeError, match="rank 1 has ended"):
                memory.check()
            return index, str(error), first_s, time.monotonic() - began_at
    return None


@pytest.mark.parametrize(("size", "num_threads"), [(2, 1), (3, 1), (2, 3)])
def test_killed_peer_is_detected(tmp_path, size, num_threads):
    outcomes = run_processes(size, reduce_and_be_killed, tmp_path, num_threads)
    for rank in {*range(size)} - {1}:
        assert outcomes[rank].error is None
        index, message, first_s, second_s = outcomes[rank].result
        assert index == 20
        assert message == "rank 1 has ended, or did not respond for 30 s"
        assert first_s < 20, "detected within 0.1 s on an idle machine"
        assert second_s < 20


def reduce_while_another_is_killed(rank, size, directory):
    memory = join(rank, size, directory)
    tensor = torch.ones(1_000_000)
    while True:
        memory.all_reduce(tensor)
        if rank == 1 and random.random() < 0.05:
            signal.setitimer(signal.ITIMER_REAL, 2e-4)  # ends the process: no handler is installed


def test_peer_killed_during_a_collective_is_detected(tmp_path):
    survivor, ended = run_processes(2, reduce_while_another_is_killed, tmp_path)
    assert isinstance(survivor.error, RuntimeError)
    assert "rank 1 has ended" in str(survivor.error)
    assert ended == Outcome()


def arrive_late(rank, size, directory):
    memory = join(rank, size, directory)
    if rank == 1:
        time.sleep(1)
    tensor, cpu_s = torch.ones(3), time.process_time()
    memory.all_reduce(tensor)
    assert (tensor == size).all()
    return time.process_time() - cpu_s


def test_long_wait_sleeps(tmp_path):
    waited_s, _ = results(run_processes(2, arrive_late, tmp_path))
    assert waited_s < 0.2


def arrive_too_late(rank, size, directory):
    memory = join(rank, size, directory, timeout_s=0.5)
    timed_out = directory / "timed out"
    if rank == 1:
        while not timed_out.exists():
            time.sleep(0.01)
        return
    with pytest.raises(RuntimeError, match=r"rank 1 has ended, or did not respond for 0\.5 s"):
        memory.all_reduce(torch.ones(3))
    timed_out.touch()


def test_absent_peer_times_out(tmp_path):
    results(run_processes(2, arrive_too_late, tmp_path))


def time_out_before_another_rank(rank, size, directory):
    """Rank 1 times out before rank 2 arrives; rank 0 gets the right result or an error."""
    memory = join(rank, size, directory, timeout_s=0.5 if rank == 1 else 30.0)
    timed_out = directory / "timed out"
    while rank == 2 and not timed_out.exists():
        time.sleep(0.01)
    tensor = torch.arange(1_000_000.0)  # more rounds than slots
    expected = tensor * size
    try:
        memory.all_reduce(tensor)
    except RuntimeError:
        timed_out.touch()
        return "error"
    return "right" if torch.equal(tensor, expected) else "wrong"


def test_rank_that_timed_out_overwrites_nothing(tmp_path):
    outcomes = results(run_processes(3, time_out_before_another_rank, tmp_path))
    assert outcomes[1] == "error"
    assert "wrong" not in outcomes


def leave(rank, size, directory):
    memory = join(rank, size, directory)
    if rank == 1:
        memory.close()
        memory.close()
        time.sleep(2)  # alive, but not in the group
        return
    with pytest.raises(RuntimeError, match="rank 1 has ended"):
        memory.all_reduce(torch.ones(3))


def test_peer_that_closed_is_detected(tmp_path):
    results(run_processes(2, leave, tmp_path))


MISMATCHES = {
    "longer": lambda memory: memory.all_reduce(torch.ones(300_000)),
    "other dtype": lambda memory: memory.all_reduce(torch.ones(4, dtype=torch.int32)),
    "gather": lambda memory: memory.all_gather(torch.ones(4)),
    "all to all": lambda memory: memory.all_to_all(torch.ones(2, 2)),
}


def call_different_ones(rank, size, directory, kind):
    memory = join(rank, size, directory)
    memory.all_reduce(torch.ones(4))
    call = MISMATCHES[kind] if rank == 1 else lambda memory: memory.all_reduce(torch.ones(4))
    with pytest.raises(RuntimeError, match=f"rank {1 - rank} called another collective"):
        call(memory)


@pytest.mark.parametrize("kind", MISMATCHES)
def test_mismatched_collectives_are_detected(tmp_path, kind):
    results(run_processes(2, call_different_ones, tmp_path, kind))
