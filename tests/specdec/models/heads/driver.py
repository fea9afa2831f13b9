"""Drafts of a head over paged KV, on random hidden states and tokens."""

import json
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import save_file

from specdec.kernels.cpu import native_library
from specdec.kernels.reference.forward_batch import Chunk, ForwardBatch
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.heads.config import HeadConfig
from specdec.models.heads.loading import load_head
from specdec.models.loading import load_model
from tests.specdec.fakes import run_ranks

BLOCK_SIZE = 4
HIDDEN, VOCAB, NUM_LAYERS = 48, 383, 8
TARGET_SIZES = {
    "hidden": HIDDEN,
    "layers": NUM_LAYERS,
    "heads": 4,
    "kv_heads": 2,
    "intermediate": 40,
    "tied": False,
    "max_positions": 128,
}
KERNELS = ["torch"] + ["native"] * (native_library() is not None)
RANKS_AND_KERNELS = [
    pytest.param(size, kernels, marks=[] if is_quick else pytest.mark.slow)
    for size, kernels, is_quick in (
        (1, "torch", True),
        (1, "native", False),
        (2, "torch", len(KERNELS) == 1),
        (2, "native", True),
    )
    if kernels in KERNELS
]


@dataclass(frozen=True)
class Sequence:
    """Tokens that are known, hidden states of all but the last, and the tokens of a draft."""

    tokens: list[int]  # p + 1
    hidden: torch.Tensor  # [p, HIDDEN]
    inputs: torch.Tensor  # [p, NUM_LAYERS + 1, HIDDEN]: those entering each layer
    drafts: list[int]


def sequences(lengths=(11, 6, 23), num_drafts=5, seed=3):
    generator = torch.Generator().manual_seed(seed)

    def tokens(count):
        return torch.randint(0, VOCAB, (count,), generator=generator).tolist()

    return [
        Sequence(
            tokens(length + 1),
            torch.randn(length, HIDDEN, generator=generator),
            torch.randn(length, NUM_LAYERS + 1, HIDDEN, generator=generator),
            tokens(num_drafts),
        )
        for length in lengths
    ]


def weights(shapes, seed=0):
    """Return random tensors, in the order of `shapes`: matrices that keep the variance, norms."""
    generator = torch.Generator().manual_seed(seed)

    def make(name, shape):
        if len(shape) == 2:
            gain = 1.0 if "emb" in name else shape[1] ** -0.5
            return torch.randn(shape, generator=generator) * gain
        if name.endswith("bias"):
            return torch.randn(shape, generator=generator) * 0.3
        return torch.rand(shape, generator=generator) + 0.5

    return {name: make(name, shape) for name, shape in shapes.items()}


def save(directory, config, tensors, file="model.safetensors"):
    """Write a checkpoint; the suffix of `file` selects safetensors or a pickle."""
    directory.mkdir(exist_ok=True)
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(tensors, directory / file)
    else:
        torch.save(tensors, directory / file)
    return directory


def target_model(target_dir, group=None, kernels="torch", quantization=None, dtype=torch.float32):
    return load_model(
        target_dir,
        ModelConfig.from_directory(target_dir),
        group or TensorParallelGroup(),
        dtype=dtype,
        max_model_len=64,
        block_size=BLOCK_SIZE,
        quantization=quantization,
        kernels=kernels,
    )


def draft_logits(config, target_dir, parts, *, size=1, kernels="torch", borders=(), **options):
    """Return the logits [B, K, draft_vocab_size] of drafts of `config` on `size` ranks.

    borders: slots at which `begin` is called for the pairs before them, at first.
    """

    def run(group):
        torch.set_num_threads(1)  # a setting of each thread
        target = target_model(target_dir, group, kernels, options.get("quantization"))
        return Drafting(load_head(config, target, **options), parts).run(borders)

    return torch.cat(run_ranks(size, run), dim=2)


def head_logits(directory, target_dir, parts, **options):
    """As `draft_logits`, for the head in `directory`."""
    target = ModelConfig.from_directory(target_dir)
    return draft_logits(HeadConfig.from_directory(directory, target), target_dir, parts, **options)


def selected_logits(directory, target_dir, parts):
    """Return `Drafting.run_selected` of the head in `directory`."""
    config = HeadConfig.from_directory(directory, ModelConfig.from_directory(target_dir))
    return Drafting(load_head(config, target_model(target_dir)), parts).run_selected()


class Drafting:
    """Sequences whose pairs one head runs, in scattered blocks of its pool."""

    def __init__(self, head, parts):
        self.head, self.parts = head, parts
        num_blocks = 12
        order = torch.randperm(len(parts) * num_blocks, generator=torch.Generator().manual_seed(7))
        self.tables = order.view(len(parts), num_blocks).tolist()
        self.cache = head.new_kv_cache(len(parts) * num_blocks * BLOCK_SIZE)
        if self.cache is not None:
            self.cache.fill_(float("nan"))  # what is not written must not be read
        self.features = [
            head.features(part.inputs[:, list(head.taps)] if head.taps else part.hidden)
            for part in parts
        ]

    def run(self, borders=(), num_drafts=None):
        """Return the logits [B, K, V_local] of the drafts after all pairs."""
        count = num_drafts or len(self.parts[0].drafts)
        if self.head.max_draft_tokens is not None:
            count = min(count, self.head.max_draft_tokens)
        starts = [1] * len(self.parts)
        if self.head.num_kv_layers == 0:
            starts = [len(part.tokens) - 1 for part in self.parts]
        for border in borders if self.head.num_kv_layers else ():
            ends = [min(border, len(part.tokens) - 1) for part in self.parts]
            self.begin(starts, ends, 0)
            starts = [max(pair) for pair in zip(starts, ends, strict=True)]
        state = self.begin(starts, [len(part.tokens) for part in self.parts], count)
        logits = []
        for index in range(count):
            logits.append(self.head.logits(state, index).clone())
            if index + 1 < count:
                drafts = [part.drafts[index] for part in self.parts]
                state = self.head.advance(state, drafts, index)
        return torch.stack(logits, dim=1)

    def run_selected(self):
        """Return the logits of drafts of which the last sequence alone continues, [1, K, V]."""
        count = len(self.parts[0].drafts)
        if self.head.max_draft_tokens is not None:
            count = min(count, self.head.max_draft_tokens)
        self.run(num_drafts=1)
        starts = [len(part.tokens) - 1 for part in self.parts]
        state = self.begin(starts, [start + 1 for start in starts], count)
        last = len(self.parts) - 1
        logits = [self.head.logits(state, 0)[last:].clone()]
        for index in range(count - 1):
            rows = [part.drafts[index] for part in self.parts] if index == 0 else None
            drafts = rows or [self.parts[last].drafts[index]]
            state = self.head.advance(state, drafts, index)
            if index == 0:
                state = self.head.select(state, [last])
            logits.append(self.head.logits(state, index + 1).clone())
        return torch.stack(logits, dim=1)

    def begin(self, starts, ends, count):
        """Run the pairs from `starts` to `ends` of the sequences that have any."""
        rows = [
            row for row in zip(range(len(starts)), starts, ends, strict=True) if row[1] < row[2]
        ]
        chunks = [
            Chunk(self.parts[i].tokens[start:end], start, self.tables[i]) for i, start, end in rows
        ]
        features = torch.cat([self.features[i][start - 1 : end - 1] for i, start, end in rows])
        return self.head.begin(ForwardBatch(chunks, BLOCK_SIZE), features, self.cache, count)
