"""Detection of NVLink between GPUs, by the library of NVIDIA's driver.

Kernels that signal their peers by atomic operations need it: over PCIe these may not be atomic.
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Sequence
from itertools import combinations

import torch

_LIBRARY = "libnvidia-ml.so.1"
_SUCCESS = 0
_OF_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK
_IS_JOINED = 0  # NVML_P2P_STATUS_OK


def gpu_id(device: torch.device) -> uuid.UUID:
    """Return the identity of a GPU, by which every process of its node can name it."""
    return uuid.UUID(str(torch.cuda.get_device_properties(device).uuid))


def nvlink_fault(gpus: Sequence[uuid.UUID]) -> str:
    """Return why NVLink does not join every two of some GPUs of this node, or an empty string.

    A GPU that this process does not use may be among them. Each may have a link, and two of them
    none between them: bridges join pairs.
    """
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return f"{_LIBRARY} of the driver, which reports NVLink, is not available"
    if library.nvmlInit_v2() != _SUCCESS:
        return f"{_LIBRARY} of the driver does not start"
    try:
        pairs = combinations(gpus, 2)
        apart = next((pair for pair in pairs if not _are_joined(library, *pair)), None)
    finally:
        library.nvmlShutdown()
    return "" if apart is None else f"NVLink does not join GPU-{apart[0]} and GPU-{apart[1]}"


def _are_joined(library: ctypes.CDLL, first: uuid.UUID, second: uuid.UUID) -> bool:
    """Return whether NVLink joins two GPUs; library: initialized."""
    handles, status = (ctypes.c_void_p(), ctypes.c_void_p()), ctypes.c_int()
    for gpu, handle in zip((first, second), handles, strict=True):
        name = f"GPU-{gpu}".encode()
        if library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)) != _SUCCESS:
            return False
    found = library.nvmlDeviceGetP2PStatus(*handles, _OF_NVLINK, ctypes.byref(status))
    return bool(found == _SUCCESS and status.value == _IS_JOINED)
