"""Confidences of a head's drafts: the largest probability at each place, on any number of ranks."""

from types import SimpleNamespace

import pytest
import torch

from specdec.config.speculative import SpeculativeConfig
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.sampling.vocab_shard import VocabShard
from specdec.types.messages import BlockTableDelta, SequenceAdmission, StepInput, StepRow
from specdec.types.sampling_spec import SamplingRules
from specdec.worker import HeadFiles, load_runner
from specdec.worker.head_sampler import HeadDraft, HeadSampler
from tests.specdec.engines import engine_config
from tests.specdec.fakes import run_ranks
from tests.specdec.models.heads.driver import KERNELS, TARGET_SIZES, save
from tests.specdec.models.heads.test_eagle import CONFIG, eagle_weights
from tests.specdec.tiny import tiny_llama_dir

PROMPT = (11, 12, 13, 14, 15, 16)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_confidence_is_the_largest_probability_of_all_ranks(size):
    logits = torch.randn(3, 12, generator=torch.Generator().manual_seed(1)) * 3
    logits[1] = float("nan")

    def note(group):
        own = range(4 * group.rank, 4 * group.rank + 4) if size == 3 else group.share_of(12)
        fields = {"vocab_slice": own, "vocab_size": 12, "target_ids": None}
        head = SimpleNamespace(**fields, device=logits.device)
        drafts = [HeadDraft(seq_id, 5, 2, 2) for seq_id in range(3)]
        sampler = HeadSampler(head, None, VocabShard(group, own.start, 12))
        sampler.note_confidences(logits[:, own.start : own.stop], drafts, [4, None, 0])
        return [draft.confidences for draft in drafts]

    expected = (1000 * logits.softmax(1).amax(1)).round().nan_to_num().int().tolist()
    for found in run_ranks(size, note):
        assert found == [[expected[0]], [], [expected[2]]]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    target = tiny_llama_dir(tmp_path_factory.mktemp("target"), **TARGET_SIZES)
    return target, save(tmp_path_factory.mktemp("head"), CONFIG, eagle_weights())


def drafted(directories, kernels, *, has_budget):
    """Return a verified row with a draft of four tokens."""
    target, head = directories
    speculation = SpeculativeConfig.of("eagle", 4, model=str(head), batch_budget=has_budget)
    config = engine_config(speculation=speculation, max_model_len=64)
    runner = load_runner(
        target,
        "float32",
        config,
        TensorParallelGroup(),
        None,
        kernels=kernels,
        head=HeadFiles(head),
    )
    admission = SequenceAdmission(0, len(PROMPT), SamplingRules(temperature=0.8, seed=3), PROMPT)
    table = BlockTableDelta(0, 0, tuple(range(8)))
    row = StepRow(0, 0, PROMPT, 0, True, num_next_drafts=4)
    [verified] = runner.execute(StepInput(0, (), (admission,), (table,), (row,))).rows
    return verified


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_budget_changes_no_draft_and_adds_confidences(directories, kernels):
    without, found = (drafted(directories, kernels, has_budget=each) for each in (False, True))
    assert found.next_draft_token_ids == without.next_draft_token_ids
    assert without.next_draft_confidences == ()
    assert len(found.next_draft_confidences) == len(found.next_draft_token_ids) == 4
    assert all(0 < each <= 1000 for each in found.next_draft_confidences)
    assert len(set(found.next_draft_confidences)) > 1
