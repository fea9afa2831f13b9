# Modules: specdec.kernels.moves
"""Reference tests: an 8-bit KV cache holds the nearest values, and attention reads them."""

import pytest
import torch

from specdec.kernels import PagedAttention
from specdec.kernels.backend import KernelBackend
from specdec.kernels.moves import move_kv
from specdec.kernels.reference.attention import Visible
from specdec.kernels.reference.kv_scales import KVScales, stored_values
from specdec.models.weights.checkpoint import CPU
from specdec.types.drafts.draft_tree import Parents
from tests.specdec.kernels.triton.pages import Case, Pages

TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = KVScales(0.25, 2.0)
LENGTHS = ((40, 1), (7, 3), (21, 7), (33, 20))
TREE: Parents = (-1, -1, 0, 0, 1, 2)


@pytest.mark.parametrize("dtype", TYPES)
def test_stored_values_are_the_nearest_ones_and_never_nan(dtype):
    kv = torch.randn(50, 2, 3, 16, generator=torch.Generator().manual_seed(0))
    kv[0, :, 0, 0], kv[1, :, 0, 0] = 1e6, -1e6
    stored = stored_values(kv, dtype, SCALES).float()
    assert stored[0, :, 0, 0].tolist() == [torch.finfo(dtype).max] * 2
    assert stored[1, :, 0, 0].tolist() == [-torch.finfo(dtype).max] * 2
    factors = torch.tensor(SCALES).view(2, 1, 1)
    error = (stored * factors - kv)[2:].abs() / kv[2:].abs()
    is_normal = (kv / factors)[2:].abs() > 2 * torch.finfo(dtype).tiny
    assert error[is_normal].max() <= torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("soft_cap", [None, 0.5])
def test_attention_is_that_of_the_stored_values(dtype, soft_cap):
    """For windows, trees and chains; the pass stores its own KV."""
    case = Case(LENGTHS, trees={2: TREE}, window=30, soft_cap=soft_cap)
    pages = Pages(case)
    attention = PagedAttention(
        case.heads, case.head_dim, case.block_size, CPU, softcap=case.soft_cap
    )
    cache, kv = stored_values(pages.cache, dtype, SCALES), pages.own_kv
    slots = torch.from_numpy(pages.batch.slot_mapping).long()
    cache.view(torch.uint8)[slots] = 0
    plan = attention.plan(pages.batch, case.dtype, Visible(case.window))
    plain = pages.expected()
    found = attention.run(pages.query, kv, cache, plan, scales=SCALES)
    pages.cache = cache.float() * torch.tensor(SCALES).view(2, 1, 1)
    assert (found.double() - pages.expected()).abs().max() < 2e-6
    assert 1e-3 < (found.double() - plain).abs().max() < 0.6


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("case", "scales"),
    [
        (Case(LENGTHS, 5, 1, 24, latent_rank=16, trees={2: TREE}), KVScales(0.5, 0.5)),
        (Case(LENGTHS, has_sinks=True, trees={2: TREE}), SCALES),
    ],
    ids=["latents", "sinks"],
)
def test_latents_and_sinks_have_that_of_the_stored_values(dtype, case, scales):
    pages = Pages(case)
    attention = PagedAttention(
        case.heads, case.head_dim, case.block_size, CPU, latent_rank=case.latent_rank
    )
    cache, kv = stored_values(pages.cache, dtype, scales), pages.own_kv
    slots = torch.from_numpy(pages.batch.slot_mapping).long()
    cache.view(torch.uint8)[slots] = 0
    plan = attention.plan(pages.batch, case.dtype)
    found = attention.run(pages.query, kv, cache, plan, pages.sinks, scales)
    pages.cache = cache.float() * torch.tensor(scales[: case.kv_parts]).view(-1, 1, 1)
    assert (found.double() - pages.expected()).abs().max() < 2e-6


@pytest.mark.parametrize("dtype", TYPES)
def test_moves_copy_the_bytes(dtype):
    kv = torch.randn(2, 8, 2, 1, 4, generator=torch.Generator().manual_seed(0))
    cache = kv.to(dtype)
    expected = cache.float()
    expected[:, 5] = expected[:, 1]
    move_kv(cache, [(1, 5)], KernelBackend.TORCH)
    assert torch.equal(cache.float(), expected)
