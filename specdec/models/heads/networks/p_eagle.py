"""P-EAGLE: EAGLE-3 whose later draft tokens come from one pass over mask tokens.

The first draft token is that of the last pair. After it, pairs of the mask token and a learned
hidden state (`mask_hidden`, projected like the target's) predict the others together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.kernels.reference.device_batch import DeviceBatch
from specdec.kernels.reference.forward_batch import AdapterRun, ForwardBatch
from specdec.models.heads.formats.eagle3 import Eagle3Shape
from specdec.models.heads.networks.base import DeviceDrafts, HeadCapabilities
from specdec.models.heads.networks.eagle3 import Eagle3Head
from specdec.models.heads.networks.recurrent import RecurrentState
from specdec.models.heads.networks.target import TargetRank
from specdec.models.weights.checkpoint import CheckpointReader


@dataclass(frozen=True)
class ParallelState(RecurrentState):
    """State of drafts that are made together.

    num_draft_tokens: of the longest draft. masked: [B, num_draft_tokens - 1, hidden_size], outputs
    of the mask tokens; None before they run.
    """

    num_draft_tokens: int
    masked: Tensor | None


@dataclass(frozen=True)
class BlockDraft:
    """State of drafts on the device; they depend on no draft token."""

    logits: Tensor  # [B, K, len(vocab_slice)], of all draft tokens


class ParallelEagleHead(Eagle3Head):
    """One rank of a P-EAGLE head, a DeviceBlockHead."""

    reads_drafts = False
    capabilities = HeadCapabilities(on_device=DeviceDrafts.BLOCKS)

    def __init__(self, shape: Eagle3Shape, reader: CheckpointReader, target: TargetRank) -> None:
        super().__init__(shape, reader, target)
        assert shape.mask_token_id is not None
        self.shape = shape
        self.mask_token_id = shape.mask_token_id
        hidden = reader.tensors.slice("mask_hidden").to(reader.device, reader.dtype)
        self.mask_hidden = hidden.reshape(1, -1)
        self.mask_feature = self._project_mask(())

    @torch.inference_mode()
    def begin(
        self, pairs: ForwardBatch, features: Tensor, kv_cache: Tensor | None, num_draft_tokens: int
    ) -> ParallelState:
        """See DraftHead."""
        state = super().begin(pairs, features, kv_cache, num_draft_tokens)
        return ParallelState(
            state.output, state.places, state.block_size, state.kv_cache, num_draft_tokens, None
        )

    @torch.inference_mode()
    def advance(self, state: RecurrentState, token_ids: Sequence[int], index: int) -> ParallelState:
        """See DraftHead; the first call runs the mask tokens.

        Not `begin`, which also gets sequences that do not draft: after their pairs there may be KV
        that is in use.
        """
        assert isinstance(state, ParallelState)
        masked = self._run_masks(state) if state.masked is None else state.masked
        return replace(state, masked=masked, output=masked[:, index])

    @torch.inference_mode()
    def logits(self, state: RecurrentState | BlockDraft, index: int) -> Tensor:
        """See DraftHead."""
        if isinstance(state, BlockDraft):
            return state.logits[:, index]
        return super().logits(state, index)

    def block_len(self, num_draft_tokens: int) -> int:
        """See DeviceBlockHead."""
        return self.shape.block_len(num_draft_tokens)

    def block_tokens(self, token_ids: Tensor, num_draft_tokens: int) -> Tensor:
        """See DeviceBlockHead."""
        size = (len(token_ids), self.block_len(num_draft_tokens))
        return token_ids.new_full(size, self.mask_token_id)

    def run_block(self, batch: DeviceBatch, outputs: Tensor, kv_cache: Tensor) -> Tensor:
        """See DeviceBlockHead; the first draft token is that of the last pair."""
        features = self.mask_feature.expand(len(batch.input_ids), -1)
        masked = self.run_on_device(batch, features, kv_cache)
        return torch.cat([outputs[:, None], masked.view(len(outputs), batch.query_len, -1)], 1)

    def begin_on_device(self, outputs: Tensor, token_ids: Tensor) -> BlockDraft:
        """See DeviceBlockHead. One product for all tokens reads the output head once."""
        logits = self.output_logits(outputs.flatten(0, 1))
        return BlockDraft(logits.unflatten(0, outputs.shape[:2]))

    def advance_on_device(self, state: BlockDraft, token_ids: Tensor, index: int) -> BlockDraft:
        """See DeviceBlockHead."""
        return state

    def select(self, state: RecurrentState, rows: Sequence[int]) -> ParallelState:
        """See DraftHead."""
        selected = super().select(state, rows)
        assert isinstance(selected, ParallelState)
        masked = selected.masked
        return replace(selected, masked=None if masked is None else masked[list(rows)])

    @torch.inference_mode()
    def _project_mask(self, adapter_ids: Sequence[int]) -> Tensor:
        """Return the feature of a mask token: a row for each adapter, or one without any."""
        with self.running([AdapterRun(each, i, i + 1) for i, each in enumerate(adapter_ids)]):
            return self.projection.project(self.mask_hidden.expand(len(adapter_ids) or 1, -1))

    def _mask_features(self, count: int, runs: Sequence[AdapterRun]) -> Tensor:
        """Return the features [count, hidden_size] of mask tokens. runs: their adapters."""
        features, adapted = self.mask_feature.expand(count, -1), self.updating(runs)
        if not adapted:
            return features
        features = features.clone()
        own = self._project_mask([run.adapter_id for run in adapted])
        for run, feature in zip(adapted, own, strict=True):
            features[run.begin : run.end] = feature
        return features

    def _run_masks(self, state: ParallelState) -> Tensor:
        """Return the outputs of all mask tokens, [B, num_draft_tokens - 1, hidden_size].

        A shorter draft may have less room in its blocks: its last output is repeated.
        """
        wanted = state.num_draft_tokens - 1
        rooms = [len(each.block_table) * state.block_size - each.slot for each in state.places]
        counts = [min(wanted, room) for room in rooms]
        pairs = zip(counts, state.places, strict=True)
        chunks = [place.chunk([self.mask_token_id] * count) for count, place in pairs]
        batch = ForwardBatch(chunks, state.block_size)
        features = self._mask_features(sum(counts), batch.adapter_runs)
        output = self.run_pairs(batch, features, state.kv_cache)
        steps = torch.arange(wanted, device=self.device)
        return torch.stack([own[steps.clamp_max(len(own) - 1)] for own in output.split(counts)])
