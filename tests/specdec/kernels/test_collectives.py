# Modules: specdec.kernels.nvlink, specdec.kernels.symmetric_memory
"""Sums of ranks on GPUs: the choice among NCCL, one kernel and sums in order, without a GPU."""

import ctypes
import uuid
from types import SimpleNamespace

import pytest
import torch

from specdec.kernels import nvlink, symmetric_memory
from specdec.kernels.collectives import (
    OneShotCollectives,
    OrderedCollectives,
    gpu_collectives,
)
from specdec.kernels.symmetric_memory import SymmetricMemory
from tests.specdec.fakes import run_ranks

CPU = torch.device("cpu")


class ThreadCollectives:
    """Collectives of a process group whose ranks are threads; its sums begin with the last rank."""

    name = "NCCL"

    def __init__(self, group):
        self.group, self.called = group, group.called
        self.process_group = SimpleNamespace(
            rank=lambda: group.rank, size=lambda: group.size, group_name="0"
        )

    def all_reduce(self, tensor):
        self.called.append("all_reduce")
        first, *others = reversed(self.group.exchange.swap(self.group.rank, tensor))
        tensor.copy_(sum(others, first))

    def all_gather(self, tensor):
        return self.group.all_gather(tensor)

    def all_to_all(self, parts):
        return self.group.all_to_all(parts)

    def describe(self):
        return self.name


def memory_of(
    group, *, local="", peers="", allocates=True, opens=True, is_wrong=False, max_bytes=64
):
    """Return a kind of memory of one rank, whose sums are those of the kernel."""
    limit = max_bytes

    class Memory(SymmetricMemory):
        max_bytes = limit

        @staticmethod
        def local_fault():
            return local

        @staticmethod
        def peer_fault(device, gather):
            gather(torch.tensor(group.rank))
            return peers

        @classmethod
        def allocate(cls, device):
            if not allocates:
                raise RuntimeError("no memory")
            return torch.zeros(cls.max_bytes, dtype=torch.uint8, device=device)

        @classmethod
        def open(cls, buffer, process_group):
            group.called.append("open")
            if not opens:
                raise RuntimeError("no peer access")
            return cls(buffer, "0")

        def all_reduce(self, tensor):
            assert self.fits(tensor)
            group.called.append("one shot")
            first, *others = group.exchange.swap(group.rank, tensor)
            tensor.copy_(sum(others, first) + is_wrong)

    return Memory


def chosen(group, *, is_custom=True, is_ordered=False, **kind):
    """Return a rank's collectives, and what their choice has called."""
    collectives = gpu_collectives(
        ThreadCollectives(group),
        CPU,
        is_custom=is_custom,
        is_ordered=is_ordered,
        kind=memory_of(group, **kind),
    )
    called, group.called[:] = tuple(group.called), []
    return collectives, called


def test_small_sums_take_one_kernel_and_others_nccl():
    def on_rank(group):
        collectives, _ = chosen(group)
        sums = [torch.full((count,), group.rank + 1.0) for count in (4, 16, 20, 3)]
        sums.append(torch.ones(4, dtype=torch.float16))
        for each in sums:
            collectives.all_reduce(each)
        return collectives.describe(), [each[0].item() for each in sums], list(group.called)

    text, sums, called = run_ranks(2, on_rank)[0]
    assert text == f"NCCL, and sums of up to {64 / 2**20:g} MiB in one shot"
    assert sums == [3, 3, 3, 3, 2]
    # 80 bytes are too many, 12 are not aligned, and the kernel has no float16.
    assert called == ["one shot", "one shot", "all_reduce", "all_reduce", "all_reduce"]


def test_nothing_is_opened_where_the_option_forbids_it():
    def on_rank(group):
        collectives, called = chosen(group, is_custom=False)
        return collectives.describe(), called

    assert run_ranks(2, on_rank) == [("NCCL", ())] * 2


@pytest.mark.parametrize(
    ("fault", "opened"),
    [
        ({"local": "no symmetric memory"}, [0, 0]),
        ({"peers": "no NVLink"}, [0, 0]),
        ({"allocates": False}, [0, 0]),
        ({"opens": False}, [1, 1]),
        ({"is_wrong": True}, [1, 1]),
    ],
)
def test_no_rank_sums_in_one_shot_where_one_cannot(fault, opened, caplog):
    """Each part is begun on all ranks or on none: in the parts they wait for each other."""

    def on_rank(group):
        collectives, called = chosen(group, **(fault if group.rank == 1 else {}))
        return type(collectives), called.count("open")

    with caplog.at_level("INFO"):
        found = run_ranks(2, on_rank)
    assert found == [(ThreadCollectives, count) for count in opened]
    [(part, text)] = fault.items()
    reasons = {"allocates": "no memory", "opens": "no peer access", "is_wrong": "a sum in one shot"}
    assert f"rank 1 sums by NCCL: {reasons.get(part, text)}" in caplog.text
    assert "rank 0 sums by NCCL: another rank cannot" in caplog.text


@pytest.mark.parametrize("has_memory", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_ordered_sums_have_the_bits_of_each_element_alone(has_memory, dtype, monkeypatch):
    """A tensor of any size has them: it is summed in parts, always in the order of the ranks."""
    monkeypatch.setattr("specdec.kernels.collectives._GATHERED_BYTES", 48)
    generator = torch.Generator().manual_seed(0)
    of_ranks = [(torch.randn(8, 24, generator=generator) * 100).to(dtype) for _ in range(3)]
    expected = (of_ranks[0] + of_ranks[1]) + of_ranks[2]

    def on_rank(group):
        collectives, _ = chosen(group, is_ordered=True, **({} if has_memory else {"opens": False}))
        own = of_ranks[group.rank].clone()
        columns = own.clone().t()  # not contiguous
        for each in (own, columns):
            collectives.all_reduce(each)
        return own, columns.t(), "one shot" in group.called, collectives.describe()

    for own, columns, is_in_one_shot, text in run_ranks(3, on_rank):
        assert torch.equal(own, expected)
        assert torch.equal(columns, expected)
        assert is_in_one_shot == (has_memory and dtype in (torch.float32, torch.bfloat16))
        assert text.endswith(
            f"sums {'in one shot' if has_memory else 'gathered'}, in the order of the ranks"
        )


def test_other_collectives_are_those_of_the_process_group():
    def on_rank(group):
        memory = memory_of(group)(torch.zeros(64, dtype=torch.uint8), "0")
        found = []
        for each in (OneShotCollectives, OrderedCollectives):
            collectives = each(ThreadCollectives(group), memory)
            found.append(collectives.all_gather(torch.tensor([group.rank])).flatten().tolist())
            parts = torch.tensor([10 * group.rank, 10 * group.rank + 1])
            found.append(collectives.all_to_all(parts).tolist())
        return found

    assert run_ranks(2, on_rank) == [[[0, 1], [0, 10]] * 2, [[0, 1], [1, 11]] * 2]


def test_the_kernel_sums_what_a_launch_before_has_copied(monkeypatch):
    """The arguments of torch's operator, which has no CPU kernel."""
    calls = []

    def sums(buffer, *given):
        calls.append((buffer.clone(), buffer.storage_offset(), *given))

    operators = SimpleNamespace(one_shot_all_reduce_out=sums)
    monkeypatch.setattr(symmetric_memory.torch.ops, "symm_mem", operators)
    memory = SymmetricMemory(torch.zeros(SymmetricMemory.max_bytes, dtype=torch.uint8), "7")
    tensor = torch.arange(16, dtype=torch.bfloat16).view(2, 8)
    memory.all_reduce(tensor)
    [(copied, offset, operation, name, output)] = calls
    assert (copied.dtype, copied.tolist(), offset) == (torch.bfloat16, list(range(16)), 0)
    assert output.data_ptr() == tensor.data_ptr()
    assert output.shape == (16,)
    assert (operation, name) == ("sum", "7")


def test_this_build_of_torch_has_the_operator():
    """By its schema, which the calls follow; a build without CUDA has no kernel for it."""
    assert not SymmetricMemory.local_fault()
    schema = torch.ops.symm_mem.one_shot_all_reduce_out.default._schema
    names = [each.name for each in schema.arguments]
    assert names == ["input", "reduce_op", "group_name", "out"]


@pytest.mark.parametrize(
    ("tensor", "fits"),
    [
        (torch.zeros(2**18), True),
        (torch.zeros(2**18 + 4), False),
        (torch.zeros(0), False),
        (torch.zeros(9)[1:], False),  # its address is not aligned
        (torch.zeros(4, 4).t(), False),
        (torch.zeros(4, dtype=torch.float64), False),
    ],
    ids=["1 MiB", "more", "nothing", "offset", "transposed", "float64"],
)
def test_what_fits_the_kernel(tensor, fits):
    memory = SymmetricMemory(torch.zeros(16, dtype=torch.uint8), "0")
    assert memory.fits(tensor) == fits


def test_a_build_of_torch_without_symmetric_memory_is_named(monkeypatch):
    monkeypatch.setattr(symmetric_memory.torch.ops, "symm_mem", SimpleNamespace())
    assert "no symmetric memory" in SymmetricMemory.local_fault()


GPUS = [uuid.UUID(int=number) for number in range(3)]


def nvml(joined=(), unknown=()):
    """Return the driver's library. joined: pairs of GPUs, by their number in GPUS."""
    library, handles = SimpleNamespace(is_open=None), {f"GPU-{gpu}": gpu.int for gpu in GPUS}

    def find(name, handle):
        number = handles[name.decode()]
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[0] = number
        return 6 if number in unknown else 0

    def state_of(first, second, capability, status):
        assert capability == 2  # of NVLink
        pair = first.value or 0, second.value or 0
        ctypes.cast(status, ctypes.POINTER(ctypes.c_int))[0] = 0 if pair in joined else 5
        return 0

    def opens(is_open):
        library.is_open = is_open
        return 0

    library.nvmlInit_v2, library.nvmlShutdown = lambda: opens(True), lambda: opens(False)
    library.nvmlDeviceGetHandleByUUID, library.nvmlDeviceGetP2PStatus = find, state_of
    return library


@pytest.mark.parametrize(
    ("library", "fault"),
    [
        (nvml(joined=[(0, 1), (0, 2), (1, 2)]), ""),
        (nvml(joined=[(0, 1)]), f"NVLink does not join GPU-{GPUS[0]} and GPU-{GPUS[2]}"),
        (
            nvml(joined=[(0, 1), (0, 2), (1, 2)], unknown=[1]),
            f"NVLink does not join GPU-{GPUS[0]} and GPU-{GPUS[1]}",
        ),
    ],
    ids=["all", "a pair by a bridge", "not found"],
)
def test_nvlink_between_all_gpus_is_found_by_the_driver(library, fault, monkeypatch):
    """The GPUs of all ranks, whose identities they exchange."""
    monkeypatch.setattr(nvlink.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(symmetric_memory, "gpu_id", lambda device: GPUS[device.index])

    def on_rank(group):
        device = torch.device("cuda", group.rank)
        return SymmetricMemory.peer_fault(device, group.all_gather)

    assert run_ranks(3, on_rank) == [fault] * 3
    assert library.is_open is False


def test_the_identity_of_a_gpu_is_that_of_the_driver(monkeypatch):
    properties = SimpleNamespace(uuid=GPUS[2])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert nvlink.gpu_id(CPU) == GPUS[2]


def test_a_machine_without_the_driver_has_no_nvlink(monkeypatch):
    def missing(name):
        raise OSError

    monkeypatch.setattr(nvlink.ctypes, "CDLL", missing)
    assert "is not available" in nvlink.nvlink_fault(GPUS)
