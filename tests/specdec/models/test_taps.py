"""Residual streams that a forward pass returns besides the hidden states."""

import pytest
import torch
from transformers import LlamaForCausalLM

from specdec.kernels.cpu import native_library
from specdec.kernels.reference.forward_batch import Chunk, ForwardBatch
from tests.specdec.fakes import run_ranks
from tests.specdec.models.sequences import Sequences, load, texts
from tests.specdec.tiny import tiny_llama_dir

BLOCK_SIZE = 16
LENGTH = 60
KERNELS = [
    "torch",
    pytest.param(
        "native", marks=pytest.mark.skipif(native_library() is None, reason="no C++ compiler")
    ),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_llama_dir(tmp_path_factory.mktemp("model"), max_positions=1024)


@pytest.fixture
def text():
    return texts(1, LENGTH)[0]


class TappedSequences(Sequences):
    """Sequences whose passes return HiddenStates with all taps, in the order of `taps`."""

    @property
    def taps(self):
        num_layers = len(getattr(self.model, "torch_decoder", self.model).layers)
        return [num_layers, *range(num_layers)]

    def hidden_states(self, *parts):
        chunks = [Chunk(ids, start, self.tables[index]) for index, ids, start in parts]
        batch = ForwardBatch(chunks, self.block_size)
        return self.model.forward_with_taps(batch, self.cache, self.taps)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("size", [1, 2])
def test_taps_equal_transformers(directory, text, kernels, size):
    """Check every layer, on each rank."""

    def tapped(group):
        model = load(directory, BLOCK_SIZE, kernels=kernels, group=group)
        return TappedSequences(model, BLOCK_SIZE).hidden_states((0, text, 0)).tapped.float()

    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    last = []
    model.model.norm.register_forward_pre_hook(lambda _, arguments: last.append(arguments[0][0]))
    with torch.inference_mode():
        entering = model(torch.tensor([text]), output_hidden_states=True).hidden_states[:-1]
    expected = torch.stack([last[0], *(each[0] for each in entering)], dim=1)
    for found in run_ranks(size, tapped):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernels", KERNELS)
def test_taps_do_not_change_the_hidden_states(directory, text, kernels):
    model = load(directory, BLOCK_SIZE, kernels=kernels)
    sequences = TappedSequences(model, BLOCK_SIZE)
    found = sequences.hidden_states((0, text, 0))
    batch = ForwardBatch([Chunk(text, 0, sequences.tables[0])], BLOCK_SIZE)
    assert torch.equal(found.final, model(batch, sequences.cache))
    norm = getattr(model, "torch_decoder", model).norm
    torch.testing.assert_close(norm(found.tapped[:, 0]), found.final, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.skipif(native_library() is None, reason="no C++ compiler")
def test_native_taps_do_not_depend_on_batch_or_chunking(directory, dtype, quantization):
    ours, other = texts(2, 300)
    model = load(directory, BLOCK_SIZE, dtype, quantization=quantization)
    whole = TappedSequences(model, BLOCK_SIZE).hidden_states((0, ours, 0)).tapped
    sequences, start, pieces = TappedSequences(model, BLOCK_SIZE, count=2), 0, []
    for size in (1, 7, 40, 252):
        parts = (1, other[: size + 1], 0), (0, ours[start : start + size], start)
        pieces.append(sequences.hidden_states(*parts).tapped[size + 1 :])
        start += size
    assert torch.equal(torch.cat(pieces), whole)
