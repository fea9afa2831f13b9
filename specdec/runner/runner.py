"""What the workers of a target and of a draft model have in common."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.models import LlamaForCausalLM
from specdec.parallel import TensorParallelGroup
from specdec.runner.sequences import SampledToken, SequenceTable
from specdec.sampling import apply_token_masks, sample


class Runner:
    """One rank of a model, its KV pool, and what it knows of the sequences."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        group: TensorParallelGroup,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
    ) -> None:
        """Allocates the KV pool: `num_blocks` of `block_size` tokens."""
        self.model = model
        self.group = group
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.kv_cache = model.new_kv_cache(num_blocks * block_size)
        self._sequences = SequenceTable(block_size, self.kv_cache.device)

    def _draw(
        self,
        hidden: Tensor,
        tokens: Many[SampledToken],
        masks: Many[NDArray[np.int32] | None],
    ) -> Tensor:
        """The token ids, [R] int64, that follow `hidden` [R, hidden_size]; a collective call.

        masks: one for each row, as in StepRow.grammar_mask.
        """
        logits = self.model.compute_logits(hidden)
        masked = [(row, mask) for row, mask in enumerate(masks) if mask is not None]
        if masked:
            rows = torch.tensor([row for row, _ in masked], device=logits.device)
            words = torch.from_numpy(np.stack([mask for _, mask in masked])).to(logits.device)
            apply_token_masks(logits, rows, words, self.model.vocab_slice.start)
        batch = self._sequences.sampling_batch(tokens)
        return sample(logits, batch, self.group, self.model.vocab_slice.start, self.vocab_size)
