"""Drafts on the device of a head without KV: Medusa, Hydra and MLP speculators.

It drafts from the target's hidden state before the last new token, and from that token. All
tokens of a draft are launched at once: their number is that of a graph.
"""

from __future__ import annotations

from torch import Tensor

from specdec.sampling.device.device_trees import VerifiedChains
from specdec.worker.device.head.head import DraftRows, LaunchedDrafts, StepParts
from specdec.worker.device.step_graphs import StepShape
from specdec.worker.head.parts import StateParts


class StateDrafts(LaunchedDrafts[StateParts]):
    """Launches a head on static buffers: `start` after the verification, then `draft`."""

    def __init__(self, parts: StateParts, step: StepParts) -> None:
        assert not parts.head.taps, "the states of layers are not kept"
        super().__init__(parts, step)
        self._hidden = step.buffers.hidden  # where a step leaves its states
        num_rows = step.limits.max_num_seqs
        self._features = self._hidden.new_zeros(num_rows, parts.head.feature_size)

    def start(
        self, rows: DraftRows, verified: VerifiedChains, sources: Tensor, shape: StepShape
    ) -> None:
        """Take the rows, and the features before their last new tokens.

        The state has the lengths with the new tokens. sources: [num_rows, Q], the row of `hidden`
        that each new token was sampled by. shape: of the step.
        """
        self._start(rows, verified, shape)
        last = (verified.counts - 1).clamp_min(0)[:, None]
        index = sources.gather(1, last).squeeze(1)
        features = self.parts.head.features(self._hidden[index])
        self._features[: shape.num_rows] = features
        tokens = verified.token_ids.gather(1, last).squeeze(1)
        self._tokens[: shape.num_rows] = tokens

    def _inputs(self, num_rows: int, count: int) -> Tensor:
        del count
        return self._features[:num_rows]
