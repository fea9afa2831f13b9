# Modules: specdec.worker.device.head.pairs, specdec.worker.device.input.draft_layout
# Modules: specdec.worker.head.parts
"""Drafts of a head in steps on the device: those of the host."""

from copy import deepcopy
from dataclasses import replace
from functools import cache

import pytest
import torch

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.types.control import SpeculationControl
from specdec.worker import LocalTarget
from specdec.worker.warm_up import warm_up_target
from tests.specdec.attention_heads import fitted_head_dir
from tests.specdec.engines import engine_config, local_engine, make_engine, request, tokens_by
from tests.specdec.fakes import run_ranks
from tests.specdec.heads import copied_model_dir
from tests.specdec.worker.device.recorded_graphs import RecordedGraphs, graphs_of
from tests.specdec.worker.device.runners import FakeGraphs, device_runner, recorded_device_steps

COLOCATED = "colocated_draft_model"
NUM_DRAFTS = 3
SAMPLING = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.8, "min_p": 0.02},
]


def requests(count=5, **params):
    generator = torch.Generator().manual_seed(5)
    pieces = torch.randint(3, 383, (count, 6), generator=generator).tolist()
    return [
        request(f"r{i}", piece * (1 + i), seed=i, **{**SAMPLING[i % len(SAMPLING)], **params})
        for i, piece in enumerate(pieces)
    ]


def fitted_heads(model_dir, tmp_path_factory, expected):
    """Return a function that gives the directory of a head, some of whose drafts are right."""
    asked = requests()
    texts = [[*each.prompt, *expected[each.request_id]] for each in asked]
    lengths = [len(each.prompt) for each in asked]

    @cache
    def write(method):
        directory = tmp_path_factory.mktemp(method)
        if method == COLOCATED:
            return copied_model_dir(model_dir, directory, texts)
        return fitted_head_dir(method, model_dir, directory, texts, lengths, depth=NUM_DRAFTS)

    return write


@pytest.fixture(scope="module")
def expected(tiny_model_dir):
    """Return the tokens without speculation."""
    return tokens_by(local_engine(tiny_model_dir, engine_config(0), kernels="torch"), requests())


@pytest.fixture(scope="module")
def head_dir(tiny_model_dir, tmp_path_factory, expected):
    return fitted_heads(tiny_model_dir, tmp_path_factory, expected)


class RecordedTarget(LocalTarget):
    """Keeps all outputs, and how many steps the device ran and drafted after, at most at once."""

    def __init__(self, runner):
        super().__init__(runner)
        self.outputs, self.most_in_flight = [], 0

    def begin(self, step):
        super().begin(step)
        self.most_in_flight = max(self.most_in_flight, self._runner.num_in_flight)

    def collect(self):
        self.outputs.append(super().collect())
        return self.outputs[-1]


def config_of(method, directory, **changes):
    speculation = SpeculativeConfig.of(method, NUM_DRAFTS, model=str(directory))
    return engine_config(speculation=speculation, **changes)


def run_target(model_dir, head_dir, method, group=None, asked=None, off=(), **options):
    """Run requests; return the tokens, the target and the engine. off: steps without drafts."""
    config = config_of(method, head_dir, **options.pop("changes", {}))
    runner = device_runner(model_dir, config, head=head_dir, group=group, **options)
    target = RecordedTarget(runner)
    policy = SpeculationPolicy(SpeculationControl("on", 32, NUM_DRAFTS), clock=lambda: 0.0)
    engine = make_engine(model_dir, config, target, policy=policy)
    tokens = {}
    for each in requests() if asked is None else asked:
        engine.add(each)
        tokens[each.request_id] = []
    while engine.has_work:
        mode = "off" if len(target.outputs) in off else "on"
        engine.set_speculation(SpeculationControl(mode, 32, NUM_DRAFTS))
        for output in engine.step():
            tokens[output.request_id].extend(output.token_ids)
        engine.check_integrity()
    return tokens, target, engine


@pytest.fixture
def on_device(monkeypatch):
    """Return a list with an entry for each step that ran on the device: its rows."""
    return recorded_device_steps(monkeypatch)


def num_with_drafts(steps):
    return sum(any(row.drafting.num_next for row in rows) for rows in steps)


@pytest.mark.parametrize(
    ("method", "is_async", "has_graphs"),
    [
        ("eagle3", True, False),
        ("eagle3", False, True),
        ("eagle", True, True),
        ("mtp", False, True),
        (COLOCATED, True, True),
    ],
)
def test_the_drafts_are_those_of_the_host(
    tiny_model_dir, head_dir, expected, on_device, method, is_async, has_graphs
):
    """Every step yields the same tokens and drafts as on the host.

    Prompts are chunked, and speculation is off for some steps, after which the head catches up.
    """
    directory, off = head_dir(method), range(3, 5)
    changes = {"async_scheduling": is_async}
    run = [tiny_model_dir, directory, method]
    tokens, host, _ = run_target(*run, runs_on_device=False, changes=changes, off=off)
    assert tokens == expected
    assert not on_device
    graphs = graphs_of(is_recorded=method == "eagle3") if has_graphs else None
    found, target, engine = run_target(*run, graphs=graphs, changes=changes, off=off)
    assert found == expected
    assert target.outputs == host.outputs
    assert num_with_drafts(on_device) >= 5
    assert num_with_drafts(on_device) < len(on_device)
    counts = engine.stats().counts.speculation
    assert counts.num_accepted_tokens > 0


SHAPED = [
    {"presence_penalty": 0.6, "repetition_penalty": 1.2, "temperature": 0.8},
    {"logit_bias": {7: 3.0, 20: -2.0}, "min_tokens": 9, "frequency_penalty": 0.3},
    {"allowed_token_ids": tuple(range(3, 380, 5)), "temperature": 1.0, "logprobs": 2},
    {"temperature": 0.7},
]


def shaped():
    """Return requests whose logits are changed, but for the last one's."""
    return [
        replace(each, params=replace(each.params, **params))
        for each, params in zip(requests(4), SHAPED, strict=True)
    ]


@pytest.mark.parametrize("method", ["eagle3", "mtp", COLOCATED])
def test_a_head_drafts_by_the_logits_of_the_target(tiny_model_dir, head_dir, on_device, method):
    """Penalties, biases and masks of a request change the logits of the head too."""
    asked = shaped()
    run = [tiny_model_dir, head_dir(method), method]
    changes = {"async_scheduling": True}
    tokens, host, _ = run_target(*run, asked=asked, runs_on_device=False, changes=changes)
    found, target, _ = run_target(*run, asked=asked, graphs=FakeGraphs(), changes=changes)
    assert found == tokens
    drafts = [[each.next_draft_token_ids for each in output.rows] for output in target.outputs]
    assert drafts == [
        [each.next_draft_token_ids for each in output.rows] for output in host.outputs
    ]
    assert len(on_device) == len(target.outputs)
    assert num_with_drafts(on_device) >= 5


@pytest.mark.parametrize("method", ["eagle3", "mtp", COLOCATED])
def test_prompts_run_on_the_device_with_the_head(
    tiny_model_dir, head_dir, expected, on_device, method
):
    """Every step is one pass, also where prompts are chunked or begin with cached blocks."""
    directory, asked = head_dir(method), requests()
    again = replace(asked[3], request_id="again")
    changes = {"max_num_batched_tokens": 20, "async_scheduling": True, "max_num_seqs": 3}
    run = [tiny_model_dir, directory, method]
    options = {"asked": [*asked, again], "changes": changes}
    tokens, host, _ = run_target(*run, runs_on_device=False, **options)
    assert tokens == expected | {"again": expected["r3"]}
    found, target, engine = run_target(*run, graphs=FakeGraphs(), **options)
    assert found == tokens
    assert [each.rows for each in target.outputs] == [each.rows for each in host.outputs]
    counts = engine.stats().counts
    assert len(on_device) == counts.num_steps
    assert counts.num_cached_tokens > 0
    rows = [row for step in on_device for row in step]
    assert any(row.drafting.num_next and not row.samples for row in rows)
    mixed = [step for step in on_device if len({row.num_known_tokens > 1 for row in step}) == 2]
    assert any(row.num_draft_tokens for step in mixed for row in step)


def test_a_step_takes_its_drafts_before_the_host_has_them(tiny_model_dir, head_dir):
    directory, found = head_dir("eagle3"), []
    for runs_on_device in (False, True):
        config = config_of("eagle3", directory, async_scheduling=True, max_num_batched_tokens=256)
        runner = device_runner(
            tiny_model_dir, config, FakeGraphs(), head=directory, runs_on_device=runs_on_device
        )
        target = RecordedTarget(runner)
        policy = SpeculationPolicy(SpeculationControl("on", 32, NUM_DRAFTS), clock=lambda: 0.0)
        engine = make_engine(tiny_model_dir, config, target, policy=policy)
        found.append((tokens_by(engine, requests(max_tokens=40)), target.outputs))
        assert engine.stats().counts.num_steps_ahead > 20
        assert target.most_in_flight == (2 if runs_on_device else 0)
    assert found[0] == found[1]


def test_ranks_agree(tiny_model_dir, head_dir, expected):
    directory = head_dir("eagle3")

    def on_rank(group):
        tokens, target, _ = run_target(tiny_model_dir, directory, "eagle3", group)
        return tokens, target.outputs

    found = run_ranks(2, on_rank)
    assert found[0] == found[1]
    assert found[0][0] == expected


def test_another_head_has_its_own_graphs(tiny_model_dir, head_dir, expected):
    """A step in flight goes on with the head that was there before."""
    directory, asked = head_dir("eagle3"), requests(2)
    config = config_of("eagle3", directory)
    graphs = RecordedGraphs()
    runner = device_runner(tiny_model_dir, config, graphs, head=directory)
    num_captured = graphs.num_captured
    other = deepcopy(runner.head.head)
    other.lm_head.matrix.weight.neg_()
    target = RecordedTarget(runner)
    engine = make_engine(tiny_model_dir, config, target)
    for each in asked:
        engine.add(each)
    tokens = {each.request_id: [] for each in asked}
    while engine.has_work:
        if len(target.outputs) == 3:
            runner.head.replace_head(other)
        for output in engine.step():
            tokens[output.request_id].extend(output.token_ids)
    assert tokens == {each.request_id: expected[each.request_id] for each in asked}
    assert num_captured < graphs.num_captured < 2 * num_captured
    drafts = [[row.next_draft_token_ids for row in each.rows] for each in target.outputs]
    accepted = [sum(len(row.token_ids) - 1 for row in each.rows) for each in target.outputs]
    assert sum(accepted[:4]) > 0
    assert sum(accepted[5:]) == 0, drafts


def test_the_features_of_sequences_stay_while_graphs_of_another_head_are_captured(
    tiny_model_dir, head_dir
):
    """Captures run on the slots of padding, and not on those of the last passes of each size."""
    directory = head_dir("eagle3")
    config = config_of("eagle3", directory)
    runner = device_runner(tiny_model_dir, config, FakeGraphs(runs_captured=True), head=directory)
    engine = make_engine(tiny_model_dir, config, LocalTarget(runner))
    for each in requests(2):
        engine.add(each)
    for _ in range(5):
        engine.step()
    parts, num_slots = runner.head.parts, config.num_blocks * config.block_size
    features, kv_cache = parts.features.clone(), parts.kv_cache.clone()
    assert features[:num_slots].any()
    other = deepcopy(runner.head.head)
    other.projection.fc.linear.matrix.weight.neg_()
    runner.head.replace_head(other)
    assert torch.equal(parts.features[:num_slots], features[:num_slots])
    assert torch.equal(parts.kv_cache[:, :num_slots], kv_cache[:, :num_slots])


def test_the_warm_up_runs_a_prompt_on_the_device_and_on_the_host(
    tiny_model_dir, head_dir, on_device
):
    directory = head_dir("eagle3")
    config = config_of("eagle3", directory)
    runner = device_runner(tiny_model_dir, config, head=directory)
    passes, forward = [], runner.model.forward_with_taps

    def recorded(batch, kv_cache, taps):
        passes.append(batch.num_tokens)
        return forward(batch, kv_cache, taps)

    runner.model.forward_with_taps = recorded
    warm_up_target(runner, 40, config.max_model_len)
    assert next(len(row.token_ids) for rows in on_device for row in rows) == 40
    assert 40 in passes
    assert runner.num_in_flight == 0
