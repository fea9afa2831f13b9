"""Steps with prompts on the device: the tokens of the host, one copy each way, nothing read."""

from dataclasses import replace

import pytest
import torch

from specdec.kernels.reference.device_batch import RaggedBatch
from specdec.sampling.device.device_sampler import SamplingKind
from specdec.types.messages import BlockTableDelta, SequenceAdmission, StepInput, StepRow
from specdec.types.sampling.sampling_params import SpeculationOptions, StructuredOutput
from specdec.types.sampling.sampling_spec import SamplingRules
from specdec.worker.device.plan import StepPlan
from specdec.worker.device.step_graphs import RaggedShape, StepShape
from tests.specdec.engines import engine_config, local_engine, make_engine, request
from tests.specdec.fakes import run_ranks
from tests.specdec.grammars import grammar_compiler
from tests.specdec.tiny import tiny_llama_dir
from tests.specdec.worker.device.recorded_graphs import graphs_of
from tests.specdec.worker.device.runners import (
    device_runner,
    device_target,
    recorded_device_steps,
)
from tests.specdec.worker.operators import (
    Operators,
    assert_host_reads_nothing,
    assert_one_copy_goes_each_way,
)

SAMPLING = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.8, "min_p": 0.02},
]
SHARED = [7, 8, 9, 10] * 5
"""A prefix of several blocks that later requests take from the cache."""


def requests(count=7, **params):
    """Return requests with prompts of 3 to 60 tokens, every third of which begins with SHARED."""
    generator = torch.Generator().manual_seed(5)
    pieces = torch.randint(3, 383, (count, 5), generator=generator).tolist()
    return [
        request(
            f"r{i}",
            (SHARED if i % 3 == 0 else []) + piece * (1 + 3 * (i % 4)),
            seed=i,
            **{"max_tokens": 6 + 5 * (i % 3), **SAMPLING[i % len(SAMPLING)], **params},
        )
        for i, piece in enumerate(pieces)
    ]


def stream(engine, given, every=2):
    """Run requests of which one arrives every few steps; return the tokens of each."""
    waiting, tokens = list(given), {each.request_id: [] for each in given}
    num_steps = 0
    while waiting or engine.has_work:
        if waiting and num_steps % every == 0:
            engine.add(waiting.pop(0))
        for output in engine.step():
            assert output.error is None
            tokens[output.request_id].extend(output.token_ids)
        engine.check_integrity()
        num_steps += 1
    return tokens


@pytest.fixture
def on_device(monkeypatch):
    """Return a list with the rows of each step that ran on the device."""
    return recorded_device_steps(monkeypatch)


def mixed(steps):
    """Return the steps with both a chunk of a prompt and a decode."""
    return [
        rows
        for rows in steps
        if any(row.num_known_tokens > 1 for row in rows)
        and any(row.num_known_tokens == 1 for row in rows)
    ]


@pytest.mark.parametrize(
    ("num_drafts", "is_async", "has_graphs"), [(0, True, True), (3, False, True), (3, True, False)]
)
def test_a_stream_of_prompts_runs_on_the_device(
    tiny_model_dir, on_device, num_drafts, is_async, has_graphs
):
    """Prompts are chunked, and some take their first blocks from the prefix cache."""
    changes = {"max_num_batched_tokens": 24, "async_scheduling": is_async}
    config = engine_config(num_drafts, **changes)
    expected = stream(local_engine(tiny_model_dir, config, kernels="torch"), requests())
    assert not on_device
    graphs = graphs_of(is_recorded=num_drafts == 3) if has_graphs else None
    target = device_target(tiny_model_dir, config, graphs=graphs)
    num_before = graphs.num_replays if graphs else 0
    engine = make_engine(tiny_model_dir, config, target)
    assert stream(engine, requests()) == expected
    counts = engine.stats().counts
    assert len(on_device) == counts.num_steps
    assert len(mixed(on_device)) > 5
    assert any(not row.samples for rows in on_device for row in rows)
    assert any(row.num_draft_tokens for rows in mixed(on_device) for row in rows) == bool(
        num_drafts
    )
    assert counts.num_cached_tokens > 0
    if graphs:
        assert graphs.num_replays - num_before == 2 * counts.num_steps


def test_prompts_of_preempted_sequences_run_on_the_device(tiny_model_dir, on_device):
    given = requests(6, max_tokens=40)
    expected = stream(local_engine(tiny_model_dir, engine_config(2), kernels="torch"), given)
    tight = engine_config(2, num_blocks=42, max_num_batched_tokens=24, async_scheduling=True)
    engine = make_engine(tiny_model_dir, tight, device_target(tiny_model_dir, tight))
    assert stream(engine, given) == expected
    counts = engine.stats().counts
    assert counts.num_preemptions > 0
    assert len(on_device) == counts.num_steps


REGEX = StructuredOutput(regex="[ab]{3,6}")
HOST = [
    {"temperature": 0.8, "presence_penalty": 0.5},
    {"logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 0.9, "speculation": SpeculationOptions(verifier="rejection")},
    {"structured_output": REGEX},
]


def test_steps_with_rows_that_need_the_host_run_there(tiny_model_dir, on_device):
    given = requests(6)
    grammar = grammar_compiler(tiny_model_dir).compile(REGEX)
    for index, each in enumerate(HOST):
        host = request(f"host{index}", [7, 8, 9] * 4, seed=index, max_tokens=4, **each)
        is_constrained = "structured_output" in each
        given.insert(2 * index, replace(host, grammar=grammar if is_constrained else None))
    config = engine_config(3, max_num_batched_tokens=24)
    expected = stream(local_engine(tiny_model_dir, config, kernels="torch"), given)
    engine = make_engine(tiny_model_dir, config, device_target(tiny_model_dir, config))
    assert stream(engine, given) == expected
    assert 0 < len(mixed(on_device)) < len(on_device) < engine.stats().counts.num_steps


def test_ranks_agree(tiny_model_dir):
    config = engine_config(3, max_num_batched_tokens=24)
    expected = stream(local_engine(tiny_model_dir, config), requests(4))

    def on_rank(group):
        target = device_target(tiny_model_dir, config, group=group)
        return stream(make_engine(tiny_model_dir, config, target), requests(4))

    assert run_ranks(2, on_rank) == [expected] * 2


def test_a_seat_that_is_filled_ahead_has_a_place_on_the_device(tiny_model_dir, on_device):
    """The step that admits a sequence releases the one that ends before it."""
    config = engine_config(max_num_seqs=2, async_scheduling=True)
    plain = local_engine(tiny_model_dir, engine_config(max_num_seqs=2), kernels="torch")
    expected = stream(plain, requests(), every=1)
    engine = make_engine(tiny_model_dir, config, device_target(tiny_model_dir, config))
    assert stream(engine, requests(), every=1) == expected
    counts = engine.stats().counts
    assert len(on_device) == counts.num_steps
    assert counts.num_steps_ahead > counts.num_steps - 4


def test_a_step_with_a_new_and_without_an_ended_sequence_begins_after_another(tiny_model_dir):
    """The state of a sequence that ends stays until the steps with it are collected."""
    runner = device_runner(tiny_model_dir, engine_config(0))
    greedy = SamplingRules(temperature=0.0)
    tables = [BlockTableDelta(seq, 0, (4 * seq, 4 * seq + 1)) for seq in range(2)]
    prompts = [StepRow(seq, 0, (5, 6, 7 + seq), 0, True) for seq in range(2)]
    admissions = [SequenceAdmission(seq, 3, greedy) for seq in range(2)]
    alone = [
        device_runner(tiny_model_dir, engine_config(0))
        .execute(StepInput(0, (), (admissions[seq],), (tables[seq],), (prompts[seq],)))
        .rows[0]
        .token_ids
        for seq in range(2)
    ]
    assert runner.begin(StepInput(0, (), (admissions[0],), (tables[0],), (prompts[0],)))
    assert runner.begin(StepInput(1, (0,), (admissions[1],), (tables[1],), (prompts[1],)))
    assert runner.num_in_flight == 2
    found = [runner.collect().rows[0] for _ in range(2)]
    assert [(row.seq_id, row.token_ids) for row in found] == [(0, alone[0]), (1, alone[1])]


def test_a_chunk_with_invalid_states_fails_its_request_alone(tiny_model_dir):
    config = engine_config(0, max_num_batched_tokens=12)
    target = device_target(tiny_model_dir, config)
    model, forward = target._runner.model, target._runner.model.forward_on_device
    faulty = []

    def broken(batch, kv_cache):
        hidden = forward(batch, kv_cache)
        if isinstance(batch, RaggedBatch) and len(batch.input_ids) > 8 and not faulty:
            faulty.append(batch)
            hidden[8] = torch.inf  # a token of the long prompt, after which more follow
        return hidden

    model.forward_on_device = broken
    engine = make_engine(tiny_model_dir, config, target)
    for each in (request("long", [5, 6, 7] * 9), request("short", [8, 9], seed=1)):
        engine.add(each)
    errors = {}
    while engine.has_work:
        errors |= {output.request_id: output.error for output in engine.step()}
    assert faulty
    assert errors["long"] is not None
    assert errors["short"] is None


def test_attention_that_would_copy_many_pages_leaves_prompts_to_the_host(
    tiny_model_dir, on_device, monkeypatch
):
    monkeypatch.setattr("specdec.models.llama._MAX_COPIED_SLOTS", 0)
    config = engine_config(0)
    expected = stream(local_engine(tiny_model_dir, config, kernels="torch"), requests(4))
    engine = make_engine(tiny_model_dir, config, device_target(tiny_model_dir, config))
    assert stream(engine, requests(4)) == expected
    assert 0 < len(on_device) < engine.stats().counts.num_steps
    assert not mixed(on_device)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    def make(num_layers):
        return tiny_llama_dir(tmp_path_factory.mktemp("model"), layers=num_layers)

    return make


def begun(directory, rules, num_drafts):
    """Return a runner, and the operators of a step of a decode, a chunk and the end of a prompt."""
    runner = device_runner(directory, engine_config(3), dtype=torch.bfloat16)
    tables = tuple(BlockTableDelta(seq, 0, tuple(range(8 * seq, 8 * seq + 8))) for seq in range(3))
    admissions = tuple(SequenceAdmission(seq, 20, rules) for seq in range(3))
    prompt = StepRow(0, 0, tuple(range(20)), 0, True)
    runner.execute(StepInput(0, (), admissions[:1], tables[:1], (prompt,)))
    rows = (
        StepRow(0, 20, (3,) * (1 + num_drafts), num_drafts, True),
        StepRow(1, 0, tuple(range(7)), 0, False),
        StepRow(2, 0, tuple(range(20)), 0, True),
    )
    runner.execute(StepInput(1, (), admissions[1:], tables[1:], rows))  # puts the tables there
    with Operators() as operators:
        assert runner.begin(StepInput(2, (), (), (), rows))
    return runner, operators


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("rules", [SamplingRules(temperature=0), SamplingRules(top_p=0.9)], ids=str)
def test_one_copy_goes_each_way(model_dir, rules, num_drafts):
    runner, operators = begun(model_dir(1), rules, num_drafts)
    assert_one_copy_goes_each_way(runner.device_steps, operators)
    assert not any("lift_fresh" in name for name in operators.counts)


MOST_AROUND_THE_LAYERS = 160
"""Operators of a greedy step with prompts outside of its layers: the input, the spread over the
tokens, the head, the argmax, the verification, and the check of chunks."""


def test_a_layer_launches_as_many_operators_as_without_prompts(model_dir):
    few, many = (
        begun(model_dir(count), SamplingRules(temperature=0.0), 3)[1].counts for count in (1, 3)
    )
    per_layer = (many - few).total() / 2
    assert per_layer == 14
    assert few.total() - per_layer < MOST_AROUND_THE_LAYERS


@pytest.mark.parametrize("kind", SamplingKind)
def test_the_host_reads_nothing_between_the_copies(model_dir, kind):
    launcher = device_runner(model_dir(1), engine_config(3)).device_steps._launcher
    ragged = RaggedShape(num_tokens=24, num_rows=3, num_blocks=5)
    plan = StepPlan(StepShape(2, 4, 5), kind, ragged=ragged, has_chunks=True)
    assert_host_reads_nothing(lambda: launcher.launch(plan))
