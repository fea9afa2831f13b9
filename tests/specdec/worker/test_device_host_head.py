"""Heads of a block, which the host runs behind steps on the device."""

import pytest

from tests.specdec.engines import engine_config, local_engine, tokens_by
from tests.specdec.fakes import run_ranks
from tests.specdec.worker.device import FakeGraphs, recorded_device_steps
from tests.specdec.worker.test_device_head import (
    fitted_heads,
    num_with_drafts,
    requests,
    run_target,
)


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


@pytest.mark.parametrize(
    ("method", "has_graphs"), [("dflash", True), ("p_eagle", False), ("dspark", False)]
)
def test_every_step_of_the_target_runs_on_the_device(
    tiny_model_dir, head_dir, expected, on_device, method, has_graphs
):
    """Each yields the tokens and drafts of the host, with prompts and without."""
    run = [tiny_model_dir, head_dir(method), method]
    changes = {"async_scheduling": True, "max_num_batched_tokens": 20}
    tokens, host, _ = run_target(*run, runs_on_device=False, changes=changes, off=range(3, 5))
    assert tokens == expected
    graphs = FakeGraphs() if has_graphs else None
    found, target, engine = run_target(*run, graphs=graphs, changes=changes, off=range(3, 5))
    assert found == expected
    assert target.outputs == host.outputs
    assert target.most_in_flight == 0  # the host has to draft behind each step
    counts = engine.stats().counts
    assert len(on_device) == counts.num_steps
    assert num_with_drafts(on_device) >= 5
    assert counts.speculation.num_accepted_tokens > 0


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
