"""Random histories of a target with states: snapshots, drafts and preemptions change no token.

`make test-interleavings` runs 100,000 of them, in all four combinations of prefix cache and drafts.
"""

from itertools import product

import pytest

from specdec.kernels.reference.state_pool import StatePool
from specdec.models.config.model_config import ModelConfig
from specdec.sequences import sequence
from specdec.sequences.block_manager import BlockManager
from specdec.sequences.state_snapshots import StateSnapshots
from specdec.text.tokenizer import Tokenizer
from specdec.types.messages import Snapshot
from specdec.types.reports.stats import Counts
from tests.chaos.recurrent import RecurrentSimulation
from tests.specdec.models.families import save_family
from tests.specdec.tiny import train_tokenizer

NUM_QUICK_SEEDS, NUM_SEEDS, BLOCK = 40, 100_000, 500


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Return the configuration of a hybrid, and a tokenizer."""
    directory = tmp_path_factory.mktemp("hybrid")
    save_family(directory, "lfm2-plain")
    train_tokenizer(383).save_pretrained(directory)
    return ModelConfig.from_directory(directory), Tokenizer(directory)


def faults_of(seed, parts):
    """Return the violations of a history; a failed assertion is one."""
    try:
        return RecurrentSimulation(seed, *parts).run()
    except (AssertionError, KeyError) as error:
        return [repr(error)]


def test_some_histories_violate_nothing(parts):
    simulations = [RecurrentSimulation(seed, *parts) for seed in range(NUM_QUICK_SEEDS)]
    assert [each.run() for each in simulations] == [[]] * NUM_QUICK_SEEDS
    kinds = {(each.has_cache, each.has_drafts) for each in simulations}
    assert kinds == set(product((False, True), repeat=2))
    counts = Counts.sum(each.engine.stats().counts for each in simulations)
    assert counts.num_resumed_tokens > 200
    assert counts.num_saved_states > 100
    assert counts.num_preemptions > 40
    assert counts.speculation.num_accepted_tokens > 60
    assert counts.num_steps_ahead > 100
    assert sum(each.target.num_nodes for each in simulations) > 300


@pytest.mark.histories
@pytest.mark.parametrize("first", range(0, NUM_SEEDS, BLOCK))
def test_many_histories_violate_nothing(parts, first):
    found = {seed: faults_of(seed, parts) for seed in range(first, first + BLOCK)}
    assert {seed: faults for seed, faults in found.items() if faults} == {}


def rolled_back_by_one_less(self, chunk, first):
    """Commit the state after the first guess too."""
    span = ADVANCE(self, chunk, first)
    return span._replace(
        num_known=span.num_known + (span.num_kept > 0), num_kept=max(0, span.num_kept - 1)
    )


def of_the_node_before(self, chunk, first):
    """Let each node of a tree follow the node before it."""
    span = ADVANCE(self, chunk, first)
    return span._replace(parents=tuple(range(-1, len(span.parents) - 1)))


def of_the_first_nodes(self, slot, nodes):
    """Keep the inputs of a tree in their order, whatever path was accepted."""
    self._slots[slot].num_tail = len(nodes)


def of_another_block(self, seq_id):
    """Resume from the snapshot that was used last, whatever block it is of."""
    found = RESUMPTION(self, seq_id)
    slots = [slot for slot in self._slots.values() if found and slot != found.slot]
    return Snapshot(slots[-1], found.position) if slots else found


def of_the_block_before(self, seq_id, slot, key):
    """Keep a snapshot under the key of the block before its own."""
    chain = self._chains.get(seq_id, [])
    place = chain.index(key) - 1 if key in chain else 0
    END_SAVE(self, seq_id, slot, chain[place] if place else key)


def not_taken(self, slot, snapshot, position):
    """Leave what a snapshot had before."""


ADVANCE, RESUMPTION, END_SAVE = StatePool._advance, StateSnapshots.resumption, BlockManager.end_save


@pytest.mark.parametrize(
    ("owner", "method", "fault", "expected"),
    [
        (StatePool, "_advance", rolled_back_by_one_less, " in place of "),
        (StatePool, "_advance", of_the_node_before, " in place of "),
        (StatePool, "keep_path", of_the_first_nodes, " in place of "),
        (StatePool, "save", not_taken, " in place of "),
        (StateSnapshots, "resumption", of_another_block, " in place of "),
        (BlockManager, "end_save", of_the_block_before, " in place of "),
        (sequence, "root_key", lambda *_: bytes(16), " shared across salts"),
    ],
    ids=["rollback", "parents", "path", "not-taken", "another-block", "block-before", "salts"],
)
def test_planted_faults_are_found(parts, monkeypatch, owner, method, fault, expected):
    monkeypatch.setattr(owner, method, fault)
    assert any(expected in each for seed in range(60) for each in faults_of(seed, parts))
