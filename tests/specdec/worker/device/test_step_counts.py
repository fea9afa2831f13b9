"""What a step on the device costs the host: operators, copies, and waiting for values.

A GPU is idle while the host launches a small operator or waits for a value, so the counts decide
the time of a step there; no GPU is needed for them.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.sampling.device.device_sampler import SamplingKind
from specdec.types.messages import (
    BlockTableDelta,
    RowDrafting,
    SequenceAdmission,
    StepInput,
    StepRow,
)
from specdec.types.sampling.sampling_spec import SamplingRules
from specdec.worker.device.step_graphs import StepShape
from tests.specdec.engines import engine_config
from tests.specdec.fakes import run_ranks
from tests.specdec.tiny import tiny_llama_dir
from tests.specdec.worker.device.runners import device_runner
from tests.specdec.worker.operators import (
    Operators,
    assert_host_reads_nothing,
    assert_one_copy_goes_each_way,
)

CONFIG = engine_config(speculation=SpeculativeConfig.of("ngram", 3, num_draft_tree_tokens=4))
DRAFTS = {"decode": None, "chain": (-1, 0, 1), "tree": (-1, -1, 0)}
"""Parents of the drafts of a step."""
PROMPT = (5, 6, 7, 8, 9)
TORCH_OPERATORS = 14
"""Of a layer on torch's operators: 2 norms, 4 products, 3 for the rotation, 3 for attention, 2 for
the gate."""
MOVE_OPERATORS = 2
"""Operators of torch that move a layer's KV after an accepted path; one kernel serves all."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    def make(num_layers):
        return tiny_llama_dir(tmp_path_factory.mktemp("model"), layers=num_layers)

    return make


def begun(directory, rules, drafts, dtype=torch.float32):
    """Return a runner after a prompt, and the operators of the begin of its next step."""
    runner, step = after_prompt(directory, rules, drafts, dtype)
    with Operators() as operators:
        assert runner.begin(step)
    return runner, operators


def after_prompt(directory, rules, drafts, dtype=torch.float32, group=None):
    """Return a runner after a prompt, and its next step."""
    runner = device_runner(directory, CONFIG, dtype=dtype, group=group)
    table = BlockTableDelta(0, 0, (0, 1, 2, 3))
    prompt = StepRow(0, 0, PROMPT, 0, True)
    admission = SequenceAdmission(0, len(PROMPT), rules)
    runner.execute(StepInput(0, (), (admission,), (table,), (prompt,)))
    parents = DRAFTS[drafts] or ()
    tokens = (3, *range(4, 4 + len(parents)))
    tree = parents if drafts == "tree" else None
    row = StepRow(0, len(PROMPT), tokens, len(parents), True, RowDrafting(parents=tree))
    runner.execute(StepInput(1, (), (), (), (row,)))  # puts the table onto the device
    return runner, StepInput(2, (), (), (), (row,))


@pytest.mark.parametrize("drafts", DRAFTS)
def test_a_layer_launches_few_operators(model_dir, drafts):
    rules = SamplingRules(temperature=0.0)
    few, many = (
        begun(model_dir(count), rules, drafts, torch.bfloat16)[1].counts for count in (1, 3)
    )
    per_layer = (many - few).total() / 2
    assert (few - many).total() == 0
    assert per_layer == TORCH_OPERATORS + MOVE_OPERATORS * (drafts == "tree")


@pytest.mark.parametrize(("drafts", "most"), [("decode", 80), ("chain", 95), ("tree", 180)])
def test_operators_around_the_layers(model_dir, drafts, most):
    """Counted are the input, the head, the argmax and the verification of a greedy step.

    The kernels in whose place torch walks through a tree and moves KV are three.
    """
    _, operators = begun(model_dir(1), SamplingRules(temperature=0.0), drafts, torch.bfloat16)
    assert operators.counts.total() - TORCH_OPERATORS < most


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("rules", [SamplingRules(temperature=0), SamplingRules(top_p=0.9)], ids=str)
def test_one_copy_goes_each_way(model_dir, rules, drafts):
    runner, operators = begun(model_dir(1), rules, drafts)
    assert_one_copy_goes_each_way(runner.device_steps, operators)
    from_host = [name for name in operators.counts if "_to_copy" in name or "lift_fresh" in name]
    assert not from_host, "a tensor was made from values of the host"


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize(
    ("rules", "of_sampling"),
    [
        (SamplingRules(temperature=0.0), ["all_gather"]),
        (SamplingRules(), ["all_to_all", "all_gather"]),
        (SamplingRules(top_p=0.9, top_k=5), ["all_to_all", "all_gather"]),
    ],
    ids=["greedy", "sampled", "truncated"],
)
def test_ranks_add_up_twice_in_a_layer_and_gather_once_in_a_step(
    model_dir, rules, of_sampling, drafts
):
    directory = model_dir(3)

    def on_rank(group):
        runner, step = after_prompt(directory, rules, drafts, group=group)
        group.called.clear()
        assert runner.begin(step)
        return group.called

    of_pass = ["all_reduce"] * (1 + 2 * 3)  # of the embedding, and after attention and MLP
    assert run_ranks(2, on_rank) == [of_pass + of_sampling] * 2


@pytest.mark.parametrize("kind", SamplingKind)
@pytest.mark.parametrize(("query_len", "has_trees"), [(1, False), (4, False), (4, True)])
def test_the_host_reads_nothing_between_the_copies(model_dir, kind, query_len, has_trees):
    steps = device_runner(model_dir(1), CONFIG).device_steps
    shape = StepShape(2, query_len, 5, has_trees)
    assert_host_reads_nothing(lambda: steps._launcher.launch_forward(shape))
    assert_host_reads_nothing(lambda: steps._launcher.launch_sampling(kind, shape))


@pytest.mark.parametrize(
    "reads",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: int(x[0]),
    ],
)
def test_the_check_of_reads_finds_them(reads):
    values = torch.ones(3)
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        assert_host_reads_nothing(lambda: reads(values * 2))


def test_a_copy_to_numpy_is_found():
    with pytest.raises(RuntimeError):
        assert_host_reads_nothing(lambda: (torch.ones(3) * 2).numpy())


def test_views_and_new_memory_are_not_counted():
    with Operators() as operators:
        x = torch.ones(2, 3)
        torch.empty_like(x).copy_(x.t().reshape(2, 3).view(3, 2).view(2, 3))
    assert operators.counts["aten.ones.default"] == 1
    assert not any("view" in name or "empty" in name for name in operators.counts)
