"""The device that trains."""

from __future__ import annotations

import re

import torch

from specdec.config.hardware import num_gpus, resolved_device
from specdec.types.errors import InvalidValueError

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


def training_device(name: str) -> torch.device:
    """Return the device of a name: auto, cpu, cuda, or cuda:N for one of several GPUs.

    auto: cuda if torch finds a GPU, else cpu. Raises InvalidValueError for another name, and for a
    GPU that does not exist.
    """
    if not _DEVICE.fullmatch(name):
        raise InvalidValueError("device", name, "auto, cpu, cuda, or cuda:N for one of the GPUs")
    device = torch.device(resolved_device(name))
    if device.type == "cuda" and (device.index or 0) >= (count := num_gpus()):
        limit = f"below cuda:{count}" if count else "cpu or auto, as torch finds no GPU"
        raise InvalidValueError("device", name, limit)
    return device


def use_device(device: torch.device) -> None:
    """Launch the kernels of this process on a GPU, and let it multiply float32 matrices as TF32.

    Triton launches kernels on the current GPU, wherever their tensors are. TF32 has 10 bits of
    mantissa.
    """
    if device.type != "cuda":
        return
    if device.index is not None:
        torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")
