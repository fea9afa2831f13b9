"""Sampled softmax (Jean et al. 2015, arXiv 1412.2007): a loss over some of the draft tokens.

The output head is most of a head's products, and an answer needs few of its rows. Each step
computes the rows of the tokens that the samples answer with, and those of random others, whose
logits count for all that are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specdec.training.data.batches import to_device

_NUM_OTHERS = 1024
"""Random tokens of a step. With 2,048 rows in all a head learns as with 12,288: docs/adr/0030."""


@dataclass(frozen=True)
class DrawnTokens:
    """Draft tokens in the loss of a step.

    columns: of the draft vocabulary. offsets: added to the logits of drafter and target, the
    logarithm of the number of tokens that each stands for.
    """

    columns: Tensor  # [n] int64
    offsets: Tensor  # [n] float32


class TokenSampler:
    """Draws the draft tokens of each step. Without others to draw it is all of them."""

    def __init__(self, token_ids: Sequence[int], answered: Sequence[int]) -> None:
        """token_ids: of the draft vocabulary, ascending. answered: tokens of the samples."""
        is_answered = np.isin(np.array(token_ids), np.array(answered))
        self._answered = np.flatnonzero(is_answered)
        self._others = np.flatnonzero(~is_answered)

    def draw(self, generator: np.random.Generator, device: torch.device) -> DrawnTokens:
        """Return the tokens of a step, on a device."""
        count = min(_NUM_OTHERS, len(self._others))
        drawn: npt.NDArray[np.int64] = generator.choice(self._others, count, replace=False)
        columns = torch.from_numpy(np.concatenate([self._answered, drawn]))
        offsets = torch.zeros(len(columns))
        if count:
            offsets[len(self._answered) :] = math.log(len(self._others) / count)
        return DrawnTokens(to_device(columns, device), to_device(offsets, device))
