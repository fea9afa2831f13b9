"""What models run on."""

from __future__ import annotations

from pathlib import Path

_GPU_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))
"""What there is where torch may find a GPU: NVIDIA's driver, the one under WSL, and AMD's."""


def resolved_device(device: str) -> str:
    """The device that is meant: auto is cuda where torch finds a GPU, and cpu elsewhere."""
    if device != "auto":
        return device
    if not any(driver.exists() for driver in _GPU_DRIVERS):
        return "cpu"
    import torch  # takes seconds, and is not needed to see that there is no driver

    return "cuda" if torch.cuda.is_available() else "cpu"
