import os
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from specdec.kernels import tensor_parallel as group_module
from specdec.kernels.collectives import OrderedCollectives, ProcessGroupCollectives
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
    assert group.all_gather(torch.tensor(rank)).tolist() == [*range(size)]
    of_ranks = group.all_gather(torch.full((2, 3), rank, dtype=torch.float64))
    assert of_ranks[:, 1, 2].tolist() == [*range(size)]
    sent = torch.arange(2 * size).view(size, 2) + 100 * rank
    assert group.all_to_all(sent)[:, 0].tolist() == [100 * each + 2 * rank for each in range(size)]
    assert group.collectives.describe() in ("shared memory", "Gloo")
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


@pytest.mark.parametrize(
    ("is_custom", "is_ordered", "store"),
    [(True, False, None), (False, True, None), (True, True, object())],
)
def test_gpus_connect_before_graphs_are_captured(
    tmp_path, monkeypatch, is_custom, is_ordered, store
):
    """NCCL connects when the group is joined if it is given the device; the hosts use Gloo.

    On several nodes, with a store, there are no sums in one shot.
    """
    joined, chosen = {}, {}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    distributed = SimpleNamespace(
        init_process_group=lambda backend, **given: joined.update(backend=backend, **given),
        group=SimpleNamespace(WORLD=object()),
    )
    monkeypatch.setattr(group_module, "dist", distributed)
    monkeypatch.setattr(
        group_module,
        "gpu_collectives",
        lambda group, device, **options: chosen.update(device=device, **options) or group,
    )
    timeout = timedelta(seconds=3)
    rendezvous = Rendezvous(1, 2, "cuda", tmp_path, timeout, is_custom, is_ordered, store)
    group = rendezvous.join()
    assert (group.rank, group.size, group.describe()) == (1, 2, "NCCL")
    assert joined["backend"] == "cpu:gloo,cuda:nccl"
    assert (joined["device_id"], joined["rank"]) == (torch.device("cuda", 1), 1)
    assert (joined["store"], joined["init_method"] is None) == (store, store is not None)
    wanted = {"is_custom": is_custom and store is None, "is_ordered": is_ordered}
    assert chosen == {"device": joined["device_id"], **wanted}


def test_sums_in_order_are_known():
    assert TensorParallelGroup().adds_in_order
    of_gpus = ProcessGroupCollectives(None, "NCCL")
    assert not TensorParallelGroup(0, 2, of_gpus).adds_in_order
    assert TensorParallelGroup(0, 2, OrderedCollectives(of_gpus)).adds_in_order
