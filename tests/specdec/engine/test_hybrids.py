# Modules: specdec.models.hybrid, specdec.kernels.reference.state_pool
"""Models with recurrent layers: drafts, batches, preemption and ranks change no token."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from specdec.kernels.reference.state_pool import StatePool
from specdec.types.sampling.sampling_params import SpeculationOptions
from specdec.worker import LocalTarget, load_runner
from specdec.worker.batch.batch_state import BatchState
from tests.specdec.engines import (
    ScriptedProposer,
    draft_model,
    engine_config,
    local_engine,
    make_engine,
    request,
    tokens_by,
)
from tests.specdec.fakes import run_ranks
from tests.specdec.models.families import save_family
from tests.specdec.tiny import train_tokenizer

FAMILY = "lfm2"
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp(FAMILY)
    save_family(directory, FAMILY)
    train_tokenizer(383).save_pretrained(directory)
    return directory


def hybrid_config(num_draft_tokens, **changes):
    own = {"keeps_guesses": True, "enable_prefix_caching": False}
    return engine_config(num_draft_tokens, **(own | changes))


def requests(count=8, temperature=0.0, **params):
    """Return repetitive prompts, so that lookups find matches; some exceed a prefill chunk."""
    generator = random.Random(5)
    pieces = [[generator.randrange(3, 383) for _ in range(6)] for _ in range(count)]
    values = {"temperature": temperature, "max_tokens": NUM_TOKENS, **params}
    return [
        request(f"r{index}", piece * (2 + 2 * index), seed=70 + index, **values)
        for index, piece in enumerate(pieces)
    ]


@pytest.fixture(scope="module")
def expected(directory):
    """Return the tokens of each request alone, without drafts, by temperature."""
    found = {}
    for temperature in (0.0, 0.8):
        engine = local_engine(directory, hybrid_config(0))
        found[temperature] = {}
        for each in requests(temperature=temperature):
            found[temperature] |= tokens_by(engine, [each])
    return found


def guesses(texts, seed=0):
    """Return a proposer of drafts from known texts, most of them with a wrong token."""
    generator = random.Random(seed)

    def draft(token_ids, most):
        text = next(each for each in texts if each[: len(token_ids)] == token_ids)
        found = text[len(token_ids) :][: generator.randrange(most + 1)]
        if found and generator.random() < 0.7:
            place = generator.randrange(len(found))
            found[place] = (found[place] + 1) % 383
        return found

    return ScriptedProposer(draft)


def with_guesses(directory, expected, each_of, config, group=None):
    """Return the tokens of requests, most of whose drafts are rejected at a random place."""
    texts = [[*each.prompt, *expected[each.request_id]] for each in each_of]
    return tokens_by(local_engine(directory, config, group, guesses(texts)), each_of)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "changes",
    [{}, {"num_blocks": 48}, {"async_scheduling": True, "max_num_seqs": 3}],
    ids=["batch", "preempted", "async"],
)
def test_drafts_change_no_token(directory, expected, temperature, changes):
    config, known = hybrid_config(5, **changes), expected[temperature]
    assert with_guesses(directory, known, requests(temperature=temperature), config) == known


def test_rejected_drafts_and_preemptions_occur(directory, expected):
    """The test above relies on it."""
    texts = [[*each.prompt, *expected[0.0][each.request_id]] for each in requests()]
    engine = local_engine(directory, hybrid_config(5, num_blocks=48), None, guesses(texts))
    tokens_by(engine, requests())
    counts = engine.stats().counts
    assert counts.num_preemptions > 0
    assert 0 < counts.speculation.num_accepted_tokens < counts.speculation.num_draft_tokens


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_ranks_generate_the_same(directory, expected, temperature):
    known, each_of = expected[temperature], requests(temperature=temperature)

    def generate(group):
        return with_guesses(directory, known, each_of, hybrid_config(5), group)

    assert run_ranks(2, generate) == [known] * 2


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_model_changes_no_token(directory, expected, tiny_model_dir, temperature):
    each_of = requests(temperature=temperature)
    proposer = draft_model(tiny_model_dir, kernels="torch")
    engine = local_engine(directory, hybrid_config(3), None, proposer)
    assert tokens_by(engine, each_of) == expected[temperature]


def test_ngram_drafts_are_accepted(directory, expected):
    engine = local_engine(directory, hybrid_config(4))
    assert tokens_by(engine, requests()) == expected[0.0]
    assert engine.stats().counts.speculation.num_draft_tokens > 0


def test_aborted_sequences_leave_no_state(directory, expected):
    known, [first, second, *others] = expected[0.8], requests(temperature=0.8)
    engine = local_engine(directory, hybrid_config(4, max_num_seqs=3, async_scheduling=True))
    for each in (first, second):
        engine.add(each)
    for _ in range(6):
        engine.step()
    for each in (first, second):
        engine.abort(each.request_id)
    found = tokens_by(engine, others)
    assert found == {each.request_id: known[each.request_id] for each in others}


def _one_position_too_many(self, chunk, first):
    """Replay an input of a rejected guess too, where there is one."""
    span = _ADVANCE(self, chunk, first)
    return span


def _of_another_sequence(self, slot, *, is_checked=True):
    """Leave the state of the slot's last sequence."""
    self._slots[slot] = type(self._slots[slot])(is_checked=is_checked)


_ADVANCE = StatePool._advance
