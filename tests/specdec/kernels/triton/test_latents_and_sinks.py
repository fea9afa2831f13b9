"""Triton's attention over latents that all heads share, and with sinks, equals its definition."""

from dataclasses import replace

import pytest
import torch

from specdec.config.gpu.attention_splits import heads_per_program
from specdec.kernels import PagedAttention, Rotation
from specdec.kernels.reference.kv_scales import KVScales, stored_values
from specdec.kernels.triton import attention_plan
from specdec.models.weights.checkpoint import CPU
from tests.specdec.kernels.triton.pages import Case, Pages
from tests.specdec.kernels.triton.test_attention import (
    RAGGED,
    TREE,
    attention_of,
    check,
    run,
)
from tests.specdec.kernels.triton.test_ragged_attention import MIXED, ragged
from tests.specdec.kernels.triton.test_stored_kv import FP8

LATENT = Case(RAGGED, num_heads=5, kv_heads=1, head_dim=24, latent_rank=16)
"""Keys of 8 rotated dimensions before a latent of 16."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_latents_of_decode_and_drafts(dtype):
    check(replace(LATENT, dtype=dtype))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"lengths": ((21, 7), (30, 2), (18, 6)), "trees": {0: TREE, 2: TREE}},
        {"lengths": ((40, 40), (50, 1), (30, 20))},
        {"window": 9},
        {"head_dim": 51, "latent_rank": 39},
        {"head_dim": 36, "latent_rank": 34, "num_heads": 1},
        {"block_size": 24},
    ],
    ids=str,
)
def test_latents(changes):
    check(replace(LATENT, **changes))


@pytest.mark.slow
@pytest.mark.parametrize("num_heads", [64, 65])
def test_latents_of_more_heads_than_a_tile_has_rows(num_heads):
    """The heads are divided evenly among programs; some programs have one head less."""
    check(replace(LATENT, lengths=((20, 2), (9, 1)), num_heads=num_heads))


def test_heads_that_share_a_key_fill_tiles():
    heads = (1, 16, 64, 65, 72, 128)
    assert [heads_per_program(count) for count in heads] == [1, 16, 32, 22, 24, 32]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_latents_as_large_as_those_of_deepseek(dtype):
    case = replace(LATENT, lengths=((37, 2), (18, 1)), num_heads=16)
    check(replace(case, head_dim=576, latent_rank=512, dtype=dtype))


@pytest.mark.parametrize("case", [LATENT, Case(RAGGED, has_sinks=True)], ids=["latents", "sinks"])
def test_one_program_merges_segments_to_the_same_bits(monkeypatch, case):
    pages = Pages(replace(case, lengths=((600, 3), (1, 1), (300, 2))))
    by_parts = run(pages)
    assert (by_parts.double() - pages.expected()).abs().max() < 2e-6
    monkeypatch.setattr(attention_plan, "enough_programs", lambda used_rows: 1)
    assert torch.equal(run(pages), by_parts)


@pytest.mark.slow
@pytest.mark.parametrize("case", [LATENT, Case(RAGGED, has_sinks=True)], ids=["latents", "sinks"])
def test_bits_of_a_row_do_not_depend_on_its_batch(case):
    pages = Pages(replace(case, lengths=((300, 4), (20, 1))))
    together = run(pages)
    for token, place in enumerate(range(296, 300)):
        alone = Pages(replace(case, lengths=((place + 1, 1),)))
        alone.cache[alone.slots[0]] = pages.cache[pages.slots[0][: place + 1]]
        alone.query, alone.sinks = pages.query[token : token + 1], pages.sinks
        assert torch.equal(run(alone)[0], together[token])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sinks_of_decode_and_drafts(dtype):
    check(Case(RAGGED, has_sinks=True, dtype=dtype))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"window": 3}, {"lengths": MIXED}, {"trees": {3: TREE}}], ids=str
)
def test_sinks(changes):
    check(replace(Case(((40, 1), (7, 3), (1, 1), (33, 7)), has_sinks=True), **changes))


@pytest.mark.parametrize("case", [LATENT, Case(MIXED, has_sinks=True)], ids=["latents", "sinks"])
def test_ragged_batch_made_on_the_device(case):
    """As does torch's attention, whose plan reads nothing on the host either."""
    pages = Pages(replace(case, lengths=MIXED))
    batch, num_tokens = ragged(pages), len(pages.query)
    sizes = (case.heads, case.head_dim, case.block_size, CPU)
    for attention in (attention_of(case), PagedAttention(*sizes, latent_rank=case.latent_rank)):
        plan = attention.plan_on_device(batch, case.dtype)
        padded = torch.cat([pages.query, torch.zeros_like(pages.query[:3])])
        kv = torch.cat([pages.own_kv, torch.full_like(pages.own_kv[:3], torch.nan)])
        found = attention.run(padded, kv, pages.cache.clone(), plan, pages.sinks)[:num_tokens]
        assert (found.double() - pages.expected()).abs().max() < 2e-6


def test_rotation_and_store_of_latents_equal_torch():
    case = replace(LATENT, lengths=((5, 5), (20, 1), (9, 2)))
    pages = Pages(case)
    generator = torch.Generator().manual_seed(1)
    heads = torch.randn(pages.batch.num_tokens, 6, case.head_dim, generator=generator)
    angles = torch.randn(len(heads), 1, 4, generator=generator)
    cos, sin = angles.cos(), angles.sin()
    rotation = Rotation(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    sizes = (case.heads, case.head_dim, case.block_size, CPU)
    outputs, caches = [], []
    for attention in (PagedAttention(*sizes, latent_rank=16), attention_of(case)):
        cache = pages.cache.clone()
        plan = attention.plan(pages.batch, case.dtype)
        outputs.append(attention.rotate_and_run(heads.clone(), None, rotation, cache, plan))
        caches.append(cache)
    torch.testing.assert_close(caches[1], caches[0], atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-5, rtol=1e-5)
    assert outputs[0].shape == (len(heads), 5, 16)


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize(
    ("case", "scales"),
    [
        (replace(LATENT, lengths=((300, 3), (21, 7)), trees={1: TREE}), KVScales(0.5, 0.5)),
        (Case(((300, 3), (40, 40)), has_sinks=True), KVScales(0.25, 2.0)),
    ],
    ids=["latents", "sinks"],
)
def test_a_cache_of_8_bit_floats(dtype, case, scales):
    pages = Pages(case)
    attention = attention_of(case)
    cache = stored_values(pages.cache, dtype, scales)
    factors = torch.tensor(scales[: case.kv_parts]).view(-1, 1, 1)
    pages.cache = cache.float() * factors
    plan = attention.plan(pages.batch, case.dtype)
    found = attention.attend(pages.query, cache, plan, pages.sinks, scales)
    assert (found.double() - pages.expected()).abs().max() < 4e-6
