"""Detection of NVLink, by the library of NVIDIA's driver.

Kernels that signal their peers by atomic operations need it: over PCIe these may not be atomic.
"""

from __future__ import annotations

import ctypes

import torch

_LIBRARY = "libnvidia-ml.so.1"
_MAX_LINKS = 18
_SUCCESS = 0


def nvlink_fault(device: torch.device) -> str:
    """Return why a GPU has no active NVLink, or an empty string if it has one."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return f"{_LIBRARY} of the driver, which reports NVLink, is not available"
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    if library.nvmlInit_v2() != _SUCCESS:
        return f"{_LIBRARY} of the driver does not start"
    try:
        return "" if has_active_link(library, uuid) else "the GPU has no active NVLink"
    finally:
        library.nvmlShutdown()


def has_active_link(library: ctypes.CDLL, uuid: str) -> bool:
    """Return whether a link of a GPU is active; library: initialized."""
    handle, state = ctypes.c_void_p(), ctypes.c_uint()
    if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) != _SUCCESS:
        return False
    return any(
        library.nvmlDeviceGetNvLinkState(handle, ctypes.c_uint(link), ctypes.byref(state))
        == _SUCCESS
        and state.value
        for link in range(_MAX_LINKS)
    )
