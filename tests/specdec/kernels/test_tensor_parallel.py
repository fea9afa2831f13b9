import os
from datetime import timedelta

import pytest
import torch

from specdec.kernels import tensor_parallel as group_module
from specdec.kernels.cpu import native_library
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.worker import Rendezvous
from tests.specdec.processes import results, run_processes


def join(rank, size, directory, ranks_without_kernels=()):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if rank in ranks_without_kernels:
        group_module.native_library = lambda: None
    return Rendezvous(rank, size, "cpu", directory, timedelta(seconds=30)).join()


def exchange(rank, size, directory, ranks_without_kernels):
    group = join(rank, size, directory, ranks_without_kernels)
    assert (group.rank, group.size) == (rank, size)
    sums = group.all_reduce(torch.full((2, 3), float(rank + 1)))
    assert (sums == size * (size + 1) / 2).all()
    assert group.all_gather(torch.tensor([rank])).flatten().tolist() == [*range(size)]
    return type(group.collectives).__name__


@pytest.mark.skipif(native_library() is None, reason="no C++ compiler")
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_of_one_node_share_memory(tmp_path, size):
    kinds = results(run_processes(size, exchange, tmp_path, ()))
    assert kinds == ["SharedMemory"] * size


@pytest.mark.parametrize("ranks_without_kernels", [(0,), (1,), (0, 1)])
def test_all_ranks_use_gloo_if_one_has_no_kernels(tmp_path, ranks_without_kernels):
    kinds = results(run_processes(2, exchange, tmp_path, ranks_without_kernels))
    assert kinds == ["ProcessGroupCollectives"] * 2


def exchange_until_killed(rank, size, directory, ranks_without_kernels):
    group = join(rank, size, directory, ranks_without_kernels)
    group.all_reduce(torch.ones(3))
    if rank == 0:
        os.kill(os.getpid(), 9)
    with pytest.raises(RuntimeError):
        group.all_reduce(torch.ones(3))


@pytest.mark.parametrize("ranks_without_kernels", [(), (0, 1)])
def test_killed_peer_raises_with_either_backend(tmp_path, ranks_without_kernels):
    _, survivor = run_processes(2, exchange_until_killed, tmp_path, ranks_without_kernels)
    assert survivor.error is None


def test_single_rank_needs_no_rendezvous(tmp_path):
    assert join(0, 1, tmp_path) == TensorParallelGroup()
    assert [*tmp_path.iterdir()] == []
