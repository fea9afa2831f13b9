"""Training on a device other than the CPU, without one: meta tensors stand for those of a GPU.

They have a device and no values. So an operator that mixes them with tensors of the host is found
here, as is one that waits for a value, which would keep a GPU idle.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specdec.config import hardware
from specdec.training import device, objective, trainer
from specdec.training.data.batches import Batch
from specdec.training.data.config import TrainingConfig
from specdec.training.data.corpus import Sample
from specdec.training.data.target import Target, TargetPrecision
from specdec.training.device import training_device, use_device
from specdec.training.drafters.base import TRAINED_METHODS
from specdec.training.trainer import Data, RecentLoss, Trainer
from specdec.types.errors import InvalidValueError

DEVICE = torch.device("meta")
COPIES = ("_to_copy", "copy_")
WAITING = ("_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "masked_select", "equal")
SAMPLES = [
    Sample(tuple(range(5, 5 + length)), prompt, temperature)
    for length, prompt, temperature in ((9, 2, 0.0), (60, 20, 0.8), (3, 2, 0.8), (30, 1, 0.8))
]


class OneDevice(TorchDispatchMode):
    """Refuses operators on tensors of two devices, and those that return values to the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        devices = {each.device for each in tensors}
        assert name in COPIES or len(devices) < 2, f"{func} mixes {devices}"
        assert name not in WAITING or DEVICE not in devices, f"{func} waits"
        wanted = (kwargs or {}).get("device")
        is_read = name in COPIES and DEVICE in devices and wanted == torch.device("cpu")
        assert not is_read, f"{func} waits"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def distant_target(target, monkeypatch):
    """A target on the device."""
    monkeypatch.setitem(objective._CHUNK_LOGITS, DEVICE.type, 2**22)
    monkeypatch.setitem(trainer._LOSS_INTERVAL, DEVICE.type, 20)
    autocast = torch.autocast  # torch has none for meta tensors
    monkeypatch.setattr(torch, "autocast", lambda _, **options: autocast("cpu", **options))
    return Target(target.directory, 128, target.precision, device=DEVICE)


@pytest.mark.parametrize(
    ("method", "optimizer"), [*((each, "adamw") for each in TRAINED_METHODS), ("eagle3", "muon")]
)
def test_a_step_runs_on_its_device_and_does_not_wait(method, optimizer, distant_target, tmp_path):
    config = TrainingConfig(method=method, depth=3, max_anchors=16, optimizer=optimizer)
    token_ids = list(range(distant_target.config.vocab_size))
    run = Trainer(config, distant_target, Data(SAMPLES, SAMPLES, token_ids, {}), tmp_path)
    assert {each.device for each in run.drafter.parameters()} == {DEVICE}
    with OneDevice():
        loss = run._train(run._batch(0))
        batch = Batch.of(SAMPLES)
        hidden = distant_target.hidden_states(batch, run.drafter.taps)
        drafts = run._objective.drafts(run.drafter, batch.to(DEVICE), hidden, None)
    assert loss.device == drafts.device == DEVICE
    assert drafts.shape == (3, batch.num_bases)
    assert run.step == 1


def test_losses_are_read_now_and_then():
    """The first step's loss is read at once, so that a run without a number is seen early."""
    recent, means = RecentLoss(interval=3), []
    for loss in (4.0, 2.0, 2.0, 2.0, 9.0):
        recent.add(torch.tensor(loss))
        means.append(recent.mean)
    expected = 4 * 0.95**3 + 2 * (1 - 0.95**3)
    assert means == pytest.approx([4, 4, 4, expected, expected])
    recent.read()
    assert recent.mean == pytest.approx(0.95 * expected + 0.05 * 9)
    recent.read()
    assert recent.mean == pytest.approx(0.95 * expected + 0.05 * 9)


@pytest.mark.parametrize("num_gpus", [0, 2])
def test_the_device_must_exist(num_gpus, monkeypatch):
    monkeypatch.setattr(device, "num_gpus", lambda: num_gpus)
    monkeypatch.setattr(hardware, "_GPU_DRIVERS", ())
    assert training_device("cpu") == training_device("auto") == torch.device("cpu")
    with pytest.raises(InvalidValueError, match="device is 'gpu'; it must be auto, cpu, cuda, or"):
        training_device("gpu")
    if num_gpus == 0:
        with pytest.raises(InvalidValueError, match="cpu or auto, as torch finds no GPU"):
            training_device("cuda")
        return
    assert [training_device(f"cuda{end}") for end in ("", ":1")] == [
        torch.device("cuda"),
        torch.device("cuda", 1),
    ]
    with pytest.raises(InvalidValueError, match="below cuda:2"):
        training_device("cuda:2")


def test_kernels_are_launched_on_the_gpu_that_trains(monkeypatch):
    """Triton launches them on the current GPU, wherever their tensors are."""
    calls = []
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", calls.append)
    for name in ("cpu", "cuda", "cuda:1"):
        use_device(torch.device(name))
    assert calls == ["high", torch.device("cuda", 1), "high"]


def test_a_precision_is_one_of_its_device():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert TargetPrecision.on(cpu) == TargetPrecision("float32")
    assert TargetPrecision.on(gpu) == TargetPrecision("bfloat16")
    assert TargetPrecision.on(gpu, "float32", kernels="torch").dtype == "float32"
    assert TargetPrecision.on(cpu, quantization="w8a8").quantization == "w8a8"
    with pytest.raises(InvalidValueError, match="quantization is 'int8'; it must be left"):
        TargetPrecision.on(gpu, quantization="int8")
    with pytest.raises(InvalidValueError, match="kernels is 'native'; it must be auto, tri"):
        TargetPrecision.on(gpu, kernels="native")
