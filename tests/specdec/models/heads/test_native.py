"""Recurrent heads on native kernels: whole drafts, on one rank and on several."""

import pytest
import torch

from specdec.distributed.group import TensorParallelGroup
from specdec.kernels.cpu import native_library
from specdec.models.heads.base import WholeDraftHead
from specdec.models.heads.networks.native import NativeHead
from specdec.models.heads.networks.native_medusa import NativeMedusaHeads
from specdec.sampling.sampler import SamplingBatch, torch_sample
from specdec.sampling.vocab_shard import VocabShard
from tests.specdec.fakes import run_ranks
from tests.specdec.models.heads.driver import VOCAB, Drafting, save, sequences
from tests.specdec.models.heads.native_drafts import (
    COUNTS,
    WholeDrafts,
    make_head,
    params,
    rank_drafts,
)
from tests.specdec.models.heads.test_eagle import CONFIG as EAGLE_CONFIG
from tests.specdec.models.heads.test_eagle import eagle_weights
from tests.specdec.models.heads.test_eagle3 import CONFIG as EAGLE3_CONFIG
from tests.specdec.models.heads.test_eagle3 import eagle3_weights
from tests.specdec.models.heads.test_medusa import medusa_weights, original
from tests.specdec.processes import results, run_processes

pytestmark = pytest.mark.skipif(native_library() is None, reason="no C++ compiler")


@pytest.fixture(scope="module", params=["eagle", "eagle3"])
def directory(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "eagle":
        return save(directory, EAGLE_CONFIG, eagle_weights())
    return save(directory, EAGLE3_CONFIG | {"draft_vocab_size": 120}, eagle3_weights())


def drafts_by_steps(head, parts, temperature):
    """Draft token by token from the logits, in torch."""
    shard, own = VocabShard(TensorParallelGroup(), 0, VOCAB), WholeDrafts(head, parts)
    state = own.begin([1] * len(parts), [len(part.tokens) for part in parts], max(COUNTS))
    ids = torch.arange(VOCAB) if head.target_ids is None else head.target_ids
    drafts = []
    for index in range(max(COUNTS)):
        logits = torch.full((len(parts), VOCAB), -torch.inf)
        logits[:, ids] = head.logits(state, index)
        rows = params(temperature)
        rows["position"] += index
        drafts.append(torch_sample(logits, SamplingBatch.from_params(rows, "cpu"), shard).tolist())
        if index + 1 < max(COUNTS):
            state = head.advance(state, drafts[-1], index)
    by_sequence = zip(*drafts, strict=True)
    return [list(tokens[:count]) for tokens, count in zip(by_sequence, COUNTS, strict=True)]


@pytest.fixture
def eagle3(tmp_path):
    return save(tmp_path / "head", EAGLE3_CONFIG | {"draft_vocab_size": 120}, eagle3_weights())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_whole_drafts_equal_those_of_steps(directory, target_dir, temperature):
    head = make_head(directory, target_dir)
    assert isinstance(head, NativeHead)
    assert isinstance(head, WholeDraftHead)
    assert head.can_draft
    found = WholeDrafts(head, sequences()).draft(temperature)
    assert found == drafts_by_steps(head, sequences(), temperature)


def test_ranks_that_share_memory_draft_the_same(eagle3, target_dir, tmp_path):
    found = results(run_processes(2, rank_drafts, eagle3, target_dir, tmp_path / "address"))
    head = make_head(eagle3, target_dir)
    expected = [WholeDrafts(head, sequences()).draft(each) for each in (0.0, 0.8)]
    assert found == [expected, expected]


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_rows_of_medusa_heads_do_not_depend_on_the_batch(tmp_path, target_dir, quantization):
    save(tmp_path / "head", None, original(medusa_weights()), "medusa_lm_head.pt")
    head = make_head(tmp_path / "head", target_dir, quantization=quantization)
    assert isinstance(head, NativeMedusaHeads)
    parts = sequences()
    together = Drafting(head, parts).run()
    for index, part in enumerate(parts):
        assert torch.equal(Drafting(head, [part]).run()[0], together[index])
    assert torch.equal(Drafting(head, parts).run(num_drafts=2), together[:, :2])


def test_whole_drafts_need_shared_memory(directory, target_dir):
    assert run_ranks(2, lambda group: make_head(directory, target_dir, group).can_draft) == [
        False,
        False,
    ]
