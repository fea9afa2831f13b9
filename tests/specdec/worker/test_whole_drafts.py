"""Drafts that a native head makes in one call, against those that the worker samples itself."""

import pytest

from specdec.kernels.cpu import native_library
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.types.messages import (
    BlockTableDelta,
    RowDrafting,
    SequenceAdmission,
    StepInput,
    StepRow,
)
from specdec.types.sampling.sampling_spec import SamplingRules, Verifier
from specdec.worker import HeadFiles, RankModel, load_target
from tests.specdec.engines import engine_config
from tests.specdec.models.heads.driver import TARGET_SIZES, save
from tests.specdec.models.heads.formats.test_eagle import CONFIG, eagle_weights
from tests.specdec.tiny import tiny_llama_dir

pytestmark = pytest.mark.skipif(native_library() is None, reason="no C++ compiler")

PROMPT = (11, 12, 13, 14, 15, 16)
PLAIN = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.2, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.8, "verifier": Verifier("rejection")},
]
SHAPED = {"temperature": 0.8, "presence_penalty": 1.5}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    target = tiny_llama_dir(tmp_path_factory.mktemp("target"), **TARGET_SIZES)
    return target, save(tmp_path_factory.mktemp("head"), CONFIG, eagle_weights())


def drafts(directories, rules, monkeypatch, *, whole):
    """Return the drafts of two steps of each sequence, and the number of whole drafts."""
    target, head = directories
    config, group = engine_config(0, max_model_len=64), TensorParallelGroup()
    runner = load_target(RankModel(target, "float32", config, head=HeadFiles(head)), group)
    calls = []
    draft = runner.head.head.draft
    monkeypatch.setattr(
        runner.head.head, "draft", lambda *given: calls.append(1) or draft(*given), raising=True
    )
    if not whole:
        runner.head._whole_head = None
    admissions = tuple(
        SequenceAdmission(index, len(PROMPT), SamplingRules(**each, seed=index), PROMPT)
        for index, each in enumerate(rules)
    )
    tables = tuple(
        BlockTableDelta(index, 0, tuple(range(8 * index, 8 * index + 8)))
        for index in range(len(rules))
    )
    prefills = tuple(
        StepRow(index, 0, PROMPT, 0, True, RowDrafting(num_next=2 + index))
        for index in range(len(rules))
    )
    first = runner.execute(StepInput(0, (), admissions, tables, prefills))
    decodes = tuple(
        StepRow(row.seq_id, len(PROMPT), row.token_ids, 0, True, RowDrafting(num_next=3))
        for row in first.rows
    )
    second = runner.execute(StepInput(1, (), (), (), decodes))
    return [row.next_draft_token_ids for row in (*first.rows, *second.rows)], len(calls)


def test_whole_drafts_are_those_of_the_worker(directories, monkeypatch):
    found, num_whole = drafts(directories, PLAIN, monkeypatch, whole=True)
    expected, none = drafts(directories, PLAIN, monkeypatch, whole=False)
    assert found == expected
    assert [len(each) for each in found] == [2, 3, 4, 5, 3, 3, 3, 3]
    assert (num_whole, none) == (2, 0)


def test_shaped_logits_are_sampled_by_the_worker(directories, monkeypatch):
    found, num_whole = drafts(directories, [*PLAIN, SHAPED], monkeypatch, whole=True)
    assert num_whole == 0
    assert found == drafts(directories, [*PLAIN, SHAPED], monkeypatch, whole=False)[0]
