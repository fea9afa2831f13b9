"""Base class of the runners of a target and of a draft model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

from specdec.config.engine import DraftLimits, EngineConfig
from specdec.config.gpu.graph_sizes import ragged_token_counts
from specdec.kernels.reference.state_pool import StatePool
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.loading import Decoder
from specdec.sampling.row_ops import RowOps, row_ops_of
from specdec.sampling.vocab_shard import VocabShard
from specdec.worker.adapters import RankAdapters
from specdec.worker.batch.batch_state import BatchState
from specdec.worker.device.agreed_graphs import graphs_of_ranks
from specdec.worker.device.decoder import DeviceDecoder
from specdec.worker.device.state import DeviceStepLimits
from specdec.worker.device.step_graphs import GraphBackend, GraphReport, StepGraphs
from specdec.worker.device.steps import MAX_IN_FLIGHT, DeviceSteps
from specdec.worker.head.parts import DrafterParts


@dataclass(frozen=True)
class LoadedModel:
    """One rank's shard of a model, and what its runner needs beside it.

    has_padding_block: whether a block follows the KV pool that no sequence has, for padded tokens.
    adapters: those that rows may name; None where none can be loaded. states: of recurrent layers,
    of as many sequences as there can be; None without such layers. row_ops: operations on rows of
    logits; None for the fastest of the device.
    """

    model: Decoder
    group: TensorParallelGroup
    vocab_size: int
    has_padding_block: bool = False
    adapters: RankAdapters | None = None
    states: StatePool | None = None
    row_ops: RowOps | None = None


class ModelRunner:
    """One rank of a model, its KV pool and the state of its sequences."""

    def __init__(self, loaded: LoadedModel, limits: EngineConfig | DraftLimits) -> None:
        """Allocate the KV pool: `limits.num_blocks` of `limits.block_size` tokens."""
        self.model, self.group, self.adapters = loaded.model, loaded.group, loaded.adapters
        self.vocab_size, self.has_padding_block = loaded.vocab_size, loaded.has_padding_block
        self.num_blocks, self.block_size = limits.num_blocks, limits.block_size
        num_blocks = self.num_blocks + self.has_padding_block
        self.kv_cache = self.model.new_kv_cache(num_blocks * self.block_size)
        self._limits, self._has_states = limits, loaded.states is not None
        self._row_ops = loaded.row_ops or row_ops_of("auto", self.kv_cache.device)
        self._batch_state = BatchState(
            self.block_size, self.kv_cache.device, self.model.vocab_slice, loaded.states
        )

    @property
    def _shard(self) -> VocabShard:
        first_token = self.model.vocab_slice.start
        return VocabShard(self.group, first_token, self.vocab_size, self._row_ops)

    def _captured_steps(
        self,
        backend: GraphBackend | None,
        *,
        max_draft_tokens: int,
        max_tree_nodes: int = 0,
        max_tree_depth: int = 0,
        max_step_tokens: int = 0,
        num_in_flight: int = MAX_IN_FLIGHT,
        drafter: DrafterParts | None = None,
    ) -> tuple[DeviceSteps, GraphReport]:
        """Return steps on the device over this pool, with the graphs that the backend captures.

        A collective call: all ranks have graphs, or none has.

        max_step_tokens: of a step with prompts; 0 where the host runs these. max_tree_nodes,
        max_tree_depth: as in DeviceStepLimits. drafter: as in DeviceSteps.
        """
        sizes = DeviceStepLimits(
            max_num_seqs=self._limits.max_num_seqs,
            max_draft_tokens=max_draft_tokens,
            max_model_len=self._limits.max_model_len,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            max_step_tokens=max_step_tokens,
            max_tree_nodes=0 if self._has_states else max_tree_nodes,  # drafts are chains then
            max_tree_depth=max_tree_depth,
            has_states=self._has_states,
        )
        model = cast(DeviceDecoder, self.model)
        graphs = _new_graphs(graphs_of_ranks(backend, self.group), sizes, model)
        steps = DeviceSteps(
            model, self.kv_cache, self._shard, sizes, graphs, num_in_flight, drafter
        )
        report = steps.capture()
        if self.kv_cache.is_cuda:
            torch.cuda.empty_cache()  # of the runs before the captures
        return steps, report


def _new_graphs(
    backend: GraphBackend | None, sizes: DeviceStepLimits, model: DeviceDecoder
) -> StepGraphs:
    return StepGraphs(
        backend,
        max_num_seqs=sizes.max_num_seqs,
        max_draft_tokens=sizes.max_draft_tokens,
        num_blocks=sizes.blocks_of_longest,
        ragged_tokens=ragged_token_counts(sizes.max_step_tokens, model.hidden_size),
        has_adapters=model.adapter_places is not None,
        max_tree_nodes=sizes.max_tree_nodes,
        max_growing_rows=sizes.max_growing_rows,
    )
