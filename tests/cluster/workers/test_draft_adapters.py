# Modules: cluster.workers.rank.draft_steps
"""Adapters of a draft model: on a rank, and on the groups of its supervisor, without Ray."""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.workers.groups.roles import DRAFT
from cluster.workers.groups.supervisors import DraftSupervisor
from cluster.workers.groups.target_group import AdapterGroup
from cluster.workers.messages import draft_serialization, serialization
from cluster.workers.messages.load_messages import ADAPTERS, LoadInbox
from cluster.workers.rank import worker
from cluster.workers.rank.draft_steps import DraftSteps
from cluster.workers.transport.unix_socket import PeerGoneError
from specdec.config.engine import AdapterLimits, DraftLimits
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.sequences.sequence import Sequence
from specdec.speculation.proposers import DraftRequest, DraftVocabulary
from specdec.types.adapters import AdapterFile
from specdec.types.draft_messages import DraftRow, DraftStep
from specdec.types.messages import BlockTableDelta, SequenceAdmission
from specdec.types.ranks import AdapterRanks
from specdec.types.sampling.sampling_spec import SamplingRules
from specdec.worker import RankModel, load_draft
from tests.cluster.workers.groups.test_worker_group import ThreadRanks, answer_to_draft, spec_of
from tests.specdec.adapters import adapter_dir
from tests.specdec.engines import request
from tests.waiting import wait_until

LIMITS = DraftLimits(20, 4, 80, 16, adapters=AdapterLimits(2, 16, 2))
ADAPTER = AdapterFile(3, "sql", "org/sql", "/adapters/sql")


def drafts_of(rank, seq_id, adapter_id):
    """Return what a rank drafts after a new sequence with an adapter."""
    step = DraftStep(
        seq_id,
        (),
        (SequenceAdmission(seq_id, 3, SamplingRules(temperature=0.0)),),
        (BlockTableDelta(seq_id, 0, (2 * seq_id, 2 * seq_id + 1)),),
        (),
        (DraftRow(seq_id, 0, (5, 6, 7), 4, 3, adapter_id),),
    )
    [answer] = rank.run(draft_serialization.encode_draft_step(step))
    return draft_serialization.decode_draft_output(answer).rows[0].token_ids


def test_a_rank_of_a_draft_model_loads_runs_and_frees_an_adapter(tiny_model_dir, tmp_path):
    runner = load_draft(RankModel(tiny_model_dir, "float32", LIMITS), TensorParallelGroup())
    rank = worker.ModelWorker(runner, DraftSteps(runner, 0), 0)
    path = str(adapter_dir(tmp_path / "sql", tiny_model_dir))
    [report] = rank.run(ADAPTERS.load(AdapterFile(3, "sql", path, path)))
    assert ADAPTERS.is_report(report)
    inbox = LoadInbox(3, 1)
    inbox.take(report)
    assert inbox.fault == ""
    assert drafts_of(rank, 1, 0) != drafts_of(rank, 2, 3)
    assert list(rank.run(ADAPTERS.change(3))) == []
    with pytest.raises(KeyError):
        drafts_of(rank, 3, 3)


class DraftRanks(ThreadRanks):
    """A rank that drafts, and loads adapters while `is_running`. ids: of the drafts' adapters."""

    fault = ""

    def __init__(self, directory):
        self.ids, self.loads = [], []
        super().__init__(None, directory)

    def _run(self):
        try:
            while (frames := self.peer.receive()) != serialization.STOP:
                if not ADAPTERS.is_order(frames):
                    step = draft_serialization.decode_draft_step(frames)
                    self.ids += [row.adapter_id for row in step.drafts]
                    self.peer.send(answer_to_draft(frames))
                    continue
                order = ADAPTERS.order_in(frames)
                self.loads.append(order)
                if isinstance(order, AdapterFile):
                    self.is_running.wait(30)
                    self.peer.send(ADAPTERS.report(0, order.adapter_id, self.fault))
        except (PeerGoneError, OSError):
            return


@pytest.fixture
def drafting(tmp_path):
    groups = []

    def start():
        ranks = DraftRanks(Path(tempfile.mkdtemp(dir=tmp_path)))
        if groups:
            ranks.is_running.clear()  # it does not load yet
        groups.append(AdapterGroup(DRAFT, spec_of(tmp_path, LIMITS), None, ranks))
        return groups[-1]

    supervisor = DraftSupervisor(start, LIMITS, DraftVocabulary())
    yield supervisor, groups
    for group in groups:
        group.ranks.is_running.set()
    supervisor.close()


def draft(supervisor, seq):
    """Draft for a sequence; return whether there was a draft."""
    return bool(supervisor.take([DraftRequest(seq, 3)]))


def sequence():
    asked = replace(request("r", [1, 2, 3]), adapter_id=3)
    return Sequence(0, asked, SamplingRules(), detokenizer=None)


def test_a_restarted_draft_worker_loads_its_adapters_and_no_step_waits_for_that(drafting):
    supervisor, groups = drafting
    assert isinstance(groups[0], AdapterRanks)
    supervisor.load_adapter(ADAPTER)
    wait_until(lambda: supervisor.adapter_fault(3) == "")
    seq = sequence()
    assert draft(supervisor, seq)
    assert (groups[0].ranks.loads, groups[0].ranks.ids) == ([ADAPTER], [3])

    groups[0].ranks.end()
    wait_until(lambda: not draft(supervisor, seq) and len(groups) == 2 and groups[1].ranks.loads)
    assert supervisor.adapter_fault(3) is None
    assert not draft(supervisor, seq)
    supervisor.ahead([])
    assert groups[1].ranks.ids == []
    groups[1].ranks.is_running.set()
    wait_until(lambda: supervisor.adapter_fault(3) == "")
    assert draft(supervisor, seq)
    assert groups[1].ranks.ids[-1] == 3
    assert groups[1].ranks.loads == [ADAPTER]


def test_an_unloaded_adapter_is_not_loaded_again(drafting):
    supervisor, groups = drafting
    supervisor.load_adapter(ADAPTER)
    wait_until(lambda: supervisor.adapter_fault(3) == "")
    supervisor.unload_adapter(3)
    supervisor.unload_adapter(99)
    assert draft(supervisor, sequence())
    assert groups[0].ranks.loads == [ADAPTER, 3]
    assert groups[0].ranks.ids == [0]
    groups[0].ranks.end()
    wait_until(lambda: draft(supervisor, sequence()) and len(groups) == 2)
    assert groups[-1].ranks.loads == []


def test_an_adapter_that_is_unloaded_while_it_loads_is_freed(drafting):
    supervisor, groups = drafting
    groups[0].ranks.is_running.clear()
    supervisor.load_adapter(ADAPTER)
    assert supervisor.adapter_fault(3) is None
    supervisor.unload_adapter(3)
    assert supervisor.adapter_fault(3) == ""
    groups[0].ranks.is_running.set()
    wait_until(lambda: supervisor.adapter_fault(0) == "" and len(groups[0].ranks.loads) == 2)
    assert groups[0].ranks.loads == [ADAPTER, 3]


def test_a_fault_of_a_rank_is_reported_and_drafts_go_on_without_the_adapter(drafting):
    supervisor, groups = drafting
    groups[0].ranks.fault = "no such file"
    supervisor.load_adapter(ADAPTER)
    wait_until(lambda: supervisor.adapter_fault(3) == "rank 0: no such file")
    supervisor.load_adapter(ADAPTER)  # which its order repeats
    assert draft(supervisor, sequence())
    assert groups[0].ranks.ids == [0]
    assert groups[0].ranks.loads == [ADAPTER, 3]


def test_the_loss_of_the_draft_worker_is_no_fault_of_an_adapter(drafting):
    supervisor, _ = drafting
    supervisor.mark_lost()
    supervisor._proposer = None
    supervisor.load_adapter(ADAPTER)
    assert supervisor.adapter_fault(3) == ""
    supervisor.unload_adapter(3)
