"""Whole drafts on one rank of several processes; imports nothing that takes seconds to import."""

import torch

from specdec.kernels.cpu import SharedMemory, native_library
from specdec.kernels.reference.forward_batch import Chunk, ForwardBatch, PairInputs
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.heads.config import HeadConfig
from specdec.models.heads.loading import load_head
from tests.specdec.models.heads.driver import BLOCK_SIZE, Drafting, sequences, target_model
from tests.specdec.sampling.sampling_rows import sampling_rows

COUNTS = (5, 1, 4)


def params(temperature):
    """Return the sampling parameters of the first draft tokens of three sequences."""
    return sampling_rows([9] * 3, temperature=temperature, seed=[3, 4, 5]).params


class WholeDrafts(Drafting):
    """Sequences that a head drafts for in one call."""

    def draft(self, temperature):
        return self.head.draft(self._inputs(), COUNTS, params(temperature))

    def draft_trees(self, temperature, sizes):
        return self.head.draft_trees(self._inputs(), sizes, params(temperature))

    def _inputs(self):
        chunks = [
            Chunk(part.tokens[1:], 1, table)
            for part, table in zip(self.parts, self.tables, strict=True)
        ]
        return PairInputs(ForwardBatch(chunks, BLOCK_SIZE), torch.cat(self.features), self.cache)


def make_head(directory, target_dir, group=None, quantization=None):
    config = HeadConfig.from_directory(directory, ModelConfig.from_directory(target_dir))
    return load_head(config, target_model(target_dir, group, kernels="native"), quantization)


def rank_drafts(rank, size, directory, target_dir, address):
    """Draft on one rank of processes that share memory."""
    torch.set_num_threads(2)
    shared = SharedMemory(native_library(), rank, size, address, timeout_s=30)
    head = make_head(directory, target_dir, TensorParallelGroup(rank, size, shared))
    assert head.capabilities.drafts_whole
    drafts = WholeDrafts(head, sequences())
    return [drafts.draft(temperature) for temperature in (0.0, 0.8)]
