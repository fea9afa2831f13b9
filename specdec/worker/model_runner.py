"""Base class of the runners of a target and of a draft model."""

from __future__ import annotations

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.loading import Decoder
from specdec.sampling.vocab_shard import VocabShard
from specdec.worker.batch_state import BatchState


class ModelRunner:
    """One rank of a model, its KV pool and the state of its sequences."""

    def __init__(
        self,
        model: Decoder,
        group: TensorParallelGroup,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        has_padding_block: bool = False,
    ) -> None:
        """Allocate the KV pool: `num_blocks` of `block_size` tokens.

        has_padding_block: whether a block follows them that no sequence has, for padded tokens.
        """
        self.model = model
        self.group = group
        self.num_blocks = num_blocks
        self.has_padding_block = has_padding_block
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.kv_cache = model.new_kv_cache((num_blocks + has_padding_block) * block_size)
        self._batch_state = BatchState(block_size, self.kv_cache.device, model.vocab_slice)

    @property
    def _shard(self) -> VocabShard:
        return VocabShard(self.group, self.model.vocab_slice.start, self.vocab_size)
