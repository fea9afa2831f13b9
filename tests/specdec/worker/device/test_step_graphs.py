"""Choice of a captured step, and the report of what was captured."""

import gc
import weakref

import pytest
import torch

from specdec.sampling.device.device_sampler import SamplingKind
from specdec.worker.device.step_graphs import (
    GraphCaptureError,
    Part,
    RaggedShape,
    Stage,
    StepGraphs,
    StepShape,
)
from tests.specdec.engines import engine_config
from tests.specdec.models.families import save_family
from tests.specdec.worker.device.recorded_graphs import RecordedGraphs
from tests.specdec.worker.device.runners import FakeGraphs, device_runner

SAMPLING = (Part.SAMPLING, Part.DRAFT, Part.TREE, Part.CHAIN)
STAGES = [
    Stage(part, kind) for part in Part for kind in (SamplingKind if part in SAMPLING else (None,))
]


@pytest.fixture
def backend():
    return FakeGraphs(runs_captured=True)


@pytest.fixture
def launched():
    return []


@pytest.fixture
def stages(launched):
    def stage(name):
        return lambda shape: launched.append((name, shape))

    return {each: stage(each) for each in STAGES}


@pytest.fixture
def graphs(backend, launched, stages):
    graphs = StepGraphs(backend, max_num_seqs=10, max_draft_tokens=4, num_blocks=7)
    graphs.report = graphs.capture(stages, lambda shape: None)
    launched.clear()
    return graphs


@pytest.mark.parametrize(
    ("size", "padded"), [((1, 1), (1, 1)), ((3, 2), (4, 2)), ((5, 4), (8, 4)), ((9, 5), (10, 5))]
)
def test_a_step_is_padded_to_the_next_captured_one(graphs, size, padded):
    assert graphs.padded(StepShape(*size, 2)) == StepShape(*padded, 7)


@pytest.mark.parametrize(
    ("size", "padded"),
    [((70, 1), (80, 1)), ((70, 2), (80, 2)), ((129, 6), (144, 6)), ((250, 8), (256, 8))],
)
def test_a_step_of_many_sequences_has_little_padding(size, padded):
    graphs = StepGraphs(FakeGraphs(), max_num_seqs=256, max_draft_tokens=8, num_blocks=7)
    graphs.capture({Stage(Part.FORWARD): lambda shape: None}, lambda shape: None)
    assert graphs.padded(StepShape(*size, 3)) == StepShape(*padded, 7)


def test_a_step_of_very_many_tokens_runs_as_it_is():
    graphs = StepGraphs(FakeGraphs(), max_num_seqs=256, max_draft_tokens=8, num_blocks=7)
    graphs.capture({Stage(Part.FORWARD): lambda shape: None}, lambda shape: None)
    shape = StepShape(250, 9, 3)
    assert graphs.padded(shape) == shape


@pytest.mark.parametrize("size", [(11, 1), (1, 6)])
def test_a_larger_step_runs_as_it_is(graphs, backend, stages, launched, size):
    shape = StepShape(*size, 2)
    assert graphs.padded(shape) == shape
    graphs.run(
        Stage(Part.SAMPLING, SamplingKind.GREEDY),
        shape,
        stages[Stage(Part.SAMPLING, SamplingKind.GREEDY)],
    )
    assert launched == [(Stage(Part.SAMPLING, SamplingKind.GREEDY), shape)]
    assert backend.num_replays == 0


def test_every_captured_shape_is_replayed(graphs, backend, launched):
    shapes = {
        graphs.padded(StepShape(rows, tokens, 1)) for rows in range(1, 11) for tokens in range(1, 6)
    }
    captured = [(stage, shape) for shape in shapes for stage in STAGES if stage.runs_in(shape)]
    assert len(captured) == backend.num_captured == graphs.report.num_graphs
    assert {
        shape.query_len > 1
        for stage, shape in captured
        if stage == Stage(Part.CHAIN, SamplingKind.GREEDY)
    } == {True}
    assert {shape.query_len for stage, shape in captured if stage == Stage(Part.ADVANCE)} == {1}
    for stage, shape in captured:
        graphs.run(stage, shape, lambda _: pytest.fail("launched operator by operator"))
    assert backend.num_replays == graphs.report.num_graphs == len(set(launched))


def test_the_largest_shape_is_captured_first(backend, stages):
    order = []
    graphs = StepGraphs(backend, max_num_seqs=8, max_draft_tokens=2, num_blocks=1)
    graphs.capture(stages, order.append)
    assert order == sorted(order, reverse=True)
    assert order[0] == StepShape(8, 3, 1)


@pytest.mark.parametrize(("family", "fits"), [("qwen3", True), ("qwen3-moe", False)])
def test_a_mixture_of_experts_has_no_graphs(tmp_path, family, fits):
    """The host reads which experts the tokens of a layer have."""
    save_family(tmp_path, family)
    model = device_runner(tmp_path, engine_config(0, max_model_len=64)).model
    assert not model.fits_graphs  # torch's attention copies pages
    model.attention.copies_pages = False
    assert model.fits_graphs == fits


def test_without_a_backend_nothing_is_captured(stages, launched):
    graphs = StepGraphs(None, max_num_seqs=8, max_draft_tokens=2, num_blocks=1)
    report = graphs.capture(stages, lambda shape: pytest.fail("prepared"))
    assert launched == []
    assert report.describe() == "no graphs: every step is launched operator by operator"
    shape = StepShape(3, 2, 2)
    assert graphs.padded(shape) == shape


def test_the_report_names_what_has_no_graph(graphs):
    text = graphs.report.describe()
    assert "up to 10 sequences with up to 5 tokens each" in text
    assert "without a graph: larger steps, prompts, on torch" in text
    assert "sampling where a row has a grammar, penalties, log-probabilities or a verifier" in text
    assert "and 2048 in all" in text


def test_steps_with_trees_have_graphs_beside_the_others(backend, stages):
    """They have few sizes, and no stage of a head that drafts chains or blocks."""
    graphs = StepGraphs(
        backend, max_num_seqs=10, max_draft_tokens=4, num_blocks=7, max_tree_nodes=12
    )
    prepared = []
    report = graphs.capture(stages, prepared.append)
    assert "draft heads of trees" not in report.describe()
    trees = {shape for shape in prepared if shape.has_trees}
    assert trees == {StepShape(n, k, 7, True) for n in (1, 2, 4, 8, 10) for k in (8, 13)}
    assert graphs.padded(StepShape(3, 5, 2, True)) == StepShape(4, 8, 7, True)
    assert graphs.padded(StepShape(3, 9, 2, True)) == StepShape(4, 13, 7, True)
    assert graphs.padded(StepShape(3, 5, 2)) == StepShape(4, 5, 7)
    shape = StepShape(3, 14, 2, True)
    assert graphs.padded(shape) == shape
    for stage in (
        Stage(Part.FORWARD),
        Stage(Part.FEATURES),
        Stage(Part.SAMPLING, SamplingKind.SAMPLED),
        Stage(Part.PAIRS),
    ):
        graphs.run(stage, StepShape(4, 8, 7, True), lambda _: pytest.fail("launched"))
    graphs.run(
        Stage(Part.TREE, SamplingKind.SAMPLED),
        StepShape(4, 1, 7),
        lambda _: pytest.fail("launched"),
    )
    assert backend.num_replays == 5
    launched = []
    graphs.run(Stage(Part.START), StepShape(4, 8, 7, True), launched.append)
    assert len(launched) == 1
    assert "with trees of up to 12 drafts" in report.describe()


def test_the_report_names_trees_that_the_host_drafts(backend, stages):
    graphs = StepGraphs(backend, max_num_seqs=2, max_draft_tokens=4, num_blocks=7, max_tree_nodes=9)
    report = graphs.capture({Stage(Part.FORWARD): stages[Stage(Part.FORWARD)]}, lambda shape: None)
    assert "draft heads of trees" in report.describe()


def test_trees_have_graphs_for_the_sequences_that_they_are_drafted_for(backend, stages):
    sizes = {"max_num_seqs": 8, "max_draft_tokens": 1, "num_blocks": 7, "max_tree_nodes": 9}
    graphs = StepGraphs(backend, **sizes, max_growing_rows=5)
    graphs.capture(
        {Stage(Part.TREE, SamplingKind.GREEDY): stages[Stage(Part.TREE, SamplingKind.GREEDY)]},
        lambda shape: None,
    )
    launched = []
    for num_rows in (1, 2, 4, 8):
        graphs.run(
            Stage(Part.TREE, SamplingKind.GREEDY), StepShape(num_rows, 1, 7), launched.append
        )
    assert launched == [StepShape(8, 1, 7)]
    assert backend.num_captured == 3


def test_ragged_passes_with_trees_have_their_own_graphs(backend):
    sizes = {"max_num_seqs": 2, "max_draft_tokens": 2, "num_blocks": 7, "ragged_tokens": (16,)}
    graphs = StepGraphs(backend, **sizes, max_tree_nodes=4)
    shapes = []
    graphs.capture({}, lambda shape: None, shapes.append)
    assert {shape.has_trees for shape in shapes} == {True, False}
    shape = RaggedShape(9, 1, 3, has_trees=True)
    padded = graphs.padded_ragged(shape)
    assert padded == RaggedShape(16, 2, 7, has_trees=True)
    graphs.run_ragged(padded, lambda _: pytest.fail("launched"))


class _Cycle:
    """An object that only the collector frees, as a closed engine with its graphs."""

    def __init__(self, freed):
        self._self, self._freed = self, freed

    def __del__(self):
        self._freed.append(self)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_no_garbage_is_collected_within_captures(is_enabled):
    """The graphs of an engine before are destroyed before the first capture, or later."""
    before, within, states = [], [], []

    class Backend(FakeGraphs):
        def capture(self, function):
            assert before
            for _ in range(2000):  # more than the collector waits for
                _Cycle(within)
            assert not within
            states.append(gc.isenabled())
            return super().capture(function)

    _Cycle(before)
    graphs = StepGraphs(Backend(), max_num_seqs=2, max_draft_tokens=0, num_blocks=1)
    was_enabled = gc.isenabled()
    (gc.enable if is_enabled else gc.disable)()
    try:
        graphs.capture({Stage(Part.FORWARD): lambda shape: None}, lambda shape: None)
        assert gc.isenabled() == is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
    assert states == [False, False]


def test_a_failed_capture_turns_the_collector_on_again():
    class Backend(FakeGraphs):
        def capture(self, function):
            raise RuntimeError("no memory")

    graphs = StepGraphs(Backend(), max_num_seqs=2, max_draft_tokens=0, num_blocks=1)
    with pytest.raises(RuntimeError, match="no memory"):
        graphs.capture({Stage(Part.FORWARD): lambda shape: None}, lambda shape: None)
    assert gc.isenabled()


def test_closed_graphs_are_destroyed_at_once(stages):
    class Replay:
        def __call__(self):
            pass

    alive = weakref.WeakSet()

    class Backend(FakeGraphs):
        def capture(self, function):
            alive.add(replay := Replay())
            return replay

    graphs = StepGraphs(Backend(), max_num_seqs=2, max_draft_tokens=0, num_blocks=1)
    graphs.capture(stages, lambda shape: None)
    assert len(alive) == 2 * sum(stage.runs_in(StepShape(1, 1, 1)) for stage in STAGES)
    graphs.close()
    assert not alive


def test_a_recorded_graph_has_the_tensors_and_numbers_of_its_capture():
    static, output, kept = torch.ones(2), torch.zeros(2), {"factor": 2, "input": None}
    kept["input"] = static

    def launch():
        kept["made"] = kept["input"] * kept["factor"]
        output.copy_(kept["made"].view(2, 1).squeeze(1) + 1)

    replay = RecordedGraphs().capture(launch)
    kept["factor"], kept["input"] = 5, torch.full((2,), 100.0)
    static.fill_(3)
    replay()
    assert output.tolist() == [7, 7]
    assert kept["made"].isnan().all(), "the memory of the graph, which others use too"


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.zeros(3).index_put_((x > 0,), x),
        lambda x: torch.tensor([1, 2]),
    ],
)
def test_a_recorded_graph_cannot_hold_what_waits_for_the_device(waits):
    with pytest.raises(GraphCaptureError):
        RecordedGraphs().capture(lambda: waits(torch.ones(3) * 2))
