"""Forward passes over paged KV as the runner makes them: prefill, decode and verification."""

import torch

from specdec.model_config import ModelConfig
from specdec.model_input import ModelInput
from specdec.models import load_model

BLOCK_SIZE = 4


def batch_of(parts):
    """parts: (token_ids, start, block_table) of each sequence; tokens before start have KV."""
    positions = [p for ids, start, _ in parts for p in range(start, len(ids))]
    tables = [table for ids, start, table in parts for _ in range(start, len(ids))]
    slots = [
        table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
        for p, table in zip(positions, tables, strict=True)
    ]
    lengths = [len(ids) - start for ids, start, _ in parts]
    width = max(len(table) for _, _, table in parts)
    return ModelInput(
        input_ids=torch.tensor([token for ids, start, _ in parts for token in ids[start:]]),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        cu_seqlens_q=(0, *torch.tensor(lengths).cumsum(0).tolist()),
        context_lens=tuple(len(ids) for ids, _, _ in parts),
        block_tables=torch.tensor([table + [0] * (width - len(table)) for _, _, table in parts]),
    )


def load(directory, group, dtype=torch.float32, quantization=None):
    config = ModelConfig.from_directory(directory)
    return load_model(
        directory,
        config,
        group,
        dtype=dtype,
        max_model_len=128,
        block_size=BLOCK_SIZE,
        quantization=quantization,
    )


def mixed_logits(directory, ids, group, dtype=torch.float32, quantization=None):
    """Logits of two sequences, by way of chunks, decode rows and several rows at once."""
    model = load(directory, group, dtype, quantization)
    cache = model.new_kv_cache(40 * BLOCK_SIZE)
    first, second = list(range(3, 20)), list(range(39, 24, -1))
    a, b = ids
    with torch.inference_mode():
        parts = [[(a[:30], 0, first)], [(a[:33], 30, first), (b[:20], 0, second)]]
        parts.append([(a[:34], 33, first), (b[:27], 20, second)])
        logits = [model.compute_logits(model(batch_of(part), cache)).clone() for part in parts]
    return torch.cat(logits)


def in_pass_order(logits):
    """The logits of two whole sequences, in the order of `mixed_logits`."""
    a, b = logits
    return torch.cat([a[:30], a[30:33], b[:20], a[33:34], b[20:27]])
