"""Native passes of block drafters over long contexts, against a dense reference."""

import pytest
import torch
import torch.nn.functional as F

from specdec.kernels.cpu import native_library
from specdec.kernels.cpu.block_head import BlockHeadKernel, BlockHeadStruct
from tests.specdec.kernels.cpu import tiny_head
from tests.specdec.kernels.cpu.test_draft_head import Texts
from tests.specdec.kernels.cpu.tiny_head import EPS, HIDDEN, MAX_POSITIONS, TinyHead, Variant
from tests.specdec.threads import num_threads

pytestmark = pytest.mark.skipif(native_library() is None, reason="no C++ compiler")

SIZE, MASK = 7, 5
PARTS = ((0, 1, 300), (1, 1, 33), (2, 1, 16))
"""A context of two splits of attention, one that ends in a KV block, and one that fills one."""


class TinyBlockHead(TinyHead):
    """A block drafter with the layers of a tiny head."""

    def __init__(self, window, sees_ahead):
        super().__init__(Variant(has_fusion=True, num_layers=2, window=window))
        self.sees_ahead = sees_ahead

    def kernel(self):
        head = BlockHeadStruct(
            decoder=self.decoder(sees_ahead=self.sees_ahead),
            draft_block_size=SIZE,
            mask_token=MASK,
            lm_head=self._pack(self.lm_head),
            target_tokens=self.target_tokens.data_ptr(),
        )
        return BlockHeadKernel(native_library(), head, MAX_POSITIONS)

    def outputs(self, anchor, features):
        """Return the outputs of a block after features [T, HIDDEN], [SIZE, HIDDEN]."""
        x = self.embedding[torch.tensor([anchor] + [MASK] * (SIZE - 1))]
        positions = torch.arange(1, len(features) + SIZE + 1)
        for layer in self.layers:
            both = torch.cat([features, _norm(x, layer["input_norm"])])
            attended = self._attend(both @ layer["qkv"].t(), positions, self.sees_ahead)
            x = x + attended[-SIZE:] @ layer["output"].t()
            gate, up = (_norm(x, layer["mlp_norm"]) @ layer["gate_up"].t()).chunk(2, dim=-1)
            x = x + (F.silu(gate) * up) @ layer["down"].t()
        return _norm(x, self.final_norm)


class BlockTexts(Texts):
    """Contexts of several sequences."""

    def __init__(self, head):
        super().__init__(head)
        self.cache.fill_(float("nan"))  # what is not written must not be read

    def run(self, *parts, count=SIZE):
        """Return the outputs of the blocks, [count, B, HIDDEN]."""
        return self.kernel.forward(*self.batch(*parts), self.cache, count)


def _norm(x, weight):
    return F.rms_norm(x, weight.shape, weight, EPS)


@pytest.mark.parametrize("window", [0, 20, 280])
@pytest.mark.parametrize("sees_ahead", [False, True])
def test_outputs_equal_those_of_dense_attention(window, sees_ahead):
    check_outputs(TinyBlockHead(window, sees_ahead))


@pytest.mark.parametrize("dim", [10, 12, 14])
def test_keys_that_do_not_begin_at_a_panel(monkeypatch, dim):
    """The pass computes only the panels of a layer's projection from the first key on."""
    monkeypatch.setattr(tiny_head, "DIM", dim)
    check_outputs(TinyBlockHead(20, sees_ahead=True))


def check_outputs(head):
    texts = BlockTexts(head)
    found = texts.run(*PARTS)
    for row, (sequence, _, end) in enumerate(PARTS):
        anchor = texts.tokens[sequence, end - 1].item()
        expected = texts.head.outputs(anchor, texts.features[sequence, : end - 1])
        torch.testing.assert_close(found[:, row], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("window", [0, 20])
def test_outputs_are_the_same_bits_in_any_batch(window):
    head = TinyBlockHead(window, sees_ahead=True)
    expected = BlockTexts(head).run(*PARTS)
    with num_threads(3):
        assert torch.equal(BlockTexts(head).run(*PARTS), expected)
    for row, (sequence, begin, end) in enumerate(PARTS):
        texts = BlockTexts(head)
        assert texts.run((sequence, begin, end - 9), count=0).shape == (0, 1, HIDDEN)
        found = texts.run((sequence, end - 9, end), count=2)
        assert torch.equal(found[:, 0], expected[:2, row])


def test_a_block_leaves_the_cache_after_its_context_as_it_was():
    texts = BlockTexts(TinyBlockHead(0, sees_ahead=True))
    texts.run((1, 1, 33), count=0)
    before = texts.cache.clone()
    texts.run((1, 32, 33))
    assert torch.equal(texts.cache.nan_to_num(), before.nan_to_num())
