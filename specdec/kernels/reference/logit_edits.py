"""Changes of rows of logits that a device makes, and their layout in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

PROMPT_TOKEN = 2**30
"""Added to the count of a token that is in the prompt (`LogitEdits.seen`)."""


class Change(IntEnum):
    """Words of the record of a changed row.

    ROW: of the logits. PLACE: its row of `seen`, -1 without penalties. MASK: its token mask, -1 if
    it has none. The penalties, float64: REPETITION, FREQUENCY and PRESENCE.
    """

    ROW = 0
    PLACE = 1
    MASK = 2
    REPETITION = 3
    FREQUENCY = 4
    PRESENCE = 5


class Entry(IntEnum):
    """Words of the record of a changed logit: its row and column, and a value.

    The value of a bias is float64. That of a banned token is an index among the output tokens: it
    is banned before it.
    """

    ROW = 0
    COLUMN = 1
    VALUE = 2


@dataclass(frozen=True)
class LogitEdits:
    """Changes of R rows of logits of V tokens, on the device.

    changes: of C rows whose tokens all may change. biased: E single logits, each once. banned: F
    single logits; if one of them is there twice, with the same value. seen: how often each token is
    in the output of a sequence, plus PROMPT_TOKEN; None where no row has penalties.
    """

    changes: Tensor  # [C, len(Change)] int64
    masks: Tensor  # [M, W] int32: bit t % 32 of word t // 32 is set if token t is allowed
    biased: Tensor  # [E, len(Entry)] int64
    banned: Tensor  # [F, len(Entry)] int64
    seen: Tensor | None  # [num_places, V] int32

    @property
    def rows(self) -> Tensor:
        """The rows of logits that `changes` are of, [C] int64."""
        return self.changes[:, Change.ROW]

    def spread(self, count: int) -> LogitEdits:
        """Return the same changes of `count` rows of logits in place of each row."""
        if count == 1:
            return self
        offsets = torch.arange(count, device=self.changes.device)

        def spread(records: Tensor) -> Tensor:
            wide = records.repeat_interleave(count, 0)
            wide[:, 0] = wide[:, 0] * count + offsets.repeat(len(records))
            return wide

        return replace(
            self,
            changes=spread(self.changes),
            biased=spread(self.biased),
            banned=spread(self.banned),
        )

    @property
    def is_empty(self) -> bool:
        """Return whether they change nothing."""
        return not (len(self.changes) or len(self.biased) or len(self.banned))
