"""Hydra heads: x <- R x + SiLU(W x) of the hidden state and the drafted tokens' embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.kernels.reference.forward_batch import AdapterRun, ForwardBatch, on_device
from specdec.models.heads.formats.hydra import HydraShape
from specdec.models.heads.networks.adapted import AdaptedNetwork, RowState
from specdec.models.heads.networks.base import DeviceDrafts, HeadCapabilities
from specdec.models.heads.networks.projection import SharedInputLinear
from specdec.models.heads.networks.target import TargetRank
from specdec.models.layers.linear import VocabHead
from specdec.models.weights.checkpoint import CheckpointReader


class ResidualLayer(nn.Module):
    """One layer of a head; the first one projects its residual, too."""

    def __init__(
        self, shape: HydraShape, reader: CheckpointReader, head: int, layer: int, target: TargetRank
    ) -> None:
        super().__init__()
        prefix = f"blocks.{head}.{layer}"
        size = (shape.hidden_size, shape.input_size(head, layer))
        self.linear = SharedInputLinear(
            reader, f"{prefix}.linear", size, target.group, has_bias=True
        )
        self.residual: nn.Module = nn.Identity()
        if layer == 0:
            self.residual = SharedInputLinear(
                reader, f"{prefix}.res_connection", size, target.group, has_bias=True
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, hidden_size]; x: [B, input_size]."""
        output: Tensor = self.residual(x) + F.silu(self.linear(x))
        return output


class BiasedHead(nn.Module):
    """This rank's part of an output head with a bias."""

    def __init__(
        self, shape: HydraShape, reader: CheckpointReader, head: int, target: TargetRank
    ) -> None:
        super().__init__()
        name, own = f"lm_heads.{head}", target.vocab_slice
        size = (shape.draft_vocab_size, shape.hidden_size)
        self.head = VocabHead(reader, f"{name}.weight", size, own)
        self.bias: Tensor | None = None
        if shape.has_head_bias:
            self.bias = reader.read(f"{name}.bias", size[:1], rows=own)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, V_local]; x: [B, hidden_size]."""
        logits: Tensor = self.head(x)
        return logits if self.bias is None else logits + self.bias


class HydraHeads(AdaptedNetwork):
    """One rank of Hydra heads, a DraftHead without KV.

    Its state is [B, (i + 2) * hidden_size] of head i: feature, then embeddings in order.
    """

    num_kv_layers = 0
    reads_drafts = True
    capabilities = HeadCapabilities(on_device=DeviceDrafts.STATES)
    target_ids: Tensor | None = None

    def __init__(self, shape: HydraShape, reader: CheckpointReader, target: TargetRank) -> None:
        super().__init__()
        self.taps, self.feature_size = shape.taps, shape.feature_size
        self.max_draft_tokens: int | None = shape.max_draft_tokens
        self.vocab_size, self.vocab_slice = shape.draft_vocab_size, target.vocab_slice
        self.device, self.dtype = target.device, target.dtype
        self.embed_tokens = target.embed_tokens
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(
                    ResidualLayer(shape, reader, head, layer, target)
                    for layer in range(shape.num_layers)
                )
            )
            for head in range(shape.num_heads)
        )
        self.lm_heads = nn.ModuleList(
            BiasedHead(shape, reader, head, target) for head in range(shape.num_heads)
        )

    def new_kv_cache(self, num_slots: int) -> None:
        """See DraftHead."""

    def features(self, states: Tensor, runs: Sequence[AdapterRun] = ()) -> Tensor:
        """See DraftHead."""
        del runs
        return states.to(self.dtype)

    @torch.inference_mode()
    def begin(
        self, pairs: ForwardBatch, features: Tensor, kv_cache: Tensor | None, num_draft_tokens: int
    ) -> RowState:
        """See DraftHead."""
        state = RowState.of(features.to(self.dtype), pairs)
        return self._appended(state, on_device(pairs.input_ids, self.device))

    def begin_on_device(self, features: Tensor, token_ids: Tensor) -> RowState:
        """See DeviceStateHead."""
        return self._appended(RowState(features.to(self.dtype)), token_ids)

    @torch.inference_mode()
    def logits(self, state: RowState, index: int) -> Tensor:
        """See DraftHead."""
        with self.running(state.runs):
            hidden = self.blocks[index](state.values)
        logits: Tensor = self.lm_heads[index](hidden)
        return logits

    @torch.inference_mode()
    def advance(self, state: RowState, token_ids: Sequence[int], index: int) -> RowState:
        """See DraftHead."""
        tokens = torch.tensor(token_ids, dtype=torch.int64, device=self.device)
        return self.advance_on_device(state, tokens, index)

    def advance_on_device(self, state: RowState, token_ids: Tensor, index: int) -> RowState:
        """See DeviceStateHead."""
        return self._appended(state, token_ids)

    def select(self, state: RowState, rows: Sequence[int]) -> RowState:
        """See DraftHead."""
        return state.select(rows)

    def _appended(self, state: RowState, token_ids: Tensor) -> RowState:
        inputs, embedded = state.values, self.embed_tokens(token_ids)
        return state._replace(values=torch.cat([inputs, embedded.to(inputs.dtype)], dim=1))
