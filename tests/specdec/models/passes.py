"""Forward passes over paged KV, as a runner executes them: prefill, decode and verification."""

import torch

from specdec.config.engine import DEFAULT_MODEL_OPTIONS
from specdec.kernels.reference.forward_batch import Chunk, ForwardBatch
from specdec.models.config.model_config import ModelConfig
from specdec.models.cpu_decoder import NativeDecoder
from specdec.models.hybrid import HybridDecoder
from specdec.models.loading import load_model

BLOCK_SIZE = 4


def batch_of(parts):
    """Build a batch; parts: (token_ids, start, block_table); tokens before start have KV."""
    chunks = [Chunk(ids[start:], start, table, state_slot=table[0]) for ids, start, table in parts]
    return ForwardBatch(chunks, BLOCK_SIZE)


def weights_of(model):
    """Return the torch layers of a model."""
    return model.torch_decoder if isinstance(model, NativeDecoder) else model


def load(
    directory,
    group,
    dtype=torch.float32,
    quantization=None,
    kernels="auto",
    options=DEFAULT_MODEL_OPTIONS,
):
    config = ModelConfig.from_directory(directory, options)
    return load_model(
        directory,
        config,
        group,
        dtype=dtype,
        max_model_len=128,
        block_size=BLOCK_SIZE,
        quantization=quantization,
        kernels=kernels,
    )


def mixed_logits(
    directory, ids, group, dtype=torch.float32, quantization=None, lengths=(34, 27), **how
):
    """Return logits of two sequences, from chunked prefill, decode and several rows at once.

    lengths: number of tokens that are run of each.
    """
    model = load(directory, group, dtype, quantization, **how)
    cache = model.new_kv_cache(40 * BLOCK_SIZE)
    decoder = weights_of(model)
    if isinstance(decoder, HybridDecoder):
        decoder.enable_states(40, 0)
    first, second = list(range(3, 20)), list(range(39, 24, -1))
    a, b = (each[:length] for each, length in zip(ids, lengths, strict=True))
    chunk, prefill, other = len(a) - 4, len(a) - 1, len(b) - 7
    with torch.inference_mode():
        parts = [[(a[:chunk], 0, first)], [(a[:prefill], chunk, first), (b[:other], 0, second)]]
        parts.append([(a, prefill, first), (b, other, second)])
        logits = [model.compute_logits(model(batch_of(part), cache)).clone() for part in parts]
    return torch.cat(logits)


def in_pass_order(logits):
    """Reorder the logits of two whole sequences to the order of `mixed_logits`."""
    a, b = logits
    return torch.cat([a[:30], a[30:33], b[:20], a[33:34], b[20:27]])
