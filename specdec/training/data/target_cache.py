"""The target's hidden states of samples that several passes or versions are trained on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specdec.kernels.reference.forward_batch import HiddenStates
from specdec.training.data.batches import Batch
from specdec.training.data.corpus import Sample
from specdec.training.data.target import Target, TargetPrecision


class CachedTarget(Target):
    """Target on a CPU that keeps the hidden states of samples, as many as fit.

    A forward pass takes longer than a training step of an adapted `eagle3` head. A token takes
    4 * hidden_size * (1 + num_taps) bytes. Passes read samples in random orders, in which the
    least recently used ones are no less likely to be read next: what fits stays.
    """

    def __init__(
        self, directory: Path, max_model_len: int, precision: TargetPrecision, max_bytes: int
    ) -> None:
        """See Target. max_bytes: of the hidden states that are kept."""
        super().__init__(directory, max_model_len, precision)
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._states: dict[tuple[tuple[int, ...], bytes], HiddenStates] = {}

    def keep_only(self, samples: Iterable[Sample]) -> None:
        """Drop the states of all other samples."""
        wanted = {np.array(each.token_ids[:-1], np.int64).tobytes() for each in samples}
        for key in [each for each in self._states if each[1] not in wanted]:
            self._num_bytes -= _num_bytes(self._states.pop(key))

    def hidden_states(self, batch: Batch, taps: Sequence[int]) -> HiddenStates:
        """See Target."""
        parts = [self._of_sample(batch.token_ids[each.tokens], tuple(taps)) for each in batch.spans]
        final, tapped = zip(*parts, strict=True)
        return HiddenStates(torch.cat(final), torch.cat(tapped))

    def _of_sample(self, token_ids: Tensor, taps: tuple[int, ...]) -> HiddenStates:
        """Return the states of the tokens of a sample but its last one, [n] int64."""
        key = (taps, token_ids.numpy().tobytes())
        if (states := self._states.get(key)) is not None:
            return states
        sample = Sample((*token_ids.tolist(), 0), len(token_ids), 0.0)
        states = super().hidden_states(Batch.of([sample]), taps)
        if self._num_bytes + _num_bytes(states) <= self._max_bytes:
            self._num_bytes += _num_bytes(states)
            self._states[key] = states
        return states


def _num_bytes(states: HiddenStates) -> int:
    return states.final.nbytes + states.tapped.nbytes
