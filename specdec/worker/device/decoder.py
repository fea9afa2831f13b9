"""A decoder whose passes the device runs without the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from specdec.kernels.reference.device_batch import AnyDeviceBatch
from specdec.kernels.reference.forward_batch import HiddenStates


@runtime_checkable
class DeviceDecoder(Protocol):
    """A decoder that runs batches of fixed shape without the host."""

    @property
    def fits_graphs(self) -> bool:
        """Return whether a pass can be a graph, whose tables are as wide as the longest sequence.

        The host must read nothing, and the time must depend on the contexts alone.
        """

    def fits_ragged(self, num_tokens: int, num_blocks: int) -> bool:
        """Return whether a ragged batch of that size may run. num_blocks: of the longest table."""

    def forward_on_device(self, batch: AnyDeviceBatch, kv_cache: Tensor) -> Tensor:
        """Return hidden states [T, hidden_size]; a collective call."""

    def tapped_on_device(
        self, batch: AnyDeviceBatch, kv_cache: Tensor, taps: Sequence[int]
    ) -> HiddenStates:
        """Return these, and those that enter layers; taps: as in DraftHead."""

    @property
    def adapter_places(self) -> Mapping[int, int] | None:
        """Return the places by which batches name the loaded adapters, by adapter id.

        None where a pass on the device cannot have adapters.
        """

    @property
    def hidden_size(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the hidden states."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return this rank's logits [R, len(vocab_slice)]; hidden: [R, hidden_size]."""
