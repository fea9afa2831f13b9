"""Rendezvous of ranks on the GPUs of several nodes."""

from __future__ import annotations

import logging
import os
import socket
from datetime import timedelta

import psutil
from torch.distributed import TCPStore  # type: ignore[attr-defined]

logger = logging.getLogger(__name__)


def join_store(
    place: tuple[str, int], size: int, listener: socket.socket | None, timeout: timedelta
) -> TCPStore:
    """Return the store at an address and port; listener: of rank 0, which serves it."""
    host, port = place
    return TCPStore(
        host,
        port,
        size,
        is_master=listener is not None,
        timeout=timeout,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def use_interface_of(address: str) -> None:
    """Let Gloo and NCCL use the interface with an address, unless the environment names others."""
    for interface, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # without =, a prefix
            return
    logger.warning("no interface has the address %s; Gloo and NCCL choose their own", address)
