# Modules: specdec.worker.adapters
"""Steps with adapters on the device: the tokens of the host, and no step that goes there."""

import pytest

from specdec.config.engine import AdapterLimits, DraftLimits
from specdec.config.gpu.graph_sizes import num_ragged_graphs
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.kernels.reference.lora import add_updates
from specdec.models.llama import CausalDecoder
from specdec.models.lora.grouped_adapters import GroupedAdapters
from specdec.speculation.proposers import DraftModelProposer, DraftVocabulary
from specdec.worker import LocalDraftWorker, LocalTarget
from tests.specdec.adapters import varied_adapter_dirs
from tests.specdec.engines import (
    draft_model,
    engine_config,
    load_adapter,
    local_engine,
    make_engine,
    request,
    tokens_by,
    with_adapter,
)
from tests.specdec.worker.device.recorded_graphs import RecordedGraphs
from tests.specdec.worker.device.runners import (
    FakeGraphs,
    device_draft_runner,
    device_runner,
    device_target,
    recorded_device_steps,
)
from tests.specdec.worker.device.test_trees import tree_engine

LIMITS = AdapterLimits(max_loras=4, max_rank=16, max_loaded=2)
DRAFT_LIMITS = DraftLimits(200, 4, 160, 16, max_num_seqs=8, adapters=LIMITS)
NAMES = ["", "a", "b", "a"]


@pytest.fixture(scope="module")
def adapters(tiny_model_dir, tmp_path_factory):
    return varied_adapter_dirs(tmp_path_factory.mktemp("adapters"), tiny_model_dir)


@pytest.fixture
def grouped(monkeypatch):
    """Let torch's kernels run adapters by their places, as Triton's do."""

    def enable(self, limits=None):
        self._adapters = GroupedAdapters(self.layers, self.dtype, self.device, limits, add_updates)
        return self._adapters

    monkeypatch.setattr(CausalDecoder, "enable_adapters", enable)


@pytest.fixture
def begun(monkeypatch):
    """Return a list with the rows of each step that was begun on the device."""
    return recorded_device_steps(monkeypatch)


@pytest.fixture
def no_host(monkeypatch):
    """Return a function after which no pass may be planned by the host."""

    def fail(self, batch, kv_cache, taps):
        raise AssertionError("a step on the host")

    return lambda: monkeypatch.setattr(CausalDecoder, "forward_with_taps", fail)


def requests(engine, names=NAMES):
    return [
        with_adapter(
            engine,
            request(
                f"r{i}",
                [(17 * i + 31 * j) % 380 + 3 for j in range(6)] * (2 + i),
                seed=i,
                temperature=(0.0, 0.8)[i % 2],
            ),
            name,
        )
        for i, name in enumerate(names)
    ]


def config(num_drafts):
    return engine_config(num_drafts, adapters=LIMITS)


def first_two(adapters):
    return {name: adapters[name] for name in ("a", "b")}


@pytest.fixture(scope="module")
def expected(tiny_model_dir, adapters):
    """Return the tokens by the passes of the host, each adapter for its rows."""
    engine = local_engine(tiny_model_dir, config(0), kernels="torch", adapters=first_two(adapters))
    return tokens_by(engine, requests(engine))


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_the_tokens_are_those_of_the_host(
    tiny_model_dir, adapters, expected, grouped, begun, no_host, num_drafts, graphs
):
    backend = FakeGraphs() if graphs else None
    runner = device_runner(tiny_model_dir, config(num_drafts), backend)
    engine = make_engine(tiny_model_dir, config(num_drafts), LocalTarget(runner))
    for name, path in first_two(adapters).items():
        load_adapter(engine, name, path)
    no_host()
    assert tokens_by(engine, requests(engine)) == expected
    ids = {row.adapter_id for rows in begun for row in rows}
    assert ids == {0, *engine.adapters.ids.values()}
    assert not graphs or backend.num_replays > 0


def test_nodes_of_trees_run_with_the_adapter_of_their_row(
    tiny_model_dir, adapters, expected, grouped, begun, no_host
):
    """In steps with prompts too, where rows have different numbers of tokens."""
    speculation = SpeculativeConfig.of("ngram", 4, num_draft_tree_tokens=12)
    with_trees = engine_config(speculation=speculation, adapters=LIMITS, max_num_seqs=4)
    graphs = FakeGraphs()
    target = device_target(tiny_model_dir, with_trees, graphs=graphs)
    answers = {}
    engine = tree_engine(tiny_model_dir, target, with_trees, answers)
    for name, path in first_two(adapters).items():
        load_adapter(engine, name, path)
    asked = requests(engine)
    for each in asked:
        answers[each.prompt_token_ids] = (*each.prompt_token_ids, *expected[each.request_id])
    no_host()
    assert tokens_by(engine, asked) == expected
    adapted = {row.adapter_id for rows in begun for row in rows if row.drafting.parents}
    assert adapted == {0, *engine.adapters.ids.values()}
    assert graphs.num_replays > 0
    assert engine.stats().counts.speculation.num_accepted_tokens > 0


def test_an_adapter_that_takes_a_place_leaves_nothing_of_the_one_before(
    tiny_model_dir, adapters, grouped, no_host
):
    """Graphs were captured before either of them was loaded."""
    engine = local_engine(tiny_model_dir, config(0), kernels="torch", adapters={"c": adapters["c"]})
    alone = tokens_by(engine, requests(engine, ["c"]))
    runner = device_runner(tiny_model_dir, config(0), RecordedGraphs())
    engine = make_engine(tiny_model_dir, config(0), LocalTarget(runner))
    for name, path in first_two(adapters).items():
        load_adapter(engine, name, path)
    no_host()
    before = tokens_by(engine, requests(engine, ["a"]))
    engine.adapters.unload("a")
    engine.advance_adapters()
    place = runner.model.adapter_places
    assert set(place) == {engine.adapters.ids["b"]}
    load_adapter(engine, "c", adapters["c"])
    assert sorted(place.values()) == [1, 2]
    assert tokens_by(engine, requests(engine, ["c"])) == alone != before


def test_passes_with_adapters_are_captured_beside_those_without(tiny_model_dir, grouped):
    def num_captured(adapters):
        graphs = FakeGraphs()
        config = engine_config(0, max_num_seqs=1, max_model_len=32, num_blocks=8, adapters=adapters)
        device_runner(tiny_model_dir, config, graphs)
        return graphs.num_captured

    num_with_prompts = num_ragged_graphs(1, 64, 144)
    assert num_captured(None) == 4 + num_with_prompts
    assert num_captured(LIMITS) == 5 + 2 * num_with_prompts


def test_without_grouped_kernels_the_host_runs_steps_with_adapters(
    tiny_model_dir, adapters, expected, begun
):
    runner = device_runner(tiny_model_dir, config(3))
    assert runner.model.adapter_places is None
    engine = make_engine(tiny_model_dir, config(3), LocalTarget(runner))
    for name, path in first_two(adapters).items():
        load_adapter(engine, name, path)
    assert tokens_by(engine, requests(engine)) == expected
    assert {row.adapter_id for rows in begun for row in rows} <= {0}


def test_a_draft_model_runs_its_adapters_on_the_device(tiny_model_dir, adapters, grouped, begun):
    """With the target's adapters on its copy every draft is accepted."""

    def generate(proposer):
        speculation = SpeculativeConfig.of("draft_model", 3)
        engine = local_engine(
            tiny_model_dir,
            engine_config(speculation=speculation, adapters=LIMITS),
            proposer=proposer,
            kernels="torch",
            adapters=first_two(adapters),
            draft_adapters=first_two(adapters),
        )
        tokens = tokens_by(engine, requests(engine))
        return tokens, engine.stats().counts.speculation.acceptance_rate

    by_host = generate(draft_model(tiny_model_dir, kernels="torch", adapters=LIMITS))
    assert not begun
    worker = LocalDraftWorker(device_draft_runner(tiny_model_dir, DRAFT_LIMITS, FakeGraphs()))
    adapter = DraftVocabulary().new_adapter()
    assert generate(DraftModelProposer(worker, DRAFT_LIMITS, adapter)) == by_host
    assert by_host[1] == 1
    assert {row.adapter_id for rows in begun for row in rows} >= {1, 2}
