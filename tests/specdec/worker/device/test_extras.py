# Modules: specdec.kernels.reference.logit_edits, specdec.sampling.device.device_edits
# Modules: specdec.worker.device.input.edit_collector, specdec.worker.device.rules
# Modules: specdec.worker.device.seen_tokens
"""Penalties, biases, masks and log-probabilities in steps on the device: the host's bits."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.sampling.device.device_edits import chain_paths
from specdec.sampling.device.device_sampler import SamplingKind
from specdec.sampling.device.device_trees import VerifiedChains
from specdec.sampling.vocab_shard import VocabShard
from specdec.types.messages import (
    PENDING_TOKEN,
    BlockTableDelta,
    Logprobs,
    RowDrafting,
    SequenceAdmission,
    StepInput,
    StepRow,
)
from specdec.types.sampling.sampling_params import StructuredOutput
from specdec.types.sampling.sampling_spec import SamplingRules
from specdec.worker.batch.batch_state import BatchState
from specdec.worker.device.extras import ExtrasPacker
from specdec.worker.device.state import DeviceState, DeviceStepLimits
from specdec.worker.device.step_graphs import StepShape
from tests.specdec.engines import engine_config, local_engine, make_engine, request, run
from tests.specdec.fakes import run_ranks
from tests.specdec.grammars import grammar_compiler
from tests.specdec.worker.device.runners import (
    FakeGraphs,
    device_runner,
    device_target,
    recorded_device_steps,
)
from tests.specdec.worker.operators import (
    Operators,
    assert_host_reads_nothing,
    assert_one_copy_goes_each_way,
)

PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.15}
PARAMS = {
    "plain": {"temperature": 0.7},
    "penalties": {"temperature": 0.9, **PENALTIES},
    "greedy penalties": {**PENALTIES, "frequency_penalty": 0.6},
    "bias": {"temperature": 1.0, "logit_bias": {7: 4.0, 20: -3.5, 300: 2.25}},
    "words": {"temperature": 0.8, "bad_words": ("e", "the", "river"), "min_tokens": 9},
    "allowed": {"temperature": 1.0, "allowed_token_ids": tuple(range(3, 380, 7)), **PENALTIES},
    "ends": {"min_tokens": 12, "stop_token_ids": tuple(range(0, 383, 3)), "ignore_eos": False},
    "logprobs": {"temperature": 0.8, "logprobs": 3},
    "given": {"temperature": 0.6, "logprobs": 1, "logprob_token_ids": (381, 4)},
    "both": {"logprobs": 5, "presence_penalty": 0.7, "temperature": 0.5},
}
WITH_LOGPROBS = ("logprobs", "given", "both")
GRAMMAR = StructuredOutput(regex="[a-z ]{20,60}")


def requests(directory, names=(*PARAMS, "grammar")):
    """Return a request for each of the names."""
    compiler = grammar_compiler(directory)
    found = []
    for index, name in enumerate(names):
        prompt = [index + 5, 7, 8, 9, 7, 8] * 2
        if name == "grammar":
            params = {"structured_output": GRAMMAR, "temperature": 0.9, "max_tokens": 30}
            made = request(name, prompt, seed=index, **{**params, "ignore_eos": False})
            found.append(replace(made, grammar=compiler.compile(GRAMMAR)))
        else:
            found.append(request(name, prompt, seed=index, **PARAMS[name]))
    return found


def results(engine, given):
    """Return the tokens of each request, and its log-probabilities in one piece."""
    return {
        name: (each.token_ids, Logprobs.join(each.logprobs) if each.logprobs else None)
        for name, each in run(engine, given).items()
    }


def assert_equal(found, expected):
    """Check tokens, and log-probabilities but for the rounding of another batch shape."""
    assert {name: tokens for name, (tokens, _) in found.items()} == {
        name: tokens for name, (tokens, _) in expected.items()
    }
    for name, (tokens, own) in found.items():
        reference = expected[name][1]
        assert (own is None) == (reference is None) == (name.split()[-1] not in WITH_LOGPROBS)
        if own is not None:
            assert len(own) == len(tokens)
            assert own.token_ids.tolist() == reference.token_ids.tolist()
            assert own.ranks.tolist() == reference.ranks.tolist()
            np.testing.assert_allclose(own.logprobs, reference.logprobs, atol=1e-4)


@pytest.fixture
def device_steps(monkeypatch):
    """Return a list with an entry for each step that ran on the device."""
    return recorded_device_steps(monkeypatch)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_tokens_and_logprobs_are_those_of_the_host(tiny_model_dir, device_steps, num_drafts):
    config, given = engine_config(num_drafts, max_num_seqs=12), requests(tiny_model_dir)
    expected = results(local_engine(tiny_model_dir, config, kernels="torch"), given)
    graphs = None if num_drafts else FakeGraphs()
    engine = make_engine(
        tiny_model_dir, config, device_target(tiny_model_dir, config, graphs=graphs)
    )
    assert_equal(results(engine, given), expected)
    assert len(device_steps) == engine.stats().counts.num_steps  # none ran on the host
    drafted = {row.seq_id for rows in device_steps for row in rows if row.num_draft_tokens}
    assert len(drafted) > 5 if num_drafts else not drafted


def test_counts_of_tokens_follow_a_step_whose_tokens_the_host_lacks(tiny_model_dir, device_steps):
    config = engine_config(0, async_scheduling=True, max_num_seqs=12)
    given = requests(tiny_model_dir, [name for name in PARAMS if name != "words"])
    expected = results(local_engine(tiny_model_dir, engine_config(0, max_num_seqs=12)), given)
    engine = make_engine(tiny_model_dir, config, device_target(tiny_model_dir, config))
    assert_equal(results(engine, given), expected)
    assert any(row.is_pending for rows in device_steps for row in rows)
    assert engine.stats().counts.num_steps_ahead > 10


def test_bad_words_wait_for_the_tokens_before(tiny_model_dir, device_steps):
    config = engine_config(0, async_scheduling=True)
    given = requests(tiny_model_dir, ["words", "penalties"])
    expected = results(local_engine(tiny_model_dir, engine_config(0)), given)
    engine = make_engine(tiny_model_dir, config, device_target(tiny_model_dir, config))
    assert_equal(results(engine, given), expected)
    assert len(device_steps) >= engine.stats().counts.num_steps


def test_tokens_are_counted_again_after_a_step_of_the_host(
    tiny_model_dir, device_steps, monkeypatch
):
    config, given = engine_config(3, max_num_seqs=12), requests(tiny_model_dir)
    expected = results(local_engine(tiny_model_dir, config, kernels="torch"), given)
    target = device_target(tiny_model_dir, config)
    queue, begin = target._runner._queue, target._runner._queue.begin

    def begun(step_id, rows, states):
        return step_id % 3 > 0 and begin(step_id, rows, states)

    monkeypatch.setattr(queue, "begin", begun)
    engine = make_engine(tiny_model_dir, config, target)
    assert_equal(results(engine, given), expected)
    assert 0 < len(device_steps) < engine.stats().counts.num_steps


def test_preempted_sequences_are_counted_again(tiny_model_dir, device_steps):
    some = requests(tiny_model_dir, ["penalties", "allowed", "both"])
    given = [replace(each, request_id=f"{i} {each.request_id}") for i in range(2) for each in some]
    expected = results(local_engine(tiny_model_dir, engine_config(2), kernels="torch"), given)
    tight = engine_config(2, num_blocks=40, async_scheduling=True)
    engine = make_engine(tiny_model_dir, tight, device_target(tiny_model_dir, tight))
    assert_equal(results(engine, given), expected)
    assert engine.stats().counts.num_preemptions > 0
    assert device_steps


def test_ranks_agree(tiny_model_dir):
    config, given = engine_config(3, max_num_seqs=12), requests(tiny_model_dir)
    expected = results(local_engine(tiny_model_dir, config), given)

    def on_rank(group):
        target = device_target(tiny_model_dir, config, group=group)
        return results(make_engine(tiny_model_dir, config, target), given)

    for found in run_ranks(2, on_rank):
        assert_equal(found, expected)


def test_prompts_with_logprobs_run_on_the_host(tiny_model_dir, device_steps):
    config = engine_config(0)
    given = [request("r", [5, 6, 7, 8], prompt_logprobs=2, presence_penalty=0.5)]
    expected = run(local_engine(tiny_model_dir, config, kernels="torch"), given)["r"]
    engine = make_engine(tiny_model_dir, config, device_target(tiny_model_dir, config))
    found = run(engine, given)["r"]
    assert found.token_ids == expected.token_ids
    assert len(found.prompt_logprobs) == len(expected.prompt_logprobs) == 1
    assert len(device_steps) == engine.stats().counts.num_steps - 1


VOCAB, QUERY_LEN = 383, 4
RULES = [
    SamplingRules(),
    SamplingRules(repetition_penalty=1.7, frequency_penalty=0.3, presence_penalty=-0.2),
    SamplingRules(logit_bias=((4, 1.5), (200, -100.0), (382, 3.25))),
    SamplingRules(bad_words=((9,), (5, 6), (6, 5, 7)), min_tokens=3, end_token_ids=(2, 9, 300)),
    SamplingRules(allowed_token_ids=(2, 5, 31, 32, 33, 300), presence_penalty=0.5),
    SamplingRules(min_tokens=50, end_token_ids=(2, 300), repetition_penalty=0.8),
]


def state_of(rules, tokens):
    """Return the state of a rank with a sequence for each of the rules, and a row for each."""
    state = BatchState(4, torch.device("cpu"), tokens)
    text = (5, 6, 7, 5, 9, 6, 5)
    admitted = tuple(
        SequenceAdmission(seq, 3, each, text if each.needs_tokens else ())
        for seq, each in enumerate(rules)
    )
    state.update(StepInput(0, (), admitted, (), ()))
    drafts = [(6, 5, 7), (5, 5), (), (6, 5), (7, 300, 31), (2,)]
    rows = [
        StepRow(seq, 6, (5, *drafts[seq % len(drafts)]), len(drafts[seq % len(drafts)]), True)
        for seq in range(len(rules))
    ]
    return state, rows


@pytest.mark.parametrize("tokens", [range(VOCAB), range(128, VOCAB)], ids=["whole", "shard"])
def test_logits_have_the_bits_of_the_host(tokens):
    state, rows = state_of(RULES, tokens)
    generator = torch.Generator().manual_seed(2)
    mask = torch.randint(-(2**31), 2**31 - 1, (4, 12), generator=generator, dtype=torch.int32)
    masks = mask.numpy()
    masks[:, -1] &= 2**31 - 1
    rows[0] = rows[0]._replace(grammar_mask=masks)
    rows[5] = rows[5]._replace(grammar_mask=masks[:2])
    state.update_histories(rows)
    logits = torch.randn(len(rows) * QUERY_LEN, len(tokens), generator=generator) * 3
    own = [i * QUERY_LEN + j for i, row in enumerate(rows) for j in range(1 + row.num_draft_tokens)]
    expected = state.logits_processor(rows).apply(logits[own].clone())
    found, extras = edited(state, rows, logits, tokens)
    assert torch.equal(found[own], expected)
    assert not torch.equal(logits[own], expected)
    assert extras.counted[:, 0].tolist() == [1, 4, 5]


def edited(state, rows, logits, tokens):
    """Return logits that the device has changed, and the needs of the rows."""
    limits = DeviceStepLimits(len(rows), QUERY_LEN - 1, 64, 4, 16)
    device = DeviceState(limits, torch.device("cpu"))
    assert all(device.has_place(row.seq_id) for row in rows)
    packer = ExtrasPacker(device, torch.device("cpu"))
    extras = packer.pack(rows, state.states(rows), QUERY_LEN)
    drafts = torch.zeros(len(rows), QUERY_LEN - 1, dtype=torch.int64)
    for own, row in zip(drafts, rows, strict=True):
        own[: row.num_draft_tokens] = torch.tensor(row.drafts, dtype=torch.int64)
    starts = torch.tensor([row.known_end - 3 for row in rows])[:, None]
    positions = (starts + torch.arange(QUERY_LEN)).flatten()
    found, shard = logits.clone(), VocabShard(TensorParallelGroup(), tokens.start, VOCAB)
    extras.edit(found, chain_paths(extras.edits.rows, drafts), positions, shard)
    return found, extras


def test_faulty_logits_stay_faulty():
    state, rows = state_of([*RULES[3:5]], range(VOCAB))
    state.update_histories(rows)
    logits = torch.zeros(2 * QUERY_LEN, VOCAB)
    logits[0, 9], logits[QUERY_LEN, 8], logits[QUERY_LEN + 1, 10] = torch.nan, torch.inf, torch.nan
    found, _ = edited(state, rows, logits, range(VOCAB))
    is_faulty = ~(found.amax(1) < torch.inf)
    assert is_faulty.tolist() == [True, False, False, False, True, True, False, False]


def test_new_tokens_are_counted():
    tokens, shard = range(100, VOCAB), VocabShard(TensorParallelGroup(), 100, VOCAB)
    state, rows = state_of([RULES[1]] * 2, tokens)
    state.update_histories(rows)
    _, extras = edited(state, rows, torch.zeros(2 * QUERY_LEN, len(tokens)), tokens)
    new = torch.tensor([[300, 5, 300, 7], [200, 201, 202, 203]])
    before = extras.seen.clone()
    extras.count(VerifiedChains(new, torch.tensor([3, 1])), shard)
    assert (extras.seen - before).nonzero().tolist() == [[0, 200], [1, 100]]
    assert extras.seen[0, 200] == 2


def test_a_head_drafts_no_end_where_a_pending_row_may_be_below_min_tokens():
    """The position of a row after drafts is the highest that is possible."""
    rules = SamplingRules(min_tokens=4, end_token_ids=(2, 300))
    state, [row] = state_of([rules], range(VOCAB))
    [own] = state.states([row])
    own.num_tokens = 5  # two output tokens, and one or more of the step in flight
    row = StepRow(0, 7, (PENDING_TOKEN,), 0, True, RowDrafting(num_held=2, num_next=2), max_end=60)
    device = DeviceState(DeviceStepLimits(1, 3, 64, 4, 16), torch.device("cpu"))
    assert device.has_place(0)
    extras = ExtrasPacker(device, torch.device("cpu")).pack([row], [own], QUERY_LEN)
    assert extras.draft_edits.banned.tolist() == [[0, 2, 4], [0, 300, 4]]
    own.num_tokens = 7
    assert ExtrasPacker(device, torch.device("cpu")).pack([row], [own], QUERY_LEN) is None


EXTRA_RULES = [
    SamplingRules(presence_penalty=0.5),
    SamplingRules(temperature=0.0, logit_bias=((5, 1.0),), min_tokens=4, end_token_ids=(2,)),
    SamplingRules(logprobs=2),
]


@pytest.mark.parametrize("rules", EXTRA_RULES, ids=["penalties", "bias", "logprobs"])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_few_copies_and_operators_are_added(tiny_model_dir, rules, num_drafts):
    """One copy to the device, and one back with log-probabilities."""
    runner = device_runner(tiny_model_dir, engine_config(3))
    prompt = (5, 6, 7)
    row = StepRow(0, 3, (3,) * (1 + num_drafts), num_drafts, True)
    admission = SequenceAdmission(0, 3, rules, prompt)
    table = BlockTableDelta(0, 0, (0, 1, 2))
    runner.execute(StepInput(0, (), (admission,), (table,), (StepRow(0, 0, prompt, 0, True),)))
    token = runner._batch_state.states([row])[0].last_token
    row = row._replace(token_ids=(token, *row.token_ids[1:]))
    with Operators() as operators:
        assert runner.begin(StepInput(2, (), (), (), (row,)))
    assert_one_copy_goes_each_way(runner.device_steps, operators)
    assert operators.counts["aten._to_copy.default"] <= 3  # on a GPU one, to the device
    plain, _ = plain_operators(tiny_model_dir, num_drafts)
    assert operators.counts.total() - plain.counts.total() < 60


def plain_operators(directory, num_drafts):
    runner = device_runner(directory, engine_config(3))
    admission, table = SequenceAdmission(0, 3, SamplingRules()), BlockTableDelta(0, 0, (0, 1, 2))
    runner.execute(StepInput(0, (), (admission,), (table,), (StepRow(0, 0, (5, 6, 7), 0, True),)))
    row = StepRow(0, 3, (3,) * (1 + num_drafts), num_drafts, True)
    with Operators() as operators:
        assert runner.begin(StepInput(1, (), (), (), (row,)))
    return operators, runner


def test_the_host_reads_nothing(tiny_model_dir):
    runner = device_runner(tiny_model_dir, engine_config(3))
    steps, tokens = runner.device_steps, runner.model.vocab_slice
    state, rows = state_of([*RULES, SamplingRules(logprobs=3)], tokens)
    rows = [row._replace(grammar_mask=np.full((4, 12), -1, np.int32)) for row in rows]
    assert all(steps._state.has_place(row.seq_id) for row in rows)
    extras = steps._extras.pack(rows, state.states(rows), QUERY_LEN)
    shape = StepShape(7, QUERY_LEN, 5)
    assert_host_reads_nothing(
        lambda: steps._launcher.launch_sampling(SamplingKind.TRUNCATED, shape, extras)
    )
