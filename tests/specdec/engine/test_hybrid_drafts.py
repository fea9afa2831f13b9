"""Draft models with recurrent layers: their drafts are those of the text alone, whatever came."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.kernels.reference.state_pool import StatePool
from tests.specdec.engine.test_hybrids import NUM_TOKENS, SMALL_POOL, hybrid_config, requests
from tests.specdec.engines import draft_model, local_engine, request, tokens_by
from tests.specdec.fakes import run_ranks
from tests.specdec.models.families import save_family
from tests.specdec.models.hybrid_families import QUICK
from tests.specdec.tiny import train_tokenizer

FAMILIES = [
    name if name == "qwen3-next" else pytest.param(name, marks=pytest.mark.slow) for name in QUICK
]
NUM_DRAFT_TOKENS = 4


@pytest.fixture(scope="module", params=FAMILIES)
def directories(request, tmp_path_factory):
    """A target, and the same with noise, whose drafts are accepted in part."""
    target, draft = (tmp_path_factory.mktemp(name) for name in ("target", "draft"))
    save_family(target, request.param)
    train_tokenizer(383).save_pretrained(target)
    shutil.copytree(target, draft, dirs_exist_ok=True)
    path, generator = draft / "model.safetensors", torch.Generator().manual_seed(1)
    noisy = {
        name: weight * (1 + 0.08 * torch.randn(weight.shape, generator=generator))
        for name, weight in load_file(path).items()
    }
    save_file(noisy, path, {"format": "pt"})
    return target, draft


class Recorded:
    """The drafts of a proposer, by the text before each."""

    def __init__(self, proposer):
        self.drafts, self._take = {}, proposer.take
        proposer.take = self.take
        self.proposer = proposer

    def take(self, asked):
        texts = {each.seq.seq_id: tuple(each.seq.token_ids) for each in asked}
        proposals = self._take(asked)
        for each in proposals:
            self.drafts[texts[each.seq_id]] = list(each.draft_token_ids)
        return proposals


def run(directories, temperature, group=None, max_tokens=NUM_TOKENS, **changes):
    """Return the tokens with drafts, what was drafted, and the counts."""
    target, draft = directories
    config = hybrid_config(NUM_DRAFT_TOKENS, **changes)
    limits = {"enable_prefix_caching": False, "max_num_seqs": config.max_num_seqs}
    limits["max_draft_tokens"] = NUM_DRAFT_TOKENS
    recorded = Recorded(draft_model(draft, group, kernels="torch", **limits))
    engine = local_engine(target, config, group, recorded.proposer)
    return (
        tokens_by(engine, requests(temperature, max_tokens=max_tokens)),
        recorded.drafts,
        engine.stats().counts,
    )


def assert_drafts_of_texts(draft_dir, drafts):
    """Compare greedy drafts with what the draft model generates after each text alone."""
    asked = [
        request(str(index), list(text), max_tokens=len(draft))
        for index, (text, draft) in enumerate(drafts.items())
        if draft
    ]
    assert len(asked) > 10
    found = tokens_by(local_engine(draft_dir, hybrid_config(0)), asked)
    for each in asked:
        assert found[each.request_id] == drafts[tuple(each.prompt)]


ASYNC = {"async_scheduling": True, "max_num_seqs": 3}


@pytest.mark.parametrize(
    ("changes", "temperature"),
    [
        (SMALL_POOL, 0.0),
        pytest.param(SMALL_POOL, 0.8, marks=pytest.mark.slow),
        pytest.param(ASYNC, 0.0, marks=pytest.mark.slow),
        pytest.param(ASYNC, 0.8, marks=pytest.mark.slow),
    ],
)
def test_drafts_are_those_of_the_text_and_change_no_token(directories, changes, temperature):
    expected = tokens_by(local_engine(directories[0], hybrid_config(0)), requests(temperature))
    found, drafts, counts = run(directories, temperature, **changes)
    assert found == expected
    speculation = counts.speculation
    # All drafts of some families are accepted, in spite of the noise.
    assert 0 < speculation.num_accepted_tokens <= speculation.num_draft_tokens
    if temperature == 0.0:
        assert_drafts_of_texts(directories[1], drafts)


def test_sequences_that_join_ahead_wait_for_a_seat_of_the_draft_model(directories):
    """One that ends has the seat until its last step is committed."""
    changes = {"async_scheduling": True, "max_num_seqs": 1}
    found, _, counts = run(directories, 0.0, max_tokens=1, **changes)
    assert all(len(token_ids) == 1 for token_ids in found.values())
    assert counts.num_steps_ahead > 0


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_draft_the_same(directories, size):
    tokens, drafts, _ = run(directories, 0.0)
    found = run_ranks(size, lambda group: run(directories, 0.0, group)[:2])
    assert found == [(tokens, drafts)] * size


@pytest.mark.slow
def test_a_planted_fault_is_caught(directories, monkeypatch, request):
    """A draft token that the state keeps, whether it was accepted or not."""
    if request.node.callspec.params["directories"] == "granite-4-plain":
        pytest.skip("the states of this tiny model have no effect on its greedy drafts")
    advance = StatePool._advance

    def keep(self, chunk, first):
        span = advance(self, chunk, first)
        if span.num_committed > 0:
            return span
        return span._replace(num_known=span.num_known + 1, num_kept=span.num_kept - 1)

    monkeypatch.setattr(StatePool, "_advance", keep)
    _, drafts, _ = run(directories, 0.0)
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        assert_drafts_of_texts(directories[1], drafts)
