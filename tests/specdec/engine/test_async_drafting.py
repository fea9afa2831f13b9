"""Tests of drafts that are made ahead: the tokens of no speculation, and drafts that are used.

In one process nothing overlaps, so that all drafts ahead are there in time.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.sequences.sequence import Sequence
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.speculation.proposers import DraftRequest, DraftVocabulary, make_proposer
from specdec.text.vocab_map import VocabularyMap
from specdec.types.control import SpeculationControl
from specdec.types.drafts.draft_decision import DraftAhead
from specdec.types.reports.stats import AheadCounts
from specdec.types.sampling.sampling_params import StructuredOutput
from tests.clock import Clock
from tests.specdec.engines import (
    HashTarget,
    draft_model,
    engine_config,
    local_engine,
    make_engine,
    request,
    run,
    tokens_by,
)
from tests.specdec.fakes import run_ranks
from tests.specdec.grammars import grammar_compiler
from tests.specdec.tiny import disturbed_llama_dir, shuffled_llama_dir, tiny_llama_dir

GREEDY, SAMPLED = {"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95}
MODES = ["continuing", "outcomes"]
GRAMMAR = StructuredOutput(regex="(the|a) (river|bridge) is [a-z]{8,20} and [0-9]{1,3}")


@pytest.fixture(scope="module")
def other_model_dir(tmp_path_factory):
    return tiny_llama_dir(tmp_path_factory.mktemp("other"), layers=1, seed=3)


@pytest.fixture(scope="module")
def similar_model_dir(tiny_model_dir, tmp_path_factory):
    """Write the target with noise in its weights: most of its drafts are accepted, not all."""
    return disturbed_llama_dir(tiny_model_dir, tmp_path_factory.mktemp("similar"), 0.02)


def requests(count, **params):
    generator = torch.Generator().manual_seed(9)
    prompts = [torch.randint(3, 383, (18 + 13 * i,), generator=generator) for i in range(count)]
    values = {"max_tokens": 30, **params}
    return [
        request(f"r{i}", prompt.tolist(), seed=40 + i, **values) for i, prompt in enumerate(prompts)
    ]


def async_engine(directory, mode, proposer, k=3, group=None, **changes):
    speculation = SpeculativeConfig.of("draft_model", k, async_drafting=mode)
    return local_engine(
        directory, engine_config(0, speculation=speculation, **changes), group, proposer
    )


def untimed_model(directory, group=None, **changes):
    """Return a draft model whose plans do not depend on the speed of the machine."""
    proposer = draft_model(directory, group, **changes)
    proposer._ahead.planner.end_step = lambda **_: None
    return proposer


def ahead_counts(proposer) -> AheadCounts:
    return proposer.counts.ahead


@pytest.fixture(scope="module")
def reference(tiny_model_dir):
    """Return the tokens without speculation, made once for each set of parameters."""
    known = {}

    def tokens(count, **params):
        key = count, *sorted(params.items())
        if key not in known:
            engine = local_engine(tiny_model_dir, engine_config(0))
            known[key] = tokens_by(engine, requests(count, **params))
        return known[key]

    return tokens


def modes_and_requests():
    """Yield (mode, sampling, number of requests); make test has each pair of two of them."""
    values = (enumerate(each) for each in (MODES, (GREEDY, SAMPLED), (1, 8)))
    for cell in product(*values):
        marks = () if sum(place for place, _ in cell) % 2 else pytest.mark.slow
        yield pytest.param(*(value for _, value in cell), marks=marks)


@pytest.mark.parametrize(("mode", "sampling", "count"), list(modes_and_requests()))
def test_drafts_that_are_mostly_right_are_used(tiny_model_dir, reference, mode, sampling, count):
    proposer = untimed_model(tiny_model_dir)
    engine = async_engine(tiny_model_dir, mode, proposer)
    assert tokens_by(engine, requests(count, **sampling)) == reference(count, **sampling)
    proposer.check_integrity()
    assert proposer._blocks.num_free_blocks == proposer._blocks.num_blocks, "blocks leaked"
    assert engine.stats().counts.speculation.acceptance_rate >= 0.98
    assert ahead_counts(proposer).hit_rate >= 0.95


@pytest.mark.parametrize(("mode", "sampling", "count"), list(modes_and_requests()))
def test_drafts_that_are_mostly_wrong_change_nothing(
    tiny_model_dir, other_model_dir, reference, mode, sampling, count
):
    proposer = draft_model(other_model_dir)
    engine = async_engine(tiny_model_dir, mode, proposer)
    assert tokens_by(engine, requests(count, **sampling)) == reference(count, **sampling)
    proposer.check_integrity()
    assert ahead_counts(proposer).misses


class RecordingProposer:
    """Records the drafts that were there, with the texts that they continue."""

    def __init__(self, inner):
        self.inner = inner
        self.taken = []

    def take(self, requests):
        there = [each._replace(may_wait=False) for each in requests]
        proposals = self.inner.take(there)
        sequences = {each.seq.seq_id: each.seq for each in requests}
        for each in proposals:
            seq = sequences[each.seq_id]
            self.taken.append((seq, tuple(seq.token_ids), each.draft_token_ids))
        return proposals

    def ahead(self, rows):
        self.inner.ahead(rows)

    def end_step(self, *, is_lost=False):
        self.inner.end_step(is_lost=is_lost)

    def release(self, seq_id):
        self.inner.release(seq_id)


def fresh_draft(proposer, seq, text, count):
    """Return the draft of a worker that waits until the text is known."""
    known = Sequence(seq.seq_id, seq.request, seq.rules, detokenizer=None)
    known.token_ids = list(text)
    while not (proposals := proposer.take([DraftRequest(known, count)])):
        pass  # it runs a chunk of the text
    proposer.release(seq.seq_id)
    return proposals[0].draft_token_ids


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_hit_is_the_draft_of_a_synchronous_worker(tiny_model_dir, similar_model_dir, sampling):
    model = untimed_model(similar_model_dir)
    model._ahead.planner.outcomes.fan_out = lambda num_drafts, _: (4,) * (num_drafts + 1)
    proposer = RecordingProposer(model)
    asked = requests(4, **{**sampling, "max_tokens": 60})
    run(async_engine(tiny_model_dir, "outcomes", proposer), asked)
    hits = ahead_counts(model).hits
    assert hits.get("0", 0) > 2, "no hit after a rejection"
    assert hits.get("3", 0) > 2, "no hit after a whole draft"
    synchronous = draft_model(similar_model_dir)
    for seq, text, drafted in proposer.taken[::2]:
        assert drafted == fresh_draft(synchronous, seq, text, len(drafted))


@pytest.mark.parametrize("num_ranks", [2])
def test_draft_ranks_agree(tiny_model_dir, other_model_dir, reference, num_ranks):
    def generate_on(group):
        proposer = untimed_model(other_model_dir, group)
        engine = async_engine(tiny_model_dir, "outcomes", proposer, group=group)
        tokens = tokens_by(engine, requests(4, **SAMPLED))
        return tokens, ahead_counts(proposer).hits

    ranks = run_ranks(num_ranks, generate_on)
    assert all(rank == ranks[0] for rank in ranks)
    assert ranks[0][0] == reference(4, **SAMPLED)


@pytest.mark.parametrize("mode", MODES)
def test_penalties_reach_every_branch(tiny_model_dir, reference, mode):
    params = {
        **SAMPLED,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
    }
    proposer = untimed_model(tiny_model_dir)
    engine = async_engine(tiny_model_dir, mode, proposer)
    assert tokens_by(engine, requests(4, **params)) == reference(4, **params)
    assert ahead_counts(proposer).hit_rate >= 0.95
    assert engine.stats().counts.speculation.acceptance_rate >= 0.97


@pytest.mark.parametrize("num_blocks", [26, 60])
def test_a_small_pool_means_fewer_branches(tiny_model_dir, reference, num_blocks):
    proposer = draft_model(tiny_model_dir, num_blocks=num_blocks)
    engine = async_engine(tiny_model_dir, "outcomes", proposer)
    for each in requests(6, **GREEDY):
        engine.add(each)
    tokens = {f"r{i}": [] for i in range(6)}
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id].extend(output.token_ids)
        engine.check_integrity()
        proposer.check_integrity()
    assert tokens == reference(6, **GREEDY)
    assert proposer._blocks.num_free_blocks == proposer._blocks.num_blocks


def test_a_sequence_near_the_context_of_the_draft_model_is_not_continued_beyond(
    tiny_model_dir, reference
):
    proposer = draft_model(tiny_model_dir, max_model_len=40)
    engine = async_engine(tiny_model_dir, "outcomes", proposer)
    assert tokens_by(engine, requests(2, **GREEDY)) == reference(2, **GREEDY)


def test_a_preempted_sequence_is_drafted_for_again(tiny_model_dir, reference):
    proposer = draft_model(tiny_model_dir, num_blocks=80)
    engine = async_engine(tiny_model_dir, "outcomes", proposer, num_blocks=60)
    assert tokens_by(engine, requests(6, **GREEDY)) == reference(6, **GREEDY)
    assert engine.stats().counts.num_preemptions > 0


def test_a_lookup_before_the_model_is_continued_too(tiny_model_dir, reference):
    speculation = SpeculativeConfig.of(
        "draft_model", 3, first="ngram", async_drafting="outcomes", prompt_lookup_min=1
    )
    model = untimed_model(tiny_model_dir)
    proposer = make_proposer(speculation, model)
    config = engine_config(0, speculation=speculation)
    engine = local_engine(tiny_model_dir, config, proposer=proposer)
    assert tokens_by(engine, requests(4, **GREEDY)) == reference(4, **GREEDY)
    assert ahead_counts(model).hits


def test_mode_off_drafts_nothing_ahead(tiny_model_dir):
    proposer = draft_model(tiny_model_dir)
    run(async_engine(tiny_model_dir, "off", proposer), requests(2))
    assert ahead_counts(proposer) == AheadCounts()
    assert SpeculativeConfig.of("draft_model").draft_ahead is DraftAhead.OFF


@pytest.mark.parametrize("mode", MODES)
def test_a_grammar_is_followed_on_every_branch(tiny_model_dir, other_model_dir, mode):
    compiler = grammar_compiler(tiny_model_dir)
    grammar = compiler.compile(GRAMMAR)
    asked = [
        replace(each, grammar=grammar)
        for each in requests(3, structured_output=GRAMMAR, temperature=1.0, ignore_eos=False)
    ]
    plain = tokens_by(local_engine(tiny_model_dir, engine_config(0)), asked)
    for directory in (tiny_model_dir, other_model_dir):
        proposer = untimed_model(directory)
        assert tokens_by(async_engine(tiny_model_dir, mode, proposer), asked) == plain
        if directory == tiny_model_dir:
            assert ahead_counts(proposer).hit_rate >= 0.8


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_draft_model_that_lacks_some_tokens_drafts_ahead(tiny_model_dir, reference, sampling):
    """Ids are equal otherwise, as with another padding or other special tokens."""
    ids = np.arange(383, dtype=np.int32)
    ids[150:200] = -1
    vocabulary = DraftVocabulary(VocabularyMap(ids, ids.copy(), has_equal_ids=True))
    proposer = untimed_model(tiny_model_dir, vocabulary=vocabulary)
    engine = async_engine(tiny_model_dir, "outcomes", proposer)
    assert tokens_by(engine, requests(4, **sampling)) == reference(4, **sampling)
    assert sum(ahead_counts(proposer).hits.values()) > 10


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_drafts_of_a_model_with_another_tokenizer_are_waited_for(
    tiny_model_dir, reference, sampling, tmp_path
):
    directory = shuffled_llama_dir(tiny_model_dir, tmp_path)
    vocabulary = DraftVocabulary.between(directory, tiny_model_dir)
    proposer = draft_model(directory, vocabulary=vocabulary)
    engine = async_engine(tiny_model_dir, "outcomes", proposer)
    assert tokens_by(engine, requests(2, **sampling)) == reference(2, **sampling)
    assert ahead_counts(proposer) == AheadCounts()
    assert engine.stats().counts.speculation.num_drafts > 10


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_quantized_copy_of_the_target_drafts_ahead(tiny_model_dir, reference, sampling):
    proposer = untimed_model(tiny_model_dir, quantization="int8")
    engine = async_engine(tiny_model_dir, "outcomes", proposer)
    assert tokens_by(engine, requests(4, **sampling)) == reference(4, **sampling)
    assert ahead_counts(proposer).hit_rate > 0.6


@pytest.mark.parametrize("mode", MODES)
def test_drafts_that_are_turned_off_and_on_change_no_token(tiny_model_dir, reference, mode):
    clock = Clock()
    speculation = SpeculativeConfig.of("draft_model", 3, async_drafting=mode)
    control = SpeculationControl("on", 100, 3)
    policy = SpeculationPolicy(control, clock, ahead_choices=speculation.ahead_choices)
    proposer = untimed_model(tiny_model_dir)
    config = engine_config(0, speculation=speculation)
    engine = local_engine(tiny_model_dir, config, None, proposer, policy)
    asked = requests(4, **SAMPLED)
    for each in asked:
        engine.add(each)
    tokens, num_steps = {each.request_id: [] for each in asked}, 0
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id].extend(output.token_ids)
        proposer.check_integrity()
        num_steps += 1
        if num_steps % 5 == 0:
            mode_now = "off" if num_steps % 2 else "on"
            engine.set_speculation(replace(control, mode=mode_now))
    assert tokens == reference(4, **SAMPLED)
    assert sum(ahead_counts(proposer).hits.values()) > 5


class TimedTarget:
    """A target whose steps take 30 ms of a clock."""

    def __init__(self, inner, clock):
        self._inner, self._clock = inner, clock

    def begin(self, step):
        self._inner.begin(step)

    def collect(self):
        self._clock.now_s += 0.03
        return self._inner.collect()


def test_time_without_a_step_is_none_of_the_targets(tiny_model_dir):
    """Gaps: no request, drafting turned off and on, and a client that is slow between steps."""
    clock = Clock()
    speculation = SpeculativeConfig.of("draft_model", 3, async_drafting="outcomes")
    control = SpeculationControl("on", 100, 3)
    policy = SpeculationPolicy(control, clock, ahead_choices=speculation.ahead_choices)
    proposer = draft_model(tiny_model_dir, clock=clock)
    config = engine_config(0, speculation=speculation)
    target = TimedTarget(HashTarget(4, 383), clock)
    engine = make_engine(tiny_model_dir, config, target, proposer, policy)
    planner = proposer._ahead.planner
    for number, mode in enumerate(("on", "off", "on")):
        engine.set_speculation(replace(control, mode=mode))
        run(engine, [replace(each, request_id=f"{number}") for each in requests(1)])
        clock.now_s += 60
    assert planner._target_s == pytest.approx(0.03)


def test_a_lost_step_is_none_of_the_targets(tiny_model_dir):
    clock = Clock()
    speculation = SpeculativeConfig.of("draft_model", 3, async_drafting="outcomes")
    proposer = draft_model(tiny_model_dir, clock=clock)
    config = engine_config(0, speculation=speculation)
    engine = make_engine(tiny_model_dir, config, TimedTarget(HashTarget(4, 383), clock), proposer)
    for each in requests(1):
        engine.add(each)
    while not proposer._ahead.is_expected:
        engine.step()
    clock.now_s += 60
    engine.replace_target(TimedTarget(HashTarget(4, 383), clock))
    while engine.has_work:
        engine.step()
    assert proposer._ahead.planner._target_s == pytest.approx(0.03)
