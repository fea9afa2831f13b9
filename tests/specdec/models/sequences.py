"""Sequences that run in chunks, in scattered blocks of a KV pool.

This module does not import transformers, which takes seconds in each process that is a rank.
"""

import torch

from specdec.kernels.cpu import SharedMemory, native_library
from specdec.kernels.reference.forward_batch import Chunk, ForwardBatch
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.loading import load_model

NUM_TOKENS = 700
"""More than two KV splits of attention, and not a multiple of any block size."""


def load(
    directory, block_size, dtype=torch.float32, group=None, kernels="native", quantization=None
):
    return load_model(
        directory,
        ModelConfig.from_directory(directory),
        group or TensorParallelGroup(),
        dtype=dtype,
        max_model_len=1024,
        block_size=block_size,
        quantization=quantization,
        kernels=kernels,
    )


def texts(count, length=NUM_TOKENS):
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 383, (count, length), generator=generator).tolist()


class Sequences:
    """Sequences that run in chunks on one model, in scattered blocks of its pool."""

    def __init__(self, model, block_size, count=1):
        self.model, self.block_size = model, block_size
        num_blocks = -(-NUM_TOKENS // block_size)
        order = torch.randperm(count * num_blocks, generator=torch.Generator().manual_seed(7))
        self.tables = order.view(count, num_blocks).tolist()
        self.cache = model.new_kv_cache(count * num_blocks * block_size)

    @torch.inference_mode()
    def run(self, *parts):
        """Run parts (sequence, token_ids, start); return the logits of each."""
        chunks = [Chunk(ids, start, self.tables[index]) for index, ids, start in parts]
        hidden = self.model(ForwardBatch(chunks, self.block_size), self.cache)
        logits = self.model.compute_logits(hidden)
        return logits.split([len(ids) for _, ids, _ in parts])


def rank_logits(rank, size, directory, address):
    """Compute logits on one rank of processes that share memory."""
    torch.set_num_threads(2)
    shared = SharedMemory(native_library(), rank, size, address, timeout_s=30)
    group = TensorParallelGroup(rank, size, shared)
    (text,) = texts(1, 300)
    logits = Sequences(load(directory, 16, group=group), 16).run((0, text, 0))[0]
    return logits.numpy()
