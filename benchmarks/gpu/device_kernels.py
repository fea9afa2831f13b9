"""Each Triton kernel on the device against its reference, which torch computes on the CPU.

The interpreter has the semantics of the kernels, not the device's rounding, memory or instructions;
bfloat16 is wrong there. Each case has the relative error: the norm of the difference over the norm
of the reference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.attention_shapes import ALL_DTYPES, SHAPES, Shape
from benchmarks.gpu.parts import Case, Context, PartSkippedError, Result, run_cases
from benchmarks.gpu.truncation_floors import truncation_cases
from specdec.kernels import PagedAttention
from specdec.kernels.backend import KernelBackend
from specdec.kernels.moves import AcceptedPaths, move_kv, move_slots, path_moves
from specdec.kernels.reference.attention import QueryKeyNorms, Rotation, Visible
from specdec.kernels.reference.device_batch import DeviceBatch, RaggedBatch
from specdec.kernels.reference.forward_batch import Chunk, ForwardBatch, Indices, SlotMove
from specdec.kernels.reference.rows import RowKernels, quantize_rows
from specdec.kernels.reference.triton_availability import triton_fault
from specdec.sampling.device.device_sampler import DeviceRules, DeviceSample, SamplingKind
from specdec.sampling.device.device_trees import DeviceTrees, verify_trees
from specdec.sampling.gumbel import NoiseKeys
from specdec.sampling.row_ops import row_ops_of
from specdec.sampling.truncation import DeviceLimits

_CPU = torch.device("cpu")
_MAX_ERROR = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
_MAX_CONFIDENCE_ERROR = 1e-4
_MAX_OTHER_TOKENS = 0.02
"""Share of rows whose sampled token may differ, where two scores are equal within rounding."""


def check_attention_kernels(context: Context, dtypes: Sequence[torch.dtype]) -> Result:
    """Compare attention, and the kernel that rotates and stores, in some data types."""
    require_triton(context)
    names = list(SHAPES)[: 3 if context.is_small else None]
    cases: list[Case] = [
        (f"{name}, {name_of(dtype)}", partial(_attention, SHAPES[name], dtype, context.device))
        for dtype in dtypes
        for name in names
        if dtype is torch.bfloat16 or name in ALL_DTYPES
    ]
    cases += [
        (f"rotate and store, {name_of(dtype)}", partial(_rotate_and_store, dtype, context.device))
        for dtype in dtypes
    ]
    return run_cases(cases, context)


def _attention(shape: Shape, dtype: torch.dtype, device: torch.device) -> Result:
    """Attend on both kernels, with the KV of the batch written by the same call."""
    batch, slots = batch_of(shape)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(batch.num_tokens, shape.heads, shape.head_dim, generator=generator)
    plain, attention = reference_of(shape), attention_of(shape, device)
    sizes = (plain.kv_parts, shape.kv_heads, shape.head_dim)
    kv = torch.randn(batch.num_tokens, *sizes, generator=generator)
    cache = torch.randn(slots, *sizes, generator=generator)
    sinks = torch.randn(shape.heads, generator=generator) * 3
    query, kv, cache, sinks = (each.to(dtype) for each in (query, kv, cache, sinks))
    expected = plain.run(
        query.float(),
        kv.float(),
        cache.float(),
        plain.plan(batch, torch.float32, Visible(shape.window)),
        sinks.float() if shape.has_sinks else None,
    )
    stored = cache.to(device)
    if shape.layout == "host":
        plan = attention.plan(batch, dtype, Visible(shape.window))
    else:
        own = (_fixed if shape.layout == "fixed" else _ragged)(shape, batch, device)
        plan = attention.plan_on_device(own, dtype, Visible(shape.window))
    own_sinks = sinks.to(device) if shape.has_sinks else None
    found = attention.run(query.to(device), kv.to(device), stored, plan, own_sinks)
    cache[torch.from_numpy(batch.slot_mapping).long()] = kv
    is_stored = torch.equal(stored.cpu(), cache)
    return compared(found, expected, dtype) | ({} if is_stored else WRONG_CACHE)


WRONG_CACHE: Result = {"passed": False, "error": "the cache has other keys or values"}


def reference_of(shape: Shape) -> PagedAttention:
    """Return torch's attention on the CPU."""
    sizes = shape.head_dim, shape.block_size
    return PagedAttention(
        shape.shard, *sizes, _CPU, softcap=shape.softcap, latent_rank=shape.latent_rank
    )


def attention_of(shape: Shape, device: torch.device) -> PagedAttention:
    """Return Triton's attention on the device."""
    from specdec.kernels.triton.attention import TritonAttention  # imports Triton

    return TritonAttention(
        shape.shard,
        shape.head_dim,
        shape.block_size,
        device,
        softcap=shape.softcap,
        latent_rank=shape.latent_rank,
    )


def batch_of(shape: Shape) -> tuple[ForwardBatch, int]:
    """Return a batch on scattered blocks, and the slots of the cache."""
    counts = [-(-context // shape.block_size) for context, _ in shape.lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).tolist()
    chunks, first = [], 0
    for (context, query), count in zip(shape.lengths, counts, strict=True):
        table = order[first : first + count]
        chunks.append(Chunk((1,) * query, context - query, table, shape.tree))
        first += count
    return ForwardBatch(chunks, shape.block_size), first * shape.block_size


def _fixed(shape: Shape, batch: ForwardBatch, device: torch.device) -> DeviceBatch:
    """Return a batch whose sequences have equally many tokens, as a graph has it."""

    def tensor(indices: Indices) -> Tensor:
        return torch.from_numpy(indices).long().to(device)

    return DeviceBatch(
        input_ids=tensor(batch.input_ids),
        positions=tensor(batch.positions),
        slot_mapping=tensor(batch.slot_mapping),
        block_tables=tensor(batch.block_tables),
        context_lens=tensor(batch.context_lens),
        query_len=shape.lengths[0][1],
    )


def _ragged(shape: Shape, batch: ForwardBatch, device: torch.device) -> RaggedBatch:
    """Return a batch followed by sequences that have no tokens."""
    fixed, bounds = _fixed(shape, batch, device), torch.from_numpy(batch.cu_seqlens_q).to(device)
    rows = torch.arange(batch.num_sequences, device=device)
    return RaggedBatch(
        fixed.input_ids,
        fixed.positions,
        fixed.slot_mapping,
        rows=rows.repeat_interleave(bounds.diff().long()),
        cu_seqlens=torch.cat([bounds, bounds[-1:].expand(3)]),
        block_tables=torch.cat([fixed.block_tables, fixed.block_tables[:1].expand(3, -1)]),
        context_lens=torch.cat([fixed.context_lens, fixed.context_lens[:1].expand(3)]),
        decode_len=4,
    )


@dataclass
class _Norm:
    """A norm of heads, in torch."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return RowKernels().rms_norm(x, self.weight, self.eps)


def _rotate_and_store(dtype: torch.dtype, device: torch.device) -> Result:
    """Normalize, rotate and store the heads of a decode, then attend, on both kernels."""
    shape = Shape(((700, 3), (40, 1)))
    batch, slots = batch_of(shape)
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    heads = normal(batch.num_tokens, shape.heads + 2 * shape.kv_heads, shape.head_dim)
    cache = normal(slots, 2, shape.kv_heads, shape.head_dim)
    weights = normal(2, shape.head_dim)
    angles = torch.rand(batch.num_tokens, 1, shape.head_dim // 2, generator=generator) * 6
    cos = torch.cat([angles.cos()] * 2, -1).to(dtype)
    sin = torch.cat([-angles.sin(), angles.sin()], -1).to(dtype)
    found: list[tuple[Tensor, Tensor]] = []
    kernels: tuple[PagedAttention, ...] = (reference_of(shape), attention_of(shape, device))
    for attention, kind in zip(kernels, (torch.float32, dtype), strict=True):
        inputs = (heads, cache, *weights, cos, sin)  # two of which the call changes
        own = [each.to(attention.device, kind, copy=True) for each in inputs]
        plan = attention.plan(batch, kind)
        norms = QueryKeyNorms(_Norm(own[2], 1e-5), _Norm(own[3], 1e-5))
        rotation = Rotation(own[4], own[5])
        output = attention.rotate_and_run(own[0], norms, rotation, own[1], plan)
        found.append((output, own[1]))
    (expected, expected_cache), (output, stored) = found
    attended = compared(output, expected, dtype)
    return attended if not attended["passed"] else compared(stored, expected_cache, dtype)


def check_row_kernels(context: Context) -> Result:
    """Compare norms, the gate and the quantization of rows."""
    require_triton(context)
    cases: list[Case] = [
        (f"{kind} of {size}, {name_of(dtype)}", partial(_rows, kind, size, dtype, context.device))
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for size in (576, 4096, 14336)
        for kind in ("norm", "norm of sum", "gate", "int8", "fp8")
    ]
    return run_cases(cases, context)


def _rows(kind: str, size: int, dtype: torch.dtype, device: torch.device) -> Result:
    from specdec.kernels.triton.rows import TritonRowKernels  # imports Triton
    from specdec.kernels.triton.rows import quantize_rows as quantize_on_device

    generator = torch.Generator().manual_seed(0)
    x, residual = torch.randn(2, 5, 2 * size, generator=generator).to(dtype)
    weight = torch.randn(size, generator=generator).to(dtype)
    plain, kernels = RowKernels(), TritonRowKernels()
    if kind in ("int8", "fp8"):
        to = torch.int8 if kind == "int8" else torch.float8_e4m3fn
        values, scales = quantize_rows(x, to)
        found, found_scales = quantize_on_device(x.to(device), to)
        expected = values.float() * scales[:, None]
        scaled = found.float() * found_scales[:, None]
        return compared(scaled, expected, torch.bfloat16 if kind == "fp8" else torch.float16)
    if kind == "gate":
        return compared(kernels.silu_mul(x.to(device)), plain.silu_mul(x.float()), dtype)
    x, residual, eps = x[:, :size].contiguous(), residual[:, :size].contiguous(), 1e-5
    own_x, own_weight = x.to(device), weight.to(device)
    if kind == "norm":
        expected = plain.rms_norm(x.float(), weight.float(), eps)
        return compared(kernels.rms_norm(own_x, own_weight, eps), expected, dtype)
    expected = plain.rms_norm((residual + x).float(), weight.float(), eps)
    _, normed = kernels.add_rms_norm(residual.to(device), own_x, own_weight, eps)
    return compared(normed, expected, dtype)


def check_sampling_kernels(context: Context) -> Result:
    """Compare argmax, noise, truncation and its floors, and the best tokens for trees of drafts."""
    require_triton(context)
    sizes = ((64, 5000),) if context.is_small else ((64, 5000), (8, 128256), (200, 32000))
    cases: list[Case] = [
        (
            f"{name}{kind.name.lower()}, {rows} rows of {vocab}",
            partial(check, kind, rows, vocab, context.device),
        )
        for name, check in (("", _sampling), ("children, ", _children))
        for rows, vocab in sizes
        for kind in SamplingKind
    ]
    return run_cases(cases + truncation_cases(context), context)


def _sampling(kind: SamplingKind, num_rows: int, vocab: int, device: torch.device) -> Result:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(num_rows, vocab, generator=generator)
    logits[1, 7], logits[2, 9], logits[3] = torch.nan, torch.inf, -torch.inf
    expected, found = (
        row_ops_of("auto", place).sample(logits.to(place), _rules(kind, num_rows, place))
        for place in (_CPU, device)
    )
    valid = ~expected.is_invalid
    differing = (found.token_ids.cpu() != expected.token_ids)[valid].float().mean().item()
    is_same = torch.equal(found.is_invalid.cpu(), expected.is_invalid)
    limit = 0.0 if kind is SamplingKind.GREEDY else _MAX_OTHER_TOKENS
    return {"passed": is_same and differing <= limit, "differing": differing, "flags": is_same}


def _children(kind: SamplingKind, num_rows: int, vocab: int, device: torch.device) -> Result:
    """Compare the best tokens of rows; of equal scores on both sides, rounding may decide."""
    logits = 3 * torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(0))
    logits[1, 7], logits[2, 9], logits[3] = torch.nan, torch.inf, -torch.inf
    expected, found = (
        row_ops_of("auto", place).children(logits.to(place), _rules(kind, num_rows, place), 12)
        for place in (_CPU, device)
    )
    is_child = expected.confidences > 0
    has_same = torch.equal(found.confidences.cpu() > 0, is_child)
    is_other = (found.token_ids.cpu() != expected.token_ids) & is_child
    differing = is_other[is_child].float().mean().item()
    error = (found.confidences.cpu() - expected.confidences)[~is_other].abs().max().item()
    limit = 0.0 if kind is SamplingKind.GREEDY else _MAX_OTHER_TOKENS
    passed = has_same and differing <= limit and error <= _MAX_CONFIDENCE_ERROR
    return {"passed": passed, "differing": differing, "flags": has_same, "error": error}


def _rules(kind: SamplingKind, num_rows: int, device: torch.device) -> DeviceRules | None:
    """Return rules in which each third row is greedy, and each other one has its own limits."""
    if kind is SamplingKind.GREEDY:
        return None
    places = torch.arange(num_rows, device=device)
    is_cut = (places % 2 == 0) & (kind is SamplingKind.TRUNCATED)
    return DeviceRules(
        temperatures=torch.where(places % 3 == 0, 0.0, 0.8).float(),
        limits=DeviceLimits(
            top_k=torch.where(is_cut, 5 + places, 0),
            top_p=torch.where(is_cut & (places % 4 == 0), 0.9, 1.0).double(),
            min_scores=torch.where(is_cut & (places % 5 == 0), math.log(0.01), -torch.inf).float(),
        ),
        keys=NoiseKeys(seeds=places * 7919 - 3, choices=places % 2, positions=places + 11),
        truncates=kind is SamplingKind.TRUNCATED,
    )


def check_verification_kernels(context: Context) -> Result:
    """Compare the walk through trees of drafts, and the moves of KV after it."""
    require_triton(context)
    cases: list[Case] = [
        ("walk and moves of trees", partial(_walk, context.device)),
        ("moves of a list", partial(_moves, context.device)),
    ]
    return run_cases(cases, context)


def _walk(device: torch.device) -> Result:
    """Compare kernels with their references in torch, for trees, chains and drafts by chance."""
    from specdec.kernels.triton import moves as kernels  # imports Triton
    from specdec.kernels.triton.verify import walk_trees

    num_seqs, width, block_size, blocks = 16, 24, 16, 4
    generator = torch.Generator().manual_seed(0)
    size = (num_seqs, width)
    tokens = torch.randint(0, 3, size, generator=generator)
    parents = torch.rand(size, generator=generator).mul(torch.arange(1, width + 1)).long() - 1
    parents[::4] = torch.arange(-1, width - 1)
    num_kept = torch.where(torch.arange(num_seqs) % 8 == 0, 5, -1)
    counts = torch.randint(0, width + 1, (num_seqs,), generator=generator).clamp_min(5)
    sampled = torch.randint(0, 3, (num_seqs * (width + 1),), generator=generator)
    sample = DeviceSample(sampled, torch.rand(sampled.shape, generator=generator) < 0.02)
    expected = verify_trees(sample, DeviceTrees(tokens, parents, counts, num_kept))
    assert expected.places is not None, "trees have places"
    new, num_new, places = walk_trees(
        sample.token_ids.to(device),
        sample.is_invalid.to(device),
        *(each.to(device) for each in (tokens, parents, counts, num_kept)),
    )
    is_new = torch.arange(width + 1) < expected.counts[:, None]
    is_same = torch.equal(num_new.cpu(), expected.counts) and all(
        torch.equal(own.cpu()[is_new], wanted[is_new])
        for own, wanted in ((new, expected.token_ids), (places, expected.places))
    )
    tables = torch.randperm(num_seqs * blocks, generator=generator).view(num_seqs, blocks)
    cache = torch.randn(2, num_seqs * blocks * block_size + 1, 2, 8, 128, generator=generator)
    stored = cache.to(device)
    sequences = torch.arange(num_seqs)
    paths = AcceptedPaths(
        expected.places, expected.counts, sequences + 5, tables, sequences, block_size
    )
    move_slots(cache, path_moves(paths))
    places, num_tokens, bases, block_tables, rows = (each.to(device) for each in paths[:-1])
    moves = kernels.path_moves(places, num_tokens, bases, block_tables, rows, block_size)
    kernels.move_slots(stored, *moves)
    is_moved = torch.equal(stored.cpu(), cache)
    return {"passed": is_same and is_moved, "tokens": is_same, "moves": is_moved}


def _moves(device: torch.device) -> Result:
    cache = torch.randn(4, 64, 2, 8, 128, generator=torch.Generator().manual_seed(0))
    stored = cache.to(device)
    moves = [SlotMove(9, 3), SlotMove(40, 9), SlotMove(63, 10)]
    move_kv(stored, moves, KernelBackend.TRITON)
    for source, target in moves:
        cache[:, target] = cache[:, source]
    return {"passed": torch.equal(stored.cpu(), cache)}


def compared(found: Tensor, expected: Tensor, dtype: torch.dtype) -> Result:
    """Return the relative error; both in any type, on any device."""
    wanted, own = expected.double().cpu(), found.double().cpu()
    error = float((own - wanted).norm() / wanted.norm())
    limit = _MAX_ERROR[dtype]
    return {"passed": error <= limit, "error_of_norm": error, "limit": limit}


def require_triton(context: Context) -> None:
    """Raise PartSkippedError where Triton cannot run."""
    if (fault := triton_fault(context.device)) is not None:
        raise PartSkippedError(fault)


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a data type."""
    return str(dtype).removeprefix("torch.")
