# Modules: specdec.worker.device.plan
"""Drafts of every kind of head in steps on the device: the host reads nothing between them."""

from functools import cache

import pytest

from specdec.sampling.device.device_sampler import SamplingKind
from specdec.worker.device.plan import StepPlan
from specdec.worker.device.step_graphs import RaggedShape, StepShape
from tests.specdec.heads import HEADS
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
