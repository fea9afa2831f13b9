# Modules: specdec.worker.device.plan
"""Drafts of every kind of head in steps on the device: which there are, and no value is read."""

from dataclasses import replace
from functools import cache

import pytest

from specdec.sampling.device.device_sampler import SamplingKind
from specdec.types.messages import RowDrafting, StepRow
from specdec.worker.device.plan import StepPlan
from specdec.worker.device.step_graphs import RaggedShape, StepShape
from tests.specdec.heads import HEADS, NUM_HEADS
from tests.specdec.worker.device.head import test_tree_growth as trees
from tests.specdec.worker.device.head.test_head import config_of
from tests.specdec.worker.device.runners import device_runner
from tests.specdec.worker.operators import assert_host_reads_nothing

TEXT = list(range(3, 40))


@pytest.fixture(scope="module")
def head_dir(tiny_model_dir, tmp_path_factory):
    """Return a function that gives the directory of a head."""
    return cache(
        lambda method: HEADS[method](tiny_model_dir, tmp_path_factory.mktemp(method), [TEXT])
    )


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("eagle3", SamplingKind.GREEDY),
        ("eagle3", SamplingKind.TRUNCATED),
        ("mtp", SamplingKind.SAMPLED),
        ("dflash", SamplingKind.GREEDY),
        ("dspark", SamplingKind.TRUNCATED),
        ("p_eagle", SamplingKind.SAMPLED),
        ("medusa", SamplingKind.GREEDY),
        ("hydra", SamplingKind.GREEDY),
        ("mlp_speculator", SamplingKind.SAMPLED),
    ],
)
def test_the_host_reads_nothing_between_the_tokens_of_a_draft(
    tiny_model_dir, head_dir, method, kind
):
    """After prompts, and after steps of one shape where tokens are truncated."""
    config = config_of(method, head_dir(method), max_num_seqs=3)
    runner = device_runner(tiny_model_dir, config, head=head_dir(method))
    ragged = None if kind is SamplingKind.TRUNCATED else RaggedShape(24, 3, 5)
    plan = StepPlan(StepShape(2, 4, 5), kind, 2, ragged, has_chunks=True, has_head_prompts=True)
    assert_host_reads_nothing(lambda: runner.device_steps._launcher.launch(plan))


@pytest.mark.parametrize("method", ["eagle3", "medusa", "dflash"])
def test_the_host_reads_nothing_between_the_levels_of_a_tree(tiny_model_dir, head_dir, method):
    launcher = trees.runner_of(method, tiny_model_dir, head_dir).device_steps._launcher
    drafts, shape = launcher._head._drafts, StepShape(2, 1, 5)
    assert_host_reads_nothing(lambda: drafts.grow(SamplingKind.SAMPLED, shape))


@pytest.mark.parametrize("drafting", [(trees.NUM_NODES, NUM_HEADS + 1), (NUM_HEADS + 1, 0)])
def test_a_draft_that_is_longer_than_a_head_drafts_is_cut_on_the_device(
    tiny_model_dir, head_dir, drafting
):
    """A tree by its depth, or a chain beside a tree."""
    config = trees.config_of("medusa", head_dir("medusa"))
    speculation = replace(config.speculation, num_speculative_tokens=NUM_HEADS + 1)
    config = replace(config, speculation=speculation)
    prompts = [(7, 8, 9), (9, 8, 7)]
    of_rows = (drafting, (trees.NUM_NODES, NUM_HEADS))
    rows = [
        StepRow(i, 0, each, 0, True, RowDrafting(num_next=num_next, next_depth=depth))
        for i, (each, (num_next, depth)) in enumerate(zip(prompts, of_rows, strict=True))
    ]
    runners = [
        device_runner(tiny_model_dir, config, head=head_dir("medusa"), runs_on_device=each)
        for each in (True, False)
    ]
    step = trees.first_step(prompts, rows)
    assert runners[0].begin(step)
    found = runners[0].collect()
    assert found == runners[1].execute(step)
    is_chain = not drafting[1]
    assert len(found.rows[0].next_draft_token_ids) == (NUM_HEADS if is_chain else trees.NUM_NODES)
    assert (found.rows[0].next_draft_parents is None) == is_chain
