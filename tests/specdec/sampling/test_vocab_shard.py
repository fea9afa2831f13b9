import pytest
import torch

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.sampling.gumbel import CHUNK_TOKENS
from specdec.sampling.vocab_shard import ScoreChunks


@pytest.mark.parametrize("first_token", [0, 1, 64, 100])
@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 200])
def test_chunks_are_aligned_to_the_whole_vocabulary(first_token, num_tokens):
    logits = torch.randn(3, num_tokens)
    chunks = ScoreChunks.of_logits(logits, first_token)
    start = first_token - chunks.first_chunk * CHUNK_TOKENS
    flat = chunks.scores.flatten(1)
    assert 0 <= start < CHUNK_TOKENS
    assert torch.equal(flat[:, start : start + num_tokens], logits)
    assert torch.isneginf(flat).sum() == flat.numel() - logits.numel()
    assert torch.equal(chunks.maxima, chunks.scores.amax(2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_float_type_is_copied(dtype):
    logits = torch.randn(2, 100).to(dtype)
    before = logits.clone()
    chunks = ScoreChunks.of_logits(logits, 0)
    chunks.scale(torch.tensor([0.5, 2.0]), TensorParallelGroup())
    assert chunks.scores.dtype == torch.float32
    assert torch.equal(logits, before)


def test_nan_counts_as_minus_infinity():
    logits = torch.tensor([[torch.nan, 1.0, -torch.inf, torch.nan], [torch.nan] * 4])
    chunks = ScoreChunks.of_logits(logits, 0)
    assert chunks.scores.flatten(1).argmax(1).tolist() == [1, 0]
    assert chunks.maxima.flatten().tolist() == [1.0, -torch.inf]


@pytest.mark.parametrize("temperature", [1e-38, 1e-3, 1.0, 100.0])
def test_scaled_scores_are_at_most_zero_and_never_nan(temperature):
    logits = torch.tensor([[1e30, 5.0, -3e38, -torch.inf], [3.0, 3.0, 2.0, torch.inf]])
    chunks = ScoreChunks.of_logits(logits, 0)
    chunks.scale(torch.tensor([temperature] * 2), TensorParallelGroup())
    assert not chunks.scores.isnan().any()
    assert (chunks.scores.amax((1, 2)) == 0).all()
    assert torch.equal(chunks.maxima, chunks.scores.amax(2))


def test_scaling_an_empty_row_leaves_it_empty():
    chunks = ScoreChunks.of_logits(torch.full((1, 3), torch.nan), 0)
    chunks.scale(torch.tensor([0.7]), TensorParallelGroup())
    assert torch.isneginf(chunks.scores).all()
