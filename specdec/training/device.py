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


def use_fast_products(device: torch.device) -> None:
    """Let a GPU multiply float32 matrices as TF32, with 10 bits of mantissa, in this process."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
