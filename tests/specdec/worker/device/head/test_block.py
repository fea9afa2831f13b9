"""Drafts of heads of a block in steps on the device: those of the host, from one pass."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.config.llm import LLMConfig
from specdec.engine.memory.weight_memory import draft_block_bytes
from specdec.engine.models.model_resolution import Models
from specdec.models.config.model_config import ModelConfig
from specdec.models.heads.config import HeadConfig
from specdec.sampling.device.device_sampler import SamplingKind
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.types.control import SpeculationControl
from specdec.worker.device.launch import StepPlan
from specdec.worker.device.step_graphs import Part, Stage, StepShape
from tests.specdec.engines import engine_config, local_engine, make_engine, tokens_by
from tests.specdec.fakes import run_ranks
from tests.specdec.worker.device.head.test_head import (
    NUM_DRAFTS,
    RecordedTarget,
    config_of,
    fitted_heads,
    num_with_drafts,
    requests,
    run_target,
    shaped,
)
from tests.specdec.worker.device.recorded_graphs import graphs_of
from tests.specdec.worker.device.runners import FakeGraphs, device_runner, recorded_device_steps
from tests.specdec.worker.operators import Operators

MARKOV_RANK = 8


@pytest.fixture(scope="module")
def expected(tiny_model_dir):
    """Return the tokens without speculation."""
    return tokens_by(local_engine(tiny_model_dir, engine_config(0), kernels="torch"), requests())


@pytest.fixture(scope="module")
def head_dir(tiny_model_dir, tmp_path_factory, expected):
    return fitted_heads(tiny_model_dir, tmp_path_factory, expected)


@pytest.fixture
def on_device(monkeypatch):
    """Return a list with an entry for each step that ran on the device: its rows."""
    return recorded_device_steps(monkeypatch)


def drafts_of(target):
    return [[row.next_draft_token_ids for row in output.rows] for output in target.outputs]


@pytest.mark.parametrize(
    ("method", "is_async", "has_graphs"),
    [("dflash", True, True), ("p_eagle", False, True), ("dspark", True, False)],
)
def test_the_drafts_are_those_of_the_host(
    tiny_model_dir, head_dir, expected, on_device, method, is_async, has_graphs
):
    """Every step yields the same tokens and drafts, with prompts and without.

    Speculation is off for some steps, after which the head catches up.
    """
    run, off = [tiny_model_dir, head_dir(method), method], range(3, 5)
    changes = {"async_scheduling": is_async, "max_num_batched_tokens": 20}
    tokens, host, _ = run_target(*run, runs_on_device=False, changes=changes, off=off)
    assert tokens == expected
    assert not on_device
    graphs = FakeGraphs() if has_graphs else None
    found, target, engine = run_target(*run, graphs=graphs, changes=changes, off=off)
    assert found == expected
    assert target.outputs == host.outputs
    counts = engine.stats().counts
    assert 5 <= num_with_drafts(on_device) < len(on_device) <= counts.num_steps
    assert counts.speculation.num_accepted_tokens > 0


def changed(directory, target, config, tensors=None):
    """Return a copy of a head's directory with other keys of config.json, or Markov tensors."""
    shutil.copytree(directory, target)
    path = target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if tensors:
        path = target / "model.safetensors"
        read = load_file(path)
        own = {name: read[name] for name in read if not name.startswith("markov_head.")}
        save_file(own | tensors, path, {"format": "pt"})
    return target


def markov(kind, hidden_size, vocab_size):
    """Return keys and tensors of a Markov head that changes some drafts."""
    rank, generator = MARKOV_RANK, torch.Generator().manual_seed(3)
    shapes = {"markov_w1": (vocab_size, rank), "markov_w2": (vocab_size, rank)}
    shapes |= {
        "gated": {"gate_proj": (rank, hidden_size + rank)},
        "rnn": {"joint_proj": (3 * rank, 2 * rank + hidden_size)},
    }[kind]
    tensors = {
        f"markov_head.{name}.weight": torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }
    return {"markov_rank": rank, "markov_head_type": kind}, tensors


WINDOW = {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0}
VARIANTS = {
    "rnn": ("dspark", markov("rnn", 144, 383)),
    "gated": ("dspark", markov("gated", 144, 383)),
    "causal": ("dflash", ({"causal": True}, None)),
    "window": ("dflash", (WINDOW, None)),
    "causal window": ("dflash", ({**WINDOW, "sliding_window_non_causal": False}, None)),
    "long block": ("dflash", ({"block_size": 15}, None)),
}


QUICK = ("rnn", "causal window")


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in VARIANTS],
)
def test_every_kind_of_block(tiny_model_dir, head_dir, tmp_path, on_device, name):
    """Blocks reach beyond the longest sequence, too."""
    method, (config, tensors) = VARIANTS[name]
    directory = changed(head_dir(method), tmp_path / "head", config, tensors)
    run = [tiny_model_dir, directory, method]
    options = {"asked": requests(3, max_tokens=22), "changes": {"max_model_len": 40}}
    tokens, host, _ = run_target(*run, runs_on_device=False, **options)
    found, target, engine = run_target(*run, graphs=graphs_of(is_recorded=name == "rnn"), **options)
    assert found == tokens
    assert drafts_of(target) == drafts_of(host)
    assert len({draft for step in drafts_of(target) for draft in step}) > 5
    assert len(on_device) == engine.stats().counts.num_steps
    assert max(len(each.prompt) + len(found[each.request_id]) for each in options["asked"]) == 40


def test_a_step_takes_its_drafts_before_the_host_has_them(tiny_model_dir, head_dir):
    directory, found = head_dir("dflash"), []
    for runs_on_device in (False, True):
        config = config_of("dflash", directory, async_scheduling=True, max_num_batched_tokens=256)
        options = {"head": directory, "runs_on_device": runs_on_device}
        target = RecordedTarget(device_runner(tiny_model_dir, config, FakeGraphs(), **options))
        policy = SpeculationPolicy(SpeculationControl("on", 32, NUM_DRAFTS), clock=lambda: 0.0)
        engine = make_engine(tiny_model_dir, config, target, policy=policy)
        found.append((tokens_by(engine, requests(max_tokens=30)), target.outputs))
        assert engine.stats().counts.num_steps_ahead > 10
        assert target.most_in_flight == (2 if runs_on_device else 0)
    assert found[0] == found[1]


@pytest.mark.parametrize("method", [pytest.param("dspark", marks=pytest.mark.slow), "p_eagle"])
def test_a_head_drafts_by_the_logits_of_the_target(tiny_model_dir, head_dir, on_device, method):
    """Penalties, biases and masks of a request change the logits of the head too."""
    run, changes = [tiny_model_dir, head_dir(method), method], {"async_scheduling": True}
    tokens, host, _ = run_target(*run, asked=shaped(), runs_on_device=False, changes=changes)
    found, target, _ = run_target(*run, asked=shaped(), graphs=FakeGraphs(), changes=changes)
    assert found == tokens
    assert drafts_of(target) == drafts_of(host)
    assert len(on_device) == len(target.outputs)


def test_a_head_reads_the_pass_as_it_is_beside_a_cache_of_8_bits(tiny_model_dir, head_dir):
    """Not in the type of the cache: prompts and decodes have the drafts of the host."""
    run = [tiny_model_dir, head_dir("dflash"), "dflash"]
    changes = {"kv_cache_dtype": "fp8", "max_num_batched_tokens": 20}
    tokens, host, _ = run_target(*run, runs_on_device=False, changes=changes)
    found, target, _ = run_target(*run, graphs=FakeGraphs(), changes=changes)
    assert found == tokens
    assert target.outputs == host.outputs


def test_ranks_agree(tiny_model_dir, head_dir, expected):
    def on_rank(group):
        tokens, target, _ = run_target(tiny_model_dir, head_dir("dflash"), "dflash", group)
        return tokens, target.outputs

    found = run_ranks(2, on_rank)
    assert found[0] == found[1]
    assert found[0][0] == expected


def test_another_head_has_its_own_graphs(tiny_model_dir, head_dir):
    """Graphs of the target's stages stay; blocks have those of drafts."""
    graphs, config = FakeGraphs(), config_of("dflash", head_dir("dflash"), max_num_seqs=2)
    runner = device_runner(tiny_model_dir, config, graphs, head=head_dir("dflash"))
    num_captured, steps = graphs.num_captured, runner.device_steps
    runner.head.replace_head(runner.head.head)
    of_head = (Stage(Part.FEATURES), Stage(Part.PAIRS), Stage(Part.BLOCK))
    stages = [stage for stage, _ in steps._graphs._replays]
    num_of_head = sum(each in of_head or each.part is Part.CHAIN for each in stages)
    assert graphs.num_captured - num_captured == num_of_head > 0
    blocks = {s.query_len for stage, s in steps._graphs._replays if stage == Stage(Part.BLOCK)}
    assert blocks == {2, 3, 4}


def test_blocks_of_rows_do_not_meet(tiny_model_dir, head_dir):
    """Each row has pages that no sequence and no other row has."""
    config = config_of("dflash", head_dir("dflash"), max_num_seqs=3)
    runner = device_runner(tiny_model_dir, config, head=head_dir("dflash"))
    drafts, shape = runner.device_steps._launcher._pairs, StepShape(3, 1, 5)
    drafts._ends[:3] = torch.tensor([1, config.block_size, config.block_size + 1])
    drafts._rows.num_wanted[:3], drafts._rows.places[:3] = 1, torch.arange(3)
    drafts._state.tables[:3] = torch.arange(drafts._state.tables[:3].numel()).view(3, -1)
    tokens = torch.zeros(3, drafts.parts.head.block_len(1), dtype=torch.int64)
    slots = drafts._block_batch(tokens, shape).slot_mapping.view(tokens.shape)
    assert len(slots.unique()) == slots.numel()
    assert slots.max() < drafts.parts.kv_cache.shape[1]
    num_pool = config.num_blocks * config.block_size
    is_after = slots >= num_pool + config.block_size  # and after the padding block
    assert is_after.sum(1).tolist() == [
        tokens.shape[1] - own for own in (config.block_size - 1, 0, config.block_size - 1)
    ]


def test_a_row_that_drafts_nothing_may_end_after_its_pages(tiny_model_dir, head_dir):
    """Its last token has no slot yet, and its table is the longest one of a step without graphs."""
    config = config_of("dflash", head_dir("dflash"), max_num_seqs=2)
    runner = device_runner(tiny_model_dir, config, head=head_dir("dflash"))
    drafts, size, num_pages = runner.device_steps._launcher._pairs, config.block_size, 3
    drafts._ends[:2] = torch.tensor([num_pages * size + 1, 2])
    drafts._rows.num_wanted[:2] = torch.tensor([0, 1])
    length = drafts._scratch.shape[1] * size  # whole pages, so that no slot is left over
    tokens = torch.zeros(2, length, dtype=torch.int64)
    batch = drafts._block_batch(tokens, StepShape(2, 1, num_pages))
    assert batch.slot_mapping[:length].tolist() == [config.num_blocks * size] * length
    assert batch.context_lens.max() <= batch.block_tables.shape[1] * size


@pytest.mark.parametrize("method", ["dflash", "p_eagle"])
def test_the_memory_plan_counts_the_pages_of_blocks(tiny_model_dir, head_dir, method):
    directory, target = head_dir(method), ModelConfig.from_directory(tiny_model_dir)
    limits = config_of(method, directory, max_num_seqs=3)
    runner = device_runner(tiny_model_dir, limits, head=directory)
    cache = runner.device_steps._launcher._pairs.parts.kv_cache
    num_after = cache.shape[1] - (limits.num_blocks + 1) * limits.block_size
    config = LLMConfig(
        device="cuda",
        dtype="float32",
        max_num_seqs=3,
        block_size=limits.block_size,
        speculative_config=limits.speculation,
    )
    models = Models(target, head=HeadConfig.from_directory(directory, target))
    assert draft_block_bytes(config, models) == num_after * cache[:, 0].nbytes > 0
    assert draft_block_bytes(replace(config, device="cpu"), models) == 0


def test_a_draft_launches_few_operators(tiny_model_dir, head_dir):
    """A greedy draft runs pairs, two layers of a block, and three selections."""
    config = config_of("dflash", head_dir("dflash"), max_num_seqs=2)
    launcher = device_runner(tiny_model_dir, config, head=head_dir("dflash")).device_steps._launcher
    counts = []
    for num_next in (0, NUM_DRAFTS):
        with Operators() as operators:
            launcher.launch(StepPlan(StepShape(2, 1, 5), SamplingKind.GREEDY, num_next))
        counts.append(operators.counts.total())
    assert counts[1] - counts[0] < 300
