# Modules: specdec.worker.warm_up
# Modules: specdec.kernels.reference.device_batch, specdec.worker.device.decoder
# Modules: specdec.worker.device.launch, specdec.worker.device.queue
"""Steps on the device: the tokens of steps on the host, and nothing that the host reads between."""

import pytest
import torch

from specdec.config.engine import AdapterLimits
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.kernels.reference.device_batch import DeviceBatch, RaggedBatch
from specdec.kernels.reference.forward_batch import Chunk, ForwardBatch
from specdec.models.llama import CausalDecoder
from specdec.types.sampling.sampling_params import SpeculationOptions
from specdec.worker import LocalTarget, TargetModelRunner
from specdec.worker.device.input.buffers import PendingTokens
from specdec.worker.device.step_graphs import StepShape
from specdec.worker.device.steps import DeviceSteps
from specdec.worker.warm_up import warm_up_target
from tests.specdec.adapters import adapter_dir
from tests.specdec.engines import (
    engine_config,
    load_adapter,
    local_engine,
    make_engine,
    request,
    run,
)
from tests.specdec.fakes import run_ranks
from tests.specdec.worker.device.recorded_graphs import graphs_of
from tests.specdec.worker.device.runners import (
    FakeGraphs,
    device_runner,
    device_target,
    recorded_device_steps,
)

SAMPLING = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 5},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.8, "min_p": 0.02},
]


def requests(count=6, **params):
    generator = torch.Generator().manual_seed(5)
    pieces = torch.randint(3, 383, (count, 6), generator=generator).tolist()
    return [
        request(f"r{i}", piece * (1 + i), seed=i, **{**SAMPLING[i % len(SAMPLING)], **params})
        for i, piece in enumerate(pieces)
    ]


def tokens(engine, given):
    return {name: each.token_ids for name, each in run(engine, given).items()}


@pytest.fixture
def num_device_steps(monkeypatch):
    """Return a list with an entry for each step that ran on the device."""
    return recorded_device_steps(monkeypatch)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("num_drafts", [0, 1, 4])
def test_the_tokens_are_those_of_the_host(tiny_model_dir, num_device_steps, num_drafts, graphs):
    config = engine_config(num_drafts)
    expected = tokens(local_engine(tiny_model_dir, config, kernels="torch"), requests())
    assert not num_device_steps
    backend = graphs_of(is_recorded=num_drafts == 4) if graphs else None
    target = device_target(tiny_model_dir, config, graphs=backend)
    engine = make_engine(tiny_model_dir, config, target)
    assert tokens(engine, requests()) == expected
    assert len(num_device_steps) > 10
    assert any(row.num_draft_tokens for rows in num_device_steps for row in rows) == (
        num_drafts > 0
    )


def test_drafts_are_kept_by_chance_as_on_the_host(tiny_model_dir, num_device_steps):
    speculation = SpeculativeConfig.of(
        "ngram",
        4,
        prompt_lookup_min=1,
        verifier="synthetic",
        synthetic_acceptance_length=2.5,
    )
    config = engine_config(speculation=speculation)
    given = [
        request(f"r{i}", [5, 6, 7] * 4, seed=i, temperature=0.8, max_tokens=30) for i in range(4)
    ]
    engines = [
        local_engine(tiny_model_dir, config, kernels="torch"),
        make_engine(tiny_model_dir, config, device_target(tiny_model_dir, config)),
    ]
    expected, found = (tokens(engine, given) for engine in engines)
    assert found == expected
    assert num_device_steps
    accepted = [engine.stats().counts.speculation.num_accepted_tokens for engine in engines]
    assert accepted[0] == accepted[1] > 0


HOST_SAMPLING = [
    {"temperature": 0.9, "speculation": SpeculationOptions(verifier="typical"), "max_tokens": 5},
    {"temperature": 0.9, "speculation": SpeculationOptions(verifier="rejection"), "max_tokens": 7},
    {"temperature": 0.8, "speculation": SpeculationOptions(verifier="block"), "max_tokens": 9}
    | {"presence_penalty": 0.5, "logprobs": 1},
]
"""Verification that needs the host, of requests that end before the others."""


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_the_host_verifies_only_the_rows_that_need_it(
    tiny_model_dir, num_device_steps, monkeypatch, num_drafts
):
    """The other rows of the step are verified on the device, which has run the pass of all."""
    given = requests(2)
    given += [
        request(f"host{i}", [7, 8, 9] * (2 + i), seed=i, **each)
        for i, each in enumerate(HOST_SAMPLING)
    ]
    config = engine_config(num_drafts, async_scheduling=True)
    expected = tokens(local_engine(tiny_model_dir, config, kernels="torch"), given)
    by_host, verify = [], TargetModelRunner._verify

    def recorded(self, rows, hidden):
        by_host.append([row.seq_id for row in rows])
        return verify(self, rows, hidden)

    monkeypatch.setattr(TargetModelRunner, "_verify", recorded)
    engine = make_engine(tiny_model_dir, config, device_target(tiny_model_dir, config))
    assert tokens(engine, given) == expected
    assert len(num_device_steps) == engine.stats().counts.num_steps
    assert {seq for rows in by_host for seq in rows} == {2, 3, 4}
    assert 0 < len(by_host) < len(num_device_steps)


def test_a_step_begins_after_another_whose_tokens_the_host_lacks(tiny_model_dir):
    config = engine_config(0, async_scheduling=True)
    expected = tokens(local_engine(tiny_model_dir, engine_config(0)), requests())
    target = device_target(tiny_model_dir, config, graphs=FakeGraphs())
    most, begin = [0], target.begin

    def counted(step):
        begin(step)
        most[0] = max(most[0], target._runner.num_in_flight)

    target.begin = counted
    engine = make_engine(tiny_model_dir, config, target)
    assert tokens(engine, requests()) == expected
    assert most[0] == 2
    assert engine.stats().counts.num_steps_ahead > 10


@pytest.mark.parametrize(("num_buffers", "is_safe"), [(2, True), (1, False)])
def test_no_buffer_is_written_before_the_device_has_copied_it(
    tiny_model_dir, monkeypatch, num_buffers, is_safe
):
    """A device copies both sides of a step at any time until the host has waited for it."""
    copies, are_unchanged = {}, []
    begin, collect = DeviceSteps._begin, PendingTokens.collect

    def copied(self, *arguments):
        pending = begin(self, *arguments)
        host = self._buffers[(self._num_begun - 1) % len(self._buffers)]
        copies[id(pending)] = (host, host.input.clone(), host.output.clone())
        return pending

    def compared(self):
        host, *before = copies.pop(id(self))
        are_unchanged.append(all(map(torch.equal, (host.input, host.output), before)))
        return collect(self)

    monkeypatch.setattr(DeviceSteps, "_begin", copied)
    monkeypatch.setattr(PendingTokens, "collect", compared)
    config = engine_config(0, async_scheduling=True)
    target = device_target(tiny_model_dir, config)
    del target._runner.device_steps._buffers[num_buffers:]
    run(make_engine(tiny_model_dir, config, target), requests())
    assert len(are_unchanged) > 10
    assert all(are_unchanged) == is_safe


def test_a_pass_on_the_device_runs_without_the_adapters_of_the_pass_before(
    tiny_model_dir, tmp_path
):
    limits = AdapterLimits(max_loras=2, max_rank=16, max_loaded=2)
    config = engine_config(0, adapters=limits)
    runner = device_runner(tiny_model_dir, config)
    engine = make_engine(tiny_model_dir, config, LocalTarget(runner))
    adapter_id = load_adapter(engine, "tuned", adapter_dir(tmp_path / "tuned", tiny_model_dir))
    one = torch.tensor([0])
    batch = DeviceBatch(one + 5, one, one, torch.tensor([[0, 1]]), one + 1, query_len=1)
    expected = runner.model.forward_on_device(batch, runner.kv_cache)
    chunk = Chunk([5], 0, [0], adapter_id=adapter_id)
    tuned = runner.model(ForwardBatch([chunk], config.block_size), runner.kv_cache)
    assert not torch.allclose(tuned, expected)
    assert torch.equal(runner.model.forward_on_device(batch, runner.kv_cache), expected)


def test_few_blocks_preempt_sequences_and_change_no_token(tiny_model_dir, num_device_steps):
    given = requests(6, max_tokens=40)
    config = engine_config(2)
    expected = tokens(local_engine(tiny_model_dir, config, kernels="torch"), given)
    tight = engine_config(2, num_blocks=40, async_scheduling=True)
    engine = make_engine(tiny_model_dir, tight, device_target(tiny_model_dir, tight))
    assert tokens(engine, given) == expected
    assert engine.stats().counts.num_preemptions > 0
    assert num_device_steps


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_agree(tiny_model_dir, size):
    config = engine_config(3)
    expected = tokens(local_engine(tiny_model_dir, config), requests())

    def on_rank(group):
        target = device_target(tiny_model_dir, config, group=group)
        return tokens(make_engine(tiny_model_dir, config, target), requests())

    assert run_ranks(size, on_rank) == [expected] * size


def test_a_padded_step_leaves_the_pool_of_others_alone(tiny_model_dir):
    """Padding writes to the padding block alone."""
    config = engine_config(3)
    target = device_target(tiny_model_dir, config, graphs=FakeGraphs(runs_captured=True))
    pool = target._runner.kv_cache[:, : config.num_blocks * config.block_size]
    assert not pool.any()  # every graph has run on padding
    assert target._runner.kv_cache.any()


def test_a_step_with_much_padding_runs_without_it(tiny_model_dir, num_device_steps, monkeypatch):
    """One row with drafts among many without would make each of them as long."""
    most, forward = 3, CausalDecoder.forward_on_device
    batches = []

    def recorded(self, batch, kv_cache):
        batches.append(batch)
        return forward(self, batch, kv_cache)

    monkeypatch.setattr(CausalDecoder, "forward_on_device", recorded)
    monkeypatch.setattr("specdec.worker.device.plan.most_padding_tokens", lambda size: most)
    config = engine_config(4)
    given = requests()
    expected = tokens(local_engine(tiny_model_dir, config, kernels="torch"), given)
    engine = make_engine(tiny_model_dir, config, device_target(tiny_model_dir, config))
    assert tokens(engine, given) == expected
    assert len(num_device_steps) == len(batches) == engine.stats().counts.num_steps
    is_ragged = []
    for rows, batch in zip(num_device_steps, batches, strict=True):
        counts = [1 + row.num_draft_tokens for row in rows]
        padding = max(counts) * len(rows) - sum(counts)
        is_prompt = any(row.num_known_tokens > 1 for row in rows)
        is_ragged.append(isinstance(batch, RaggedBatch))
        assert is_ragged[-1] == (is_prompt or padding > most)
        assert not is_ragged[-1] or len(batch.input_ids) == sum(len(row.token_ids) for row in rows)
    assert any(is_ragged)
    assert not all(is_ragged)


def test_a_closed_target_has_no_graphs(tiny_model_dir):
    target = device_target(tiny_model_dir, engine_config(0), graphs=FakeGraphs())
    shape = StepShape(3, 1, 1)
    graphs = target._runner.device_steps._graphs
    assert graphs.padded(shape) != shape
    target.close()
    assert graphs.padded(shape) == shape


def test_invalid_logits_end_a_request(tiny_model_dir):
    config = engine_config(0)
    target = device_target(tiny_model_dir, config)
    model, compute = target._runner.model, target._runner.model.compute_logits
    calls = []

    def faulty(hidden):
        calls.append(len(hidden))
        logits = compute(hidden)
        if len(calls) == 4:
            logits[0] = torch.nan
        return logits

    model.compute_logits = faulty
    transcripts = run(make_engine(tiny_model_dir, config, target), requests(3))
    assert sum(each.error is not None for each in transcripts.values()) == 1


def test_the_longest_warm_up_fits_the_block_tables(tiny_model_dir, monkeypatch):
    """An index after a table ends the context of a GPU."""
    on_device = recorded_device_steps(monkeypatch)
    runner = device_runner(tiny_model_dir, engine_config(max_model_len=64))
    warm_up_target(runner, 63, 64)
    assert [len(row.token_ids) for rows in on_device for row in rows] == [63, 1]
    assert runner.num_in_flight == 0
