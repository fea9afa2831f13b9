# Modules: specdec.sampling.truncation
"""Sampling in fixed shapes: the tokens that the host selects, and no value that it reads."""

import pytest
import torch

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.sampling import row_exchange
from specdec.sampling.device import device_sampler
from specdec.sampling.device.device_sampler import DeviceRules, SamplingKind
from specdec.sampling.gumbel import NoiseKeys
from specdec.sampling.row_ops import RowOps
from specdec.sampling.sampler import sample_on_device
from specdec.sampling.truncation import DeviceLimits
from specdec.sampling.vocab_shard import VocabShard
from tests.specdec.fakes import run_ranks
from tests.specdec.sampling.sampling_rows import sampling_rows

ALONE = TensorParallelGroup()
VOCAB = 383
TEMPERATURES = [0.0, 0.7, 1.0, 2.5, 0.01]
TOP_K = [0, 1, 5, 40, 1000]
TOP_P = [1.0, 0.9, 0.5, 1e-6]
MIN_P = [0.0, 0.1, 1.0]


def rows(count, seed=0):
    """Return random logits, and a batch of random sampling parameters for them."""
    generator = torch.Generator().manual_seed(seed)

    def pick(values):
        indices = torch.randint(len(values), (count,), generator=generator)
        return [values[index] for index in indices]

    rules = {
        "temperature": pick(TEMPERATURES),
        "top_k": pick(TOP_K),
        "top_p": pick(TOP_P),
        "min_p": pick(MIN_P),
        "seed": torch.randint(2**60, (count,), generator=generator).tolist(),
        "choice": pick([0, 1, 7]),
    }
    batch = sampling_rows(torch.randint(500, (count,), generator=generator).tolist(), **rules)
    return torch.randn(count, VOCAB, generator=generator) * 3, batch


def rules_of(batch, kind=SamplingKind.TRUNCATED):
    """Return the rules of rows that need this work at most; None where they are greedy."""
    if kind is SamplingKind.GREEDY:
        return None
    params = batch.params

    def column(name):
        return torch.from_numpy(params[name].copy())

    return DeviceRules(
        column("temperature"),
        DeviceLimits(column("top_k"), column("top_p"), column("min_score")),
        NoiseKeys(column("seed"), column("choice").long(), column("position").long()),
        kind is SamplingKind.TRUNCATED,
    )


def shards(group):
    """Return this rank's part of the vocabulary, and its shard."""
    tokens = group.share_of(VOCAB)
    return slice(tokens.start, tokens.stop), VocabShard(group, tokens.start, VOCAB)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", [40, 2])
def test_the_tokens_are_those_of_the_host(size, seed, count):
    """With 2 rows a third rank has none, with 40 the last one has fewer than the others."""
    logits, batch = rows(count, seed)

    def on_rank(group):
        own, shard = shards(group)
        sampled = sample_on_device(logits[:, own], rules_of(batch), shard)
        return sampled.token_ids.tolist(), sampled.is_invalid.any().item()

    expected = RowOps().sample_batch(logits, batch).tolist()
    assert run_ranks(size, on_rank) == [(expected, False)] * size


@pytest.mark.parametrize(
    ("kind", "called"),
    [
        (SamplingKind.GREEDY, ["all_gather"]),
        (SamplingKind.SAMPLED, ["all_to_all", "all_gather"]),
        (SamplingKind.TRUNCATED, ["all_to_all", "all_gather"]),
    ],
)
@pytest.mark.parametrize("fault", [torch.nan, torch.inf])
def test_collectives_of_a_step(kind, called, fault):
    """Each kind has its number, whatever the values are; faults of any rank are found by all."""
    logits, batch = rows(5)
    logits[0, 7] = logits[1, -1] = fault
    logits[2] = -torch.inf
    logits[3, :300] = -torch.inf
    rules = rules_of(batch, kind)

    def on_rank(group):
        own, shard = shards(group)
        sampled = sample_on_device(logits[:, own], rules, shard)
        return group.called, sampled.is_invalid.tolist(), sampled.token_ids[3:].tolist()

    (counts, is_invalid, tokens), other = run_ranks(2, on_rank)
    assert counts == called
    assert is_invalid == [True, True, True, False, False]
    assert other == (counts, is_invalid, tokens)
    assert tokens[0] >= 300


def test_rows_of_large_steps_are_exchanged_in_slabs(monkeypatch):
    logits, batch = rows(11)
    monkeypatch.setattr(row_exchange, "MAX_EXCHANGED_LOGITS", 4 * VOCAB)

    def on_rank(group):
        own, shard = shards(group)
        sampled = sample_on_device(logits[:, own], rules_of(batch), shard)
        return sampled.token_ids.tolist(), group.called.count("all_to_all")

    expected = RowOps().sample_batch(logits, batch).tolist()
    assert run_ranks(2, on_rank) == [(expected, 3)] * 2


def test_rows_are_sampled_in_slabs_of_bounded_memory(monkeypatch):
    logits, batch = rows(11)
    shard = VocabShard(ALONE, 0, VOCAB)
    whole = sample_on_device(logits, rules_of(batch), shard)
    sizes, noise = [], device_sampler.gumbel_noise
    monkeypatch.setattr(device_sampler, "SLAB_LOGITS", 4 * VOCAB)
    monkeypatch.setattr(
        device_sampler, "gumbel_noise", lambda *keys: sizes.append(len(keys[0])) or noise(*keys)
    )
    slabs = sample_on_device(logits, rules_of(batch), shard)
    assert slabs.token_ids.tolist() == whole.token_ids.tolist()
    assert slabs.is_invalid.tolist() == whole.is_invalid.tolist()
    assert [size // 6 for size in sizes] == [4, 4, 3]  # of six chunks a row


@pytest.mark.parametrize("kind", SamplingKind)
def test_a_kind_does_the_work_that_rows_need(kind):
    """Rows that need less than the kind have the same tokens under a kind that does more."""
    logits, _ = rows(6)
    temperature = 0.0 if kind is SamplingKind.GREEDY else 0.8
    top_k = 5 if kind is SamplingKind.TRUNCATED else 0
    batch = sampling_rows([3] * 6, temperature=temperature, top_k=top_k, seed=range(6))
    shard = VocabShard(ALONE, 0, VOCAB)
    expected = RowOps().sample_batch(logits, batch).tolist()
    for more in [each for each in SamplingKind if each >= kind]:
        assert sample_on_device(logits, rules_of(batch, more), shard).token_ids.tolist() == expected


@pytest.mark.parametrize("kind", SamplingKind)
def test_rows_without_a_token_are_invalid(kind):
    logits, batch = rows(5)
    logits[0, 7] = torch.nan
    logits[1, 9] = torch.inf
    logits[2] = -torch.inf
    logits[3, :300] = -torch.inf
    rules = rules_of(batch, kind)
    sampled = sample_on_device(logits, rules, VocabShard(ALONE, 0, VOCAB))
    assert sampled.is_invalid.tolist() == [True, True, True, False, False]
    assert sampled.token_ids[3] >= 300
