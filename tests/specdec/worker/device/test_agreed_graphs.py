"""Graphs of several ranks: on all of them or on none, with the collectives inside."""

import pytest

from specdec.worker.device.agreed_graphs import AgreedGraphs, graphs_of_ranks
from specdec.worker.device.step_graphs import GraphCaptureError
from tests.specdec.engines import engine_config
from tests.specdec.fakes import run_ranks
from tests.specdec.worker.device.runners import FakeGraphs, device_runner

CONFIG = engine_config(0, max_num_seqs=2, max_model_len=64)


class FailingGraphs(FakeGraphs):
    """Graphs of which one, by its number from 0, cannot be captured."""

    def __init__(self, number=None):
        super().__init__(runs_captured=True)
        self._number = number

    def capture(self, function):
        if self.num_captured == self._number:
            function()
            raise GraphCaptureError("a graph could not be captured: no memory")
        return super().capture(function)


@pytest.mark.parametrize("without", [(0,), (1,), (0, 1)])
def test_no_rank_has_graphs_where_one_has_none(without, tiny_model_dir, caplog):
    def on_rank(group):
        graphs = None if group.rank in without else FakeGraphs(runs_captured=True)
        runner = device_runner(tiny_model_dir, CONFIG, graphs, group)
        return runner.device_steps._graphs._replays, 0 if graphs is None else graphs.num_captured

    assert run_ranks(2, on_rank) == [({}, 0)] * 2
    named = [f"rank {rank} captures no graphs" in caplog.text for rank in range(2)]
    assert named == [bool(without == (1 - rank,)) for rank in range(2)]


def test_all_ranks_raise_at_the_same_capture(tiny_model_dir):
    def on_rank(group):
        graphs = FailingGraphs(3 if group.rank == 1 else None)
        with pytest.raises(GraphCaptureError) as error:
            device_runner(tiny_model_dir, CONFIG, graphs, group)
        return graphs.num_captured, str(error.value)

    (of_first, at_first), (of_second, at_second) = run_ranks(2, on_rank)
    assert (of_first, of_second) == (4, 3)
    assert at_first == "rank 1 could not capture a graph that this rank has"
    assert at_second == "a graph could not be captured: no memory"


def test_a_failure_before_the_capture_is_not_exchanged():
    """Its peers may be in a collective operation of the run, in which another call would fail."""

    def on_rank(group):
        def fails():
            raise MemoryError

        with pytest.raises(MemoryError):
            AgreedGraphs(FakeGraphs(runs_captured=True), group).capture(fails)
        return list(group.called)

    assert run_ranks(2, on_rank) == [[]] * 2


def test_one_rank_captures_without_exchange():
    graphs = FakeGraphs(runs_captured=True)
    assert run_ranks(1, lambda group: (graphs_of_ranks(graphs, group), group.called)) == [
        (graphs, [])
    ]


def test_memory_is_that_of_the_backend():
    graphs = FakeGraphs(runs_captured=True)
    graphs.num_bytes = 7
    assert run_ranks(2, lambda group: graphs_of_ranks(graphs, group).num_bytes) == [7, 7]
