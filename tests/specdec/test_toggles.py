"""Speculation turned off and on while sequences run, with a draft model.

Tokens are those of a run without speculation. After catching up, each draft is the one that a draft
model makes which has seen nothing but the sequence's tokens: turning it off leaves no trace.
"""

import random
from functools import cache

import pytest

from specdec.engine import Engine
from specdec.proposers import DraftRequest
from specdec.sampling_rules import SamplingRules
from specdec.sequence import Sequence
from specdec.speculation import SpeculationControl, SpeculationPolicy
from tests.specdec.engines import draft_model, engine_config, local_engine, request
from tests.specdec.tiny import tiny_llama_dir

K = 3
ON, OFF = (SpeculationControl(mode, 32, K) for mode in ("on", "off"))
SAMPLING = {"temperature": 0.8, "top_p": 0.95, "max_tokens": 60}


@pytest.fixture(scope="module")
def other_model_dir(tmp_path_factory):
    return tiny_llama_dir(tmp_path_factory.mktemp("other"), layers=1, seed=3)


class RecordingProposer:
    """Keeps each draft with the tokens that it continues, as the engine saw them."""

    def __init__(self, inner) -> None:
        self.inner = inner
        self.drafts: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
        self.num_calls = 0
        self._requests: list[DraftRequest] = []

    def begin(self, requests):
        self.num_calls += 1
        self._requests = requests
        self.inner.begin(requests)

    def collect(self):
        proposals = self.inner.collect()
        texts = {each.seq.seq_id: tuple(each.seq.token_ids) for each in self._requests}
        for proposal in proposals:
            seq_id, tokens = proposal.seq_id, proposal.draft_token_ids
            self.drafts.append((seq_id, texts[seq_id], tokens))
        return proposals

    def release(self, seq_id):
        self.inner.release(seq_id)


def requests(count=8):
    """Distinct prompts, longer than what a draft may begin with and shorter than its context."""
    return [
        request(f"r{i}", [3 + (5 * i + 7 * j) % 380 for j in range(20 + 5 * i)], seed=i, **SAMPLING)
        for i in range(count)
    ]


def run_toggled(engine: Engine, toggles):
    """Tokens by request; `toggles` says before which steps the mode changes, and to what."""
    said = {each.request_id: [] for each in requests()}
    for each in requests():
        engine.add(each)
    step, counts = 0, None
    while engine.has_work:
        if step in toggles:
            engine.set_speculation(toggles[step])
        for output in engine.step():
            said[output.request_id].extend(output.token_ids)
        drafted = engine.stats().speculation.num_draft_tokens
        if not engine.stats().is_speculation_on and step - 1 not in toggles:
            assert counts in (None, drafted), "something was drafted while off"
        counts = drafted if not engine.stats().is_speculation_on else None
        step += 1
    return said


def random_toggles(count):
    """Alternately off and on, a few steps apart: some too close for a sequence to catch up."""
    generator, step, toggles = random.Random(4), 3, {}
    for index in range(count):
        toggles[step] = ON if index % 2 else OFF
        step += generator.randint(1, 4)
    return toggles


@pytest.mark.parametrize("draft", ["itself", "another"])
def test_toggles_change_neither_tokens_nor_drafts(tiny_model_dir, other_model_dir, draft):
    draft_dir = tiny_model_dir if draft == "itself" else other_model_dir
    proposer = RecordingProposer(draft_model(draft_dir))
    policy = SpeculationPolicy(ON, clock=lambda: 0.0)
    config = engine_config(K, max_num_seqs=8)
    engine = local_engine(tiny_model_dir, config, proposer=proposer, policy=policy)
    said = run_toggled(engine, random_toggles(30))

    plain = local_engine(tiny_model_dir, engine_config(0))
    assert said == run_toggled(plain, {})
    assert engine.stats().num_speculation_flips >= 15
    assert len(proposer.drafts) > 30
    for seq_id, text, drafted in proposer.drafts:
        assert drafted == fresh(draft_dir, seq_id, text, len(drafted))


def fresh(draft_dir, seq_id, text, count):
    """What a draft model makes of a text that it runs from its beginning."""
    if count == 0:
        return ()
    proposer = fresh_proposer(draft_dir)
    request = requests()[seq_id]
    rules = SamplingRules(temperature=0.8, top_p=0.95, seed=request.seed)
    seq = Sequence(seq_id, request, rules, detokenizer=None)
    seq.token_ids = list(text)
    proposer.begin([DraftRequest(seq, 0)])
    proposer.begin([DraftRequest(seq, count)])
    [proposal] = proposer.collect()
    proposer.release(seq_id)
    return proposal.draft_token_ids


@cache
def fresh_proposer(draft_dir):
    return draft_model(draft_dir, max_catch_up_tokens=160)
