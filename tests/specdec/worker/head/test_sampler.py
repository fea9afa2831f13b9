"""Confidences of a head's drafts: the largest probability at each place, on any number of ranks."""

from functools import cache
from types import SimpleNamespace

import pytest
import torch

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.sampling.vocab_shard import VocabShard
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.types.control import SpeculationControl
from specdec.types.messages import (
    BlockTableDelta,
    RowDrafting,
    SequenceAdmission,
    StepInput,
    StepRow,
)
from specdec.types.sampling.sampling_spec import SamplingRules
from specdec.worker import HeadFiles, RankModel, load_target
from specdec.worker.head.sampler import HeadSampler, PartialDraft
from tests.specdec.attention_heads import fitted_head_dir
from tests.specdec.engines import engine_config, make_engine, tokens_by
from tests.specdec.fakes import run_ranks
from tests.specdec.heads import HEADS
from tests.specdec.models.heads.driver import KERNELS, TARGET_SIZES, save
from tests.specdec.models.heads.formats.test_eagle import CONFIG, eagle_weights
from tests.specdec.tiny import tiny_llama_dir
from tests.specdec.worker.device.head.test_head import NUM_DRAFTS, RecordedTarget, requests
from tests.specdec.worker.device.runners import FakeGraphs, device_runner, recorded_device_steps

PROMPT = (11, 12, 13, 14, 15, 16)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_confidence_is_the_largest_probability_of_all_ranks(size):
    logits = torch.randn(3, 12, generator=torch.Generator().manual_seed(1)) * 3
    logits[1] = float("nan")

    def note(group):
        own = range(4 * group.rank, 4 * group.rank + 4) if size == 3 else group.share_of(12)
        fields = {"vocab_slice": own, "vocab_size": 12, "target_ids": None}
        head = SimpleNamespace(**fields, device=logits.device)
        drafts = [PartialDraft(seq_id, 5, 2, 2) for seq_id in range(3)]
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
    runner = load_target(
        RankModel(target, "float32", config, kernels=kernels, head=HeadFiles(head)),
        TensorParallelGroup(),
    )
    admission = SequenceAdmission(0, len(PROMPT), SamplingRules(temperature=0.8, seed=3), PROMPT)
    table = BlockTableDelta(0, 0, tuple(range(8)))
    row = StepRow(0, 0, PROMPT, 0, True, RowDrafting(num_next=4))
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


@pytest.fixture(scope="module")
def confident_head_dir(tiny_model_dir, tmp_path_factory):
    """Return a function that gives the directory of a head of a method."""

    @cache
    def write(method):
        texts, directory = [list(PROMPT) * 5], tmp_path_factory.mktemp(method)
        if method in HEADS:
            return HEADS[method](tiny_model_dir, directory, texts)
        return fitted_head_dir(method, tiny_model_dir, directory, texts, depth=NUM_DRAFTS)

    return write


@pytest.mark.parametrize("method", ["eagle3", "dspark", "medusa"])
def test_confidences_in_drafts_of_the_device(
    tiny_model_dir, confident_head_dir, monkeypatch, method
):
    """They are those of the host, for chains of every kind of head."""
    directory, found = confident_head_dir(method), []
    speculation = SpeculativeConfig.of(method, NUM_DRAFTS, model=str(directory), batch_budget=True)
    config = engine_config(speculation=speculation)
    begun = recorded_device_steps(monkeypatch)
    for runs_on_device in (False, True):
        runner = device_runner(
            tiny_model_dir, config, FakeGraphs(), head=directory, runs_on_device=runs_on_device
        )
        target = RecordedTarget(runner)
        engine = make_engine(tiny_model_dir, config, target, policy=always_on())
        tokens = tokens_by(engine, requests(3, max_tokens=12))
        found.append((tokens, [each.rows for each in target.outputs]))
        assert bool(begun) == runs_on_device
    assert found[0] == found[1]
    rows = [row for step in found[1][1] for row in step]
    assert all(len(row.next_draft_confidences) == len(row.next_draft_token_ids) for row in rows)
    assert len({each for row in rows for each in row.next_draft_confidences}) > 5


def always_on():
    return SpeculationPolicy(SpeculationControl("on", 32, NUM_DRAFTS), clock=lambda: 0.0)
