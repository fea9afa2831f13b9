# Modules: specdec.kernels.triton.device.store_kv
"""Keys and values as they are stored: with norms and rotation, and as 8-bit floats."""

import pytest
import torch

from specdec.kernels import PagedAttention, Rotation
from specdec.kernels.reference.attention import QueryKeyNorms
from specdec.kernels.reference.kv_scales import KVScales, stored_values
from specdec.kernels.triton.attention import TritonAttention
from specdec.models.weights.checkpoint import CPU
from tests.specdec.kernels.triton.pages import Case, Pages
from tests.specdec.kernels.triton.test_attention import RAGGED, TREE, attention_of

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


class _Norm:
    def __init__(self, weight, eps):
        self.weight, self.eps = weight, eps

    def __call__(self, x):
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("head_dim", [16, 80])
def test_norms_rotation_and_store_equal_torch(head_dim, has_norm):
    case = Case(((5, 5), (20, 1), (9, 2)), num_heads=6, kv_heads=2, head_dim=head_dim)
    pages = Pages(case)
    generator = torch.Generator().manual_seed(1)
    heads = torch.randn(pages.batch.num_tokens, 10, head_dim, generator=generator)
    angles = torch.randn(len(heads), 1, head_dim // 2, generator=generator)
    cos, sin = angles.cos(), angles.sin()
    rotation = Rotation(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    weights = torch.rand(2, head_dim, generator=generator) + 0.5
    norms = QueryKeyNorms(*(_Norm(weight, 1e-5) for weight in weights)) if has_norm else None
    outputs, caches = [], []
    for kind in (PagedAttention, TritonAttention):
        attention = kind(case.heads, head_dim, case.block_size, CPU)
        cache = pages.cache.clone()
        plan = attention.plan(pages.batch, case.dtype)
        outputs.append(attention.rotate_and_run(heads.clone(), norms, rotation, cache, plan))
        caches.append(cache)
    torch.testing.assert_close(caches[1], caches[0], atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-5, rtol=1e-5)


SCALES = KVScales(0.25, 2.0)


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("lengths", [((21, 7), (30, 2)), ((300, 3), (40, 40))])
def test_attention_to_a_cache_of_8_bit_floats(dtype, lengths):
    """In segments, in parts and as a whole, with a tree; the cache has scales."""
    case = Case(lengths, trees={0: TREE} if lengths[0] == (21, 7) else {})
    pages, attention = Pages(case), attention_of(case)
    cache = stored_values(pages.cache, dtype, SCALES)
    pages.cache = cache.float() * torch.tensor(SCALES).view(2, 1, 1)
    plan = attention.plan(pages.batch, case.dtype)
    found = attention.attend(pages.query, cache, plan, scales=SCALES)
    assert (found.double() - pages.expected()).abs().max() < 4e-6


@pytest.mark.parametrize("dtype", FP8)
def test_stored_8_bit_floats_are_those_of_torch(dtype):
    """Except for a few: the interpreter drops carries and subnormals when it rounds to fp8."""
    pages = Pages(Case(RAGGED))
    kv = pages.own_kv
    kv[0] = 1e6
    caches = []
    for kind in (PagedAttention, TritonAttention):
        attention = kind(pages.case.heads, pages.case.head_dim, pages.case.block_size, CPU)
        cache = torch.zeros(pages.cache.shape, dtype=dtype)
        plan = attention.plan(pages.batch, torch.float32)
        attention.run(pages.query, kv, cache, plan, scales=SCALES)
        caches.append(cache.float())
    largest = torch.finfo(dtype).max
    slot = int(pages.batch.slot_mapping[0])
    assert (caches[0][slot] == largest).all()
    assert (caches[1][slot] == largest).all()
    written = torch.from_numpy(pages.batch.slot_mapping).long()
    plain, found = (cache[written] for cache in caches)
    is_equal = found == plain
    assert is_equal.float().mean() > 0.8
