# Modules: specdec.sequences.worker_view, specdec.speculation.proposers.ahead
"""Tests of a draft model in this process: output, block accounting and acceptance rate.

The draft model is the target itself, whose drafts are nearly always accepted, or another random
model, whose drafts are nearly always rejected.
"""

from unittest.mock import Mock

import numpy as np
import pytest
import torch

from specdec.config.engine import DraftLimits
from specdec.speculation.proposers import DraftVocabulary, SentRow
from specdec.speculation.proposers.draft_model import MAX_PENDING_TOKENS, DraftModelProposer
from specdec.text.vocab_map import VocabularyMap
from specdec.types.adapters import AdapterFile
from specdec.types.draft_messages import DraftedRow, DraftOutput
from specdec.types.drafts.draft_decision import DraftAhead
from specdec.types.sampling.sampling_params import SpeculationOptions
from specdec.types.sampling.sampling_spec import SamplingRules, Verifier
from tests.specdec.engines import draft_model, engine_config, local_engine, request
from tests.specdec.fakes import run_ranks
from tests.specdec.speculation.proposers.sequences import drafts, end, sequence
from tests.specdec.tiny import tiny_llama_dir

GREEDY, SAMPLED = {"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95}


@pytest.fixture(scope="module")
def other_model_dir(tmp_path_factory):
    return tiny_llama_dir(tmp_path_factory.mktemp("other"), layers=1, seed=3)


def requests(count=6, **params):
    """Return requests longer than `MAX_PENDING_TOKENS`, some longer than a chunk of the target."""
    generator = torch.Generator().manual_seed(9)
    lengths = [MAX_PENDING_TOKENS + 2 + 13 * i for i in range(count)]
    prompts = [torch.randint(3, 383, (n,), generator=generator).tolist() for n in lengths]
    return [
        request(f"r{i}", prompt, seed=40 + i, max_tokens=30, **params)
        for i, prompt in enumerate(prompts)
    ]


def run_checked(engine, proposer, asked):
    """Return the tokens of each request; check target and draft block accounting at each step."""
    generated = {each.request_id: [] for each in asked}
    for each in asked:
        engine.add(each)
    while engine.has_work:
        for output in engine.step():
            generated[output.request_id].extend(output.token_ids)
        engine.check_integrity()
        proposer.check_integrity()
    assert proposer._blocks.num_free_blocks == proposer._blocks.num_blocks, "blocks leaked"
    return generated


@pytest.fixture(scope="module")
def reference(tiny_model_dir):
    def generate(**params):
        engine = local_engine(tiny_model_dir, engine_config(0))
        asked = requests(**params)
        tokens = {each.request_id: [] for each in asked}
        for each in asked:
            engine.add(each)
        while engine.has_work:
            for output in engine.step():
                tokens[output.request_id].extend(output.token_ids)
        return tokens

    return generate


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_target_as_its_own_draft_is_nearly_always_right(tiny_model_dir, reference, k, sampling):
    proposer = draft_model(tiny_model_dir)
    engine = local_engine(tiny_model_dir, engine_config(k), proposer=proposer)
    assert run_checked(engine, proposer, requests(**sampling)) == reference(**sampling)
    speculation = engine.stats().counts.speculation
    assert speculation.acceptance_rate >= 0.98
    assert speculation.num_drafts > 20
    assert proposer.num_catch_up_tokens > 0


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_draft_that_is_mostly_wrong_changes_nothing(
    tiny_model_dir, other_model_dir, reference, sampling
):
    proposer = draft_model(other_model_dir)
    engine = local_engine(tiny_model_dir, engine_config(3), proposer=proposer)
    assert run_checked(engine, proposer, requests(**sampling)) == reference(**sampling)
    assert engine.stats().counts.speculation.num_draft_tokens > 0
    assert engine.stats().counts.speculation.acceptance_rate < 0.5


@pytest.mark.parametrize("draft_size", [1, 2, 3])
def test_draft_ranks_agree(tiny_model_dir, reference, draft_size):
    def generate_on(group):
        proposer = draft_model(tiny_model_dir, group)
        engine = local_engine(tiny_model_dir, engine_config(3), group, proposer)
        tokens = run_checked(engine, proposer, requests(**SAMPLED))
        return tokens, engine.stats().counts.speculation

    ranks = run_ranks(draft_size, generate_on)
    assert all(rank == ranks[0] for rank in ranks)
    assert ranks[0][0] == reference(**SAMPLED)


def test_preempted_sequences_are_drafted_for_again(tiny_model_dir, reference):
    proposer = draft_model(tiny_model_dir, num_blocks=60)
    engine = local_engine(tiny_model_dir, engine_config(3, num_blocks=60), proposer=proposer)
    assert run_checked(engine, proposer, requests(**GREEDY)) == reference(**GREEDY)
    assert engine.stats().counts.num_preemptions > 0
    assert engine.stats().counts.num_cached_tokens == 0  # prompts differ: only preempted ones hit
    assert engine.stats().counts.speculation.acceptance_rate >= 0.98


def test_a_draft_pool_that_is_too_small_means_fewer_drafts(tiny_model_dir, reference):
    proposer = draft_model(tiny_model_dir, num_blocks=30)
    engine = local_engine(tiny_model_dir, engine_config(3), proposer=proposer)
    assert run_checked(engine, proposer, requests(**GREEDY)) == reference(**GREEDY)
    assert engine.stats().counts.speculation.num_draft_tokens > 0


def test_a_pool_for_one_long_sequence_serves_the_first_to_its_end(tiny_model_dir):
    """Otherwise each sequence would hold half of the pool and wait for the other half."""
    proposer = draft_model(tiny_model_dir, num_blocks=30)
    engine = local_engine(tiny_model_dir, engine_config(3), proposer=proposer)
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(3, 383, (2, 60), generator=generator).tolist()
    asked = [request(f"r{i}", prompt, max_tokens=50) for i, prompt in enumerate(prompts)]
    for each in asked:
        engine.add(each)
    drafted_for, num_steps = 0, 0
    while engine.has_work:
        engine.step()
        proposer.check_integrity()
        rows = [row for step in engine._steps._steps for _, row in step.rows]
        drafted_for += any(row.seq_id == 0 and row.num_draft_tokens for row in rows)
        num_steps += any(row.seq_id == 0 for row in rows)
    assert drafted_for >= 50 // 4
    assert num_steps < 25, "the first had to wait for the second"
    assert engine.stats().counts.speculation.acceptance_rate >= 0.98


def test_a_sequence_beyond_the_context_runs_no_tokens_and_frees_its_blocks(tiny_model_dir):
    proposer = draft_model(tiny_model_dir, max_model_len=40)
    engine = local_engine(tiny_model_dir, engine_config(3), proposer=proposer)
    run_checked(engine, proposer, [request("long", range(5, 50), max_tokens=20)])
    assert proposer.num_catch_up_tokens == 0
    engine.add(request("grows", range(5, 30), max_tokens=60))
    held = []
    while engine.has_work:
        engine.step()
        held.append(proposer._blocks.num_blocks - proposer._blocks.num_free_blocks)
    assert max(held) >= 9
    assert held[-10:] == [0] * 10


def test_a_sequence_beyond_the_draft_models_context_decodes_without_drafts(
    tiny_model_dir, reference
):
    proposer = draft_model(tiny_model_dir, max_model_len=40)
    engine = local_engine(tiny_model_dir, engine_config(3), proposer=proposer)
    assert run_checked(engine, proposer, requests(**GREEDY)) == reference(**GREEDY)
    assert engine.stats().counts.speculation.acceptance_rate >= 0.98


def test_a_repeated_prompt_is_not_run_again(tiny_model_dir):
    proposer = draft_model(tiny_model_dir)
    engine = local_engine(tiny_model_dir, engine_config(3), proposer=proposer)
    [longest] = requests(**GREEDY)[-1:]
    first = run_checked(engine, proposer, [longest])
    caught_up = proposer.num_catch_up_tokens
    assert run_checked(engine, proposer, [longest]) == first
    assert engine.stats().counts.num_cached_tokens >= len(longest.prompt_token_ids) - 4
    assert proposer.num_catch_up_tokens == caught_up


def test_a_request_that_opts_out_is_never_sent_to_the_draft_model(tiny_model_dir):
    proposer = draft_model(tiny_model_dir)
    engine = local_engine(tiny_model_dir, engine_config(3), proposer=proposer)
    run_checked(engine, proposer, requests(speculation=SpeculationOptions(enabled=False)))
    assert proposer._num_steps == 0
    assert engine.stats().counts.speculation.num_drafts == 0


@pytest.mark.parametrize(("rules", "num_tokens"), [({}, 0), ({"presence_penalty": 0.5}, 20)])
def test_a_draft_worker_is_not_asked_for_log_probabilities(
    tiny_model_dir, monkeypatch, rules, num_tokens
):
    """Log probabilities would send the whole prompt to the worker without any effect."""
    proposer = draft_model(tiny_model_dir)
    begin = Mock(wraps=proposer._worker.begin)
    monkeypatch.setattr(proposer._worker, "begin", begin)
    engine = local_engine(tiny_model_dir, engine_config(3), proposer=proposer)
    asked = request("r", range(5, 25), prompt_logprobs=2, logprobs=2, max_tokens=4, **rules)
    run_checked(engine, proposer, [asked])
    [admission] = [each for call in begin.call_args_list for each in call.args[0].admitted]
    assert (admission.rules.prompt_logprobs, admission.rules.logprobs) == (None, None)
    assert len(admission.token_ids) == num_tokens


class RecordingWorker:
    """A draft worker without a model, which records its steps."""

    poll_busy = lambda self: False  # noqa: E731

    def __init__(self):
        self.steps = []

    def begin(self, step):
        self.steps.append(step)

    def collect(self):
        step = self.steps[-1]
        rows = tuple(DraftedRow(row.seq_id, (9,) * row.num_draft_tokens) for row in step.drafts)
        return DraftOutput(step.step_id, rows)

    def first_computed(self, seq_id):
        """Return where the last step begins to compute a sequence."""
        step = self.steps[-1]
        return next(
            row.num_computed_tokens for row in step.rows + step.drafts if row.seq_id == seq_id
        )


def proposer_that_has_dropped(seq):
    """Return a proposer that has run `seq`, and dropped it for a sequence that ranks before it."""
    worker = RecordingWorker()
    limits = DraftLimits(num_blocks=12, block_size=4, max_model_len=48, max_catch_up_tokens=48)
    proposer = DraftModelProposer(worker, limits)
    for _ in range(2):  # the first runs the prompt, the second publishes it
        drafts(proposer, seq, count=1)
    earlier = sequence(99, range(200, 212))
    drafts(proposer, earlier, seq, count=1)
    end(proposer, earlier)
    proposer.check_integrity()
    return proposer, worker


class LoadingWorker(RecordingWorker):
    """One that is to load an adapter, and has it when `fault` is not None."""

    fault = None

    def begin_adapter_load(self, adapter):
        del adapter

    def collect_adapter_load(self):
        return self.fault

    def collect_ahead(self, *, wait):
        return []

    def unload_adapter(self, adapter_id):
        raise AssertionError


def test_nothing_is_drafted_ahead_of_a_text_that_a_load_has_kept_from_being_read():
    """The load ends between the two calls of a step; the views are those of the step before."""
    ids = np.arange(400, dtype=np.int32)
    vocabulary = DraftVocabulary(VocabularyMap(ids, ids.copy(), has_equal_ids=True))
    limits = DraftLimits(num_blocks=12, block_size=4, max_model_len=48, max_catch_up_tokens=48)
    worker = LoadingWorker()
    proposer = DraftModelProposer(worker, limits, vocabulary.new_adapter())
    seq = sequence(1, range(8))

    def drafted_ahead():
        row = SentRow(seq, seq.num_tokens, (9,), 2, None, DraftAhead.CONTINUING)
        proposer.ahead([row])
        return worker.steps[-1].ahead

    assert drafts(proposer, seq, count=2) == [(9, 9)]
    assert [row.known for row in drafted_ahead()] == [tuple(range(8))]
    seq.token_ids += [20, 21]
    num_steps = len(worker.steps)
    proposer.load_adapter(AdapterFile(3, "sql", "org/sql", "/sql"))
    assert drafts(proposer, seq) == [()]
    worker.fault = ""
    drafted_ahead()
    assert len(worker.steps) == num_steps
    drafts(proposer, seq, count=2)
    assert [row.known[-2:] for row in drafted_ahead()] == [(20, 21)]


def test_a_dropped_sequence_keeps_its_salt():
    seq = sequence(1, range(40), cache_salt="tenant")
    proposer, worker = proposer_that_has_dropped(seq)
    for _ in range(2):
        drafts(proposer, seq, count=1)
    end(proposer, seq)
    stranger = sequence(2, range(40))
    drafts(proposer, stranger, count=1)
    assert worker.first_computed(stranger.seq_id) == 0


def test_a_dropped_sequence_finds_its_own_cache():
    seq = sequence(1, range(40), cache_salt="tenant")
    proposer, worker = proposer_that_has_dropped(seq)
    drafts(proposer, seq, count=1)
    assert worker.first_computed(seq.seq_id) >= 20


def sampled_sequence(seq_id, verifier):
    seq = sequence(seq_id, range(20 + seq_id, 30 + seq_id))
    seq.rules = SamplingRules(temperature=0.8, seed=11 + seq_id, verifier=Verifier(verifier))
    return seq


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_a_draft_does_not_depend_on_the_verifiers_of_other_requests(tiny_model_dir, verifier):
    """A shifted noise stream would be used for two rounds of the same position."""

    def drafts_of_last(*seqs):
        return drafts(draft_model(tiny_model_dir), *seqs, count=4)[-1]

    alone = drafts_of_last(sampled_sequence(1, verifier))
    assert len(alone) == 4
    beside = drafts_of_last(sampled_sequence(0, "coupled"), sampled_sequence(1, verifier))
    assert beside == alone
