"""Choice of a captured step, and the report of what was captured."""

import pytest

from specdec.worker.step_graphs import Stage, StepGraphs, StepShape
from tests.specdec.engines import engine_config
from tests.specdec.models.families import save_family
from tests.specdec.worker.device import FakeGraphs, device_runner


@pytest.fixture
def backend():
    return FakeGraphs()


@pytest.fixture
def launched():
    return []


@pytest.fixture
def stages(launched):
    def stage(name):
        return lambda shape: launched.append((name, shape))

    return {each: stage(each) for each in Stage}


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


def test_many_sequences_have_few_lengths(backend, stages):
    graphs = StepGraphs(backend, max_num_seqs=96, max_draft_tokens=4, num_blocks=7)
    graphs.capture(stages, lambda shape: None)
    assert graphs.padded(StepShape(70, 2, 3)) == StepShape(96, 5, 7)
    assert graphs.padded(StepShape(70, 1, 3)) == StepShape(96, 1, 7)


@pytest.mark.parametrize("size", [(11, 1), (1, 6)])
def test_a_larger_step_runs_as_it_is(graphs, backend, stages, launched, size):
    shape = StepShape(*size, 2)
    assert graphs.padded(shape) == shape
    graphs.run(Stage.GREEDY, shape, stages[Stage.GREEDY])
    assert launched == [(Stage.GREEDY, shape)]
    assert backend.num_replays == 0


def test_every_captured_shape_is_replayed(graphs, backend, launched):
    shapes = {
        graphs.padded(StepShape(rows, tokens, 1)) for rows in range(1, 11) for tokens in range(1, 6)
    }
    of_one = sum(each.has_one_token for each in Stage)
    num_rows = len({shape.num_rows for shape in shapes})
    num_graphs = len(shapes) * (len(Stage) - of_one) + num_rows * of_one
    assert num_graphs == backend.num_captured == graphs.report.num_graphs
    for shape in shapes:
        for stage in (each for each in Stage if shape.query_len == 1 or not each.has_one_token):
            graphs.run(stage, shape, lambda _: pytest.fail("launched operator by operator"))
    assert backend.num_replays == graphs.report.num_graphs == len(set(launched))


def test_the_largest_shape_is_captured_first(backend, stages):
    order = []
    graphs = StepGraphs(backend, max_num_seqs=8, max_draft_tokens=2, num_blocks=1)
    graphs.capture(stages, order.append)
    assert order == sorted(order, reverse=True)
    assert order[0] == (8, 3, 1)


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
    assert "without a graph: larger steps, prompts, trees" in text
    assert "steps with one row that has an adapter" in text
