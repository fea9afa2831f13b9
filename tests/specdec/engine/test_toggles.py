"""Speculation turned off and on while sequences run, with a draft model.

Tokens are those of a run without speculation. After catching up, each draft is that of a draft
model that computes the sequence from its start: turning speculation off leaves no trace.
"""

import random
from dataclasses import dataclass

import pytest

from specdec.engine.engine import Engine
from specdec.sequences.sequence import Sequence
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.speculation.proposers import DraftRequest
from specdec.text.tokenizer import Tokenizer
from specdec.types.control import SpeculationControl
from specdec.types.request import ChatMessage
from tests.specdec.engines import draft_model, engine_config, local_engine, request
from tests.specdec.tiny import tiny_llama_dir

K = 3
ON, OFF = (SpeculationControl(mode, 32, K) for mode in ("on", "off"))
SAMPLING = {"temperature": 0.8, "top_p": 0.95, "max_tokens": 60}


@pytest.fixture(scope="module")
def other_model_dir(tmp_path_factory):
    return tiny_llama_dir(tmp_path_factory.mktemp("other"), layers=1, seed=3)


@dataclass(frozen=True)
class Drafted:
    """A draft, its sequence, the sequence's tokens at the time, and the engine's step."""

    seq: Sequence
    text: tuple[int, ...]
    tokens: tuple[int, ...]
    step: int


class RecordingProposer:
    """Records each draft with the tokens that it continues."""

    def __init__(self, inner) -> None:
        self.inner = inner
        self.drafts: list[Drafted] = []
        self.step = 0  # as the test counts them

    def take(self, requests):
        proposals = self.inner.take(requests)
        sequences = {each.seq.seq_id: each.seq for each in requests}
        for each in proposals:
            seq = sequences[each.seq_id]
            self.drafts.append(Drafted(seq, tuple(seq.token_ids), each.draft_token_ids, self.step))
        return proposals

    def ahead(self, rows):
        self.inner.ahead(rows)

    def end_step(self, *, is_lost=False):
        self.inner.end_step(is_lost=is_lost)

    def release(self, seq_id):
        self.inner.release(seq_id)

    @property
    def first_drafts(self):
        """Drafts of sequences that had none in the previous step and have just caught up."""
        last = {}
        for each in self.drafts:
            if each.step - last.get(each.seq.seq_id, -2) > 1:
                yield each
            last[each.seq.seq_id] = each.step


def tiny_requests(count=8):
    """Return distinct prompts, longer than one catch-up step and shorter than the context."""
    return [
        request(f"r{i}", [3 + (5 * i + 7 * j) % 380 for j in range(20 + 5 * i)], seed=i, **SAMPLING)
        for i in range(count)
    ]


def run_toggled(engine: Engine, requests, toggles, proposer=None):
    """Return tokens by request; `toggles` maps steps to the settings that apply from there."""
    generated = {each.request_id: [] for each in requests}
    for each in requests:
        engine.add(each)
    step, counts = 0, None
    while engine.has_work:
        if step in toggles:
            engine.set_speculation(toggles[step])
        if proposer is not None:
            proposer.step = step
        for output in engine.step():
            generated[output.request_id].extend(output.token_ids)
        drafted = engine.stats().counts.speculation.num_draft_tokens
        if not engine.stats().is_speculation_on and step - 1 not in toggles:
            assert counts in (None, drafted), "something was drafted while off"
        counts = drafted if not engine.stats().is_speculation_on else None
        step += 1
    return generated


def random_toggles(count, most_apart=4):
    """Alternate off and on every few steps, sometimes too fast for a sequence to catch up."""
    generator, step, toggles = random.Random(4), 3, {}
    for index in range(count):
        toggles[step] = ON if index % 2 else OFF
        step += generator.randint(1, most_apart)
    return toggles


@pytest.mark.parametrize("draft", ["itself", "another"])
def test_toggles_change_neither_tokens_nor_drafts(tiny_model_dir, other_model_dir, draft):
    draft_dir = tiny_model_dir if draft == "itself" else other_model_dir
    proposer = RecordingProposer(draft_model(draft_dir))
    policy = SpeculationPolicy(ON, clock=lambda: 0.0)
    config = engine_config(K, max_num_seqs=8)
    engine = local_engine(tiny_model_dir, config, proposer=proposer, policy=policy)
    generated = run_toggled(engine, tiny_requests(), random_toggles(30), proposer)

    plain = local_engine(tiny_model_dir, engine_config(0))
    assert generated == run_toggled(plain, tiny_requests(), {})
    assert engine.stats().num_speculation_flips >= 15
    assert len(proposer.drafts) > 30
    unbiased = draft_model(draft_dir, max_catch_up_tokens=160)
    for drafted in proposer.drafts:
        assert drafted.tokens == fresh(unbiased, drafted)


LIMITS = {"max_model_len": 320, "num_blocks": 400}


@pytest.mark.model
@pytest.mark.slow
def test_two_hundred_toggles_of_the_demo_models_drafts(smollm2_dir):
    """SmolLM2 drafts for itself in 8 bits; four sequences of twenty run at once."""
    proposer = RecordingProposer(draft_model(smollm2_dir, quantization="int8", **LIMITS))
    policy = SpeculationPolicy(ON, clock=lambda: 0.0)
    config = engine_config(K, max_num_seqs=4, **LIMITS)
    engine = local_engine(smollm2_dir, config, proposer=proposer, policy=policy)
    asked = demo_requests(smollm2_dir, 20)
    generated = run_toggled(engine, asked, random_toggles(200, most_apart=3), proposer)

    assert engine.stats().num_speculation_flips == 200
    plain = local_engine(smollm2_dir, engine_config(0, max_num_seqs=4, **LIMITS))
    assert generated == run_toggled(plain, asked, {})
    firsts = list(proposer.first_drafts)
    checked = [each for each in firsts if each.tokens][::4]
    print(f"{len(proposer.drafts)} drafts, {len(firsts)} after catching up, {len(checked)} checked")
    assert len(checked) >= 40
    unbiased = draft_model(smollm2_dir, quantization="int8", max_catch_up_tokens=320, **LIMITS)
    for drafted in checked:
        assert drafted.tokens == fresh(unbiased, drafted)


def demo_requests(directory, count):
    tokenizer = Tokenizer(directory)
    prompts = [
        tokenizer.encode_chat([ChatMessage("user", f"Give me the number {i} in a long story.")])
        for i in range(count)
    ]
    return [
        request(f"r{i}", prompt, seed=i, temperature=0.8 * (i % 2), max_tokens=200)
        for i, prompt in enumerate(prompts)
    ]


def fresh(proposer, drafted):
    """Return the draft of a model that computes the text from its start."""
    if not drafted.tokens:
        return ()
    seq = Sequence(drafted.seq.seq_id, drafted.seq.request, drafted.seq.rules, detokenizer=None)
    seq.token_ids = list(drafted.text)
    proposer.take([DraftRequest(seq, 0)])
    [proposal] = proposer.take([DraftRequest(seq, len(drafted.tokens))])
    proposer.release(seq.seq_id)
    return proposal.draft_token_ids
