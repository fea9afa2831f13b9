# Modules: specdec.kernels.triton.device.ngram, specdec.kernels.triton.ngram
"""Prompt lookup by kernels equals its reference."""

import pytest
import torch

from specdec.kernels.reference.ngram import Texts, lookup
from specdec.kernels.triton import ngram
from specdec.sampling.row_ops import RowOps, TritonRowOps
from tests.specdec.lookups import NGRAMS, random_texts
from tests.specdec.worker.device.head.test_lookup import config_of, requests, run_target
from tests.specdec.worker.device.runners import FakeGraphs


@pytest.mark.parametrize("ngrams", NGRAMS)
@pytest.mark.parametrize("num_symbols", [1, 2, 8])
def test_drafts_are_those_of_the_reference(ngrams, num_symbols):
    for num_tokens in (1, 3, 8):
        texts, _ = random_texts(num_symbols, seed=num_tokens)
        wanted = torch.arange(len(texts.lengths)) % (num_tokens + 2) - 1
        found = ngram.lookup(texts, wanted, ngrams, num_tokens)
        assert torch.equal(found, lookup(texts, wanted, ngrams, num_tokens))


@pytest.mark.parametrize("most_parts", [1, 4, 32])
def test_programs_share_long_texts(monkeypatch, most_parts):
    """Each scores other blocks, of which the last ones are after the shorter texts."""
    monkeypatch.setattr(ngram, "BLOCK", 16)
    monkeypatch.setattr(ngram, "MAX_PARTS", most_parts)
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(3, (4, 200), generator=generator, dtype=torch.int32)
    lengths = torch.tensor([200, 17, 33, 120])
    texts, wanted = Texts(token_ids, torch.arange(4), lengths), torch.full((4,), 5)
    for ngrams in NGRAMS:
        found = ngram.lookup(texts, wanted, ngrams, 5)
        assert torch.equal(found, lookup(texts, wanted, ngrams, 5))


def test_steps_on_the_device_draft_by_the_kernels(tiny_model_dir, monkeypatch):
    asked = requests(3, max_tokens=12)[1:]
    expected, by_reference, _ = run_target(tiny_model_dir, asked, config_of())
    monkeypatch.setattr(RowOps, "lookup", TritonRowOps.lookup)
    found, target, _ = run_target(tiny_model_dir, asked, config_of(), graphs=FakeGraphs())
    assert found == expected
    assert target.outputs == by_reference.outputs
