# Modules: specdec.engine.scheduling.scheduled_row
# Modules: specdec.engine.scheduling.batch_load
"""The scheduler alone: drafts take what is left, whatever the load."""

import random

import pytest

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.scheduling.adapter_seats import AdapterSeats
from specdec.engine.scheduling.scheduler import Scheduler
from specdec.sequences.block_manager import BlockManager
from specdec.sequences.prediction import PredictedText
from specdec.sequences.sequence import (
    AGEING_S,
    EngineRequest,
    HeadDraft,
    Sequence,
    SequenceStatus,
)
from specdec.types.control import SpeculationControl
from specdec.types.drafts.draft_decision import Decision, DecisionReason, PromptLoad, chain
from specdec.types.drafts.draft_survival import AcceptanceHistory
from specdec.types.messages import BASE_MODEL
from specdec.types.sampling.sampling_params import SamplingParams, SpeculationOptions
from specdec.types.sampling.sampling_spec import SamplingRules
from tests.specdec.engines import engine_config

BLOCK_SIZE = 4
CONTROL = SpeculationControl("auto", threshold=64, num_speculative_tokens=4)


def sequence(
    seq_id,
    num_tokens,
    *,
    priority=0,
    max_tokens=None,
    prediction=None,
    adapter_id=BASE_MODEL,
    **options,
):
    """Return a waiting sequence. options: of speculation."""
    prompt = tuple(range(100 * seq_id, 100 * seq_id + num_tokens))
    request = EngineRequest(
        prompt,
        SamplingParams(speculation=SpeculationOptions(**options)),
        request_id=str(seq_id),
        seed=0,
        priority=priority,
        prediction=prediction,
        adapter_id=adapter_id,
    )
    return Sequence(seq_id, request, SamplingRules(), detokenizer=None, max_tokens=max_tokens)


def scheduler_with(num_blocks, sequences, max_num_batched_tokens=96, seats=None):
    blocks = BlockManager(num_blocks, BLOCK_SIZE)
    config = engine_config(
        4,
        num_blocks=num_blocks,
        max_model_len=num_blocks * BLOCK_SIZE,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    scheduler = Scheduler(config, blocks, seats=seats)
    for seq in sequences:
        scheduler.add([seq])
    return scheduler, blocks


def steps(scheduler, blocks, num_drafts):
    """Yield the rows of each step; those that sample then commit a token and reject all drafts."""
    decision = Decision(chain(num_drafts), DecisionReason.OPERATOR)
    while rows := scheduler.schedule(decision, CONTROL):
        blocks.check_integrity()
        yield rows
        for row in rows:
            seq = row.seq
            new_tokens = [7] if row.samples else []
            seq.num_computed_tokens += row.num_tokens
            seq.token_ids += new_tokens
            blocks.publish(seq.seq_id, seq.token_ids, seq.num_computed_tokens)
            blocks.truncate(seq.seq_id, seq.num_computed_tokens)
            if seq.max_tokens is not None and seq.num_output_tokens >= seq.max_tokens:
                scheduler.finish(seq)


@pytest.mark.parametrize("seed", range(60))
def test_drafts_cause_no_preemption(seed):
    """Where no draft is accepted, a load runs in the same steps as without drafts."""

    def history(num_drafts):
        generator = random.Random(seed)
        sequences = [sequence(i, generator.randint(4, 24), max_tokens=20) for i in range(6)]
        scheduler, blocks = scheduler_with(generator.randint(12, 24), sequences)
        return [
            ([row.seq.seq_id for row in rows], [seq.seq_id for seq in scheduler.preempted])
            for rows in steps(scheduler, blocks, num_drafts)
        ]

    assert history(4) == history(0)


def test_a_later_sequence_gets_its_next_token_before_earlier_ones_get_drafts():
    """Each of two sequences needs a block for its next token; two are free."""
    sequences = [sequence(0, 4), sequence(1, 4)]
    scheduler, blocks = scheduler_with(4, sequences)
    all_steps = steps(scheduler, blocks, 4)
    next(all_steps)
    rows = next(all_steps)
    assert [(row.seq.seq_id, row.num_tokens) for row in rows] == [(0, 1), (1, 1)]
    assert scheduler.preempted == []


def test_a_sequence_preempted_for_a_token_has_no_share_of_the_draft_budget():
    """Sequence 2 is preempted for sequence 1; three rows would have 5 drafts, not 3 each."""
    sequences = [sequence(seq_id, 4) for seq_id in range(3)]
    scheduler, blocks = scheduler_with(4, sequences, max_num_batched_tokens=14)
    all_steps = steps(scheduler, blocks, 3)
    next(all_steps)
    rows = next(all_steps)
    assert scheduler.preempted == [sequences[2]]
    assert [(row.seq.seq_id, row.num_draft_tokens) for row in rows] == [(0, 3), (1, 3)]


def test_a_sequence_preempted_for_a_prompt_returns_its_share_of_the_draft_budget():
    """Sequence 1 loses its row to the last chunk of an urgent prompt; each of both had 3 drafts."""
    sequences = [sequence(0, 4), sequence(1, 4)]
    scheduler, blocks = scheduler_with(8, sequences, max_num_batched_tokens=14)
    all_steps = steps(scheduler, blocks, 4)
    next(all_steps)
    scheduler.add([sequence(2, 20, priority=-3)])
    while sequences[1] not in scheduler.preempted:
        rows = next(all_steps)
    drafts = {row.seq.seq_id: row.num_draft_tokens for row in rows}
    assert drafts == {0: 4, 2: 0}
    assert sum(row.num_tokens + row.num_guesses for row in rows) <= 14


def test_waiting_outweighs_priority_in_the_end():
    """A flood of urgent requests delays an ordinary one by a bounded time."""
    scheduler, _ = scheduler_with(100, [])
    ordinary = sequence(0, 8)
    scheduler.add([ordinary], now_s=0.0)
    urgent = [sequence(i, 8, priority=-3) for i in (1, 2)]
    scheduler.add(urgent[:1], now_s=3 * AGEING_S - 1)
    scheduler.add(urgent[1:], now_s=3 * AGEING_S + 1)
    rows = scheduler.schedule(Decision(chain(0), DecisionReason.OPERATOR), CONTROL)
    assert [row.seq.seq_id for row in rows] == [1, 0, 2]


@pytest.mark.parametrize("max_tokens", [None, 4])
def test_a_batch_budget_follows_acceptance_and_keeps_the_sum(max_tokens):
    speculation = SpeculativeConfig.of(num_speculative_tokens=3, batch_budget=True)
    config = engine_config(speculation=speculation, num_blocks=100, max_num_batched_tokens=96)
    scheduler = Scheduler(config, BlockManager(100, BLOCK_SIZE))
    sequences = [sequence(seq_id, 5, max_tokens=max_tokens) for seq_id in range(2)]
    sequences.append(sequence(2, 5, max_tokens=max_tokens, num_speculative_tokens=1))
    scheduler.add(sequences)
    for seq in sequences:
        seq.acceptance = AcceptanceHistory(20.0, 20.0 if seq.seq_id == 0 else 2.0)
    decision = Decision(chain(3), DecisionReason.OPERATOR)
    for row in scheduler.schedule(decision, CONTROL):
        row.seq.num_computed_tokens += row.num_tokens
        row.seq.token_ids.append(7)
    lengths = [row.num_draft_tokens for row in scheduler.schedule(decision, CONTROL)]
    # Two tokens are left of four, and one of these is the target's own.
    assert lengths == ([7, 0, 0] if max_tokens is None else [2, 2, 1])


@pytest.mark.parametrize(
    ("keys", "lengths"),
    [
        ({}, [3, 2, 1]),  # the third's own rate is low, and it has no draft to be sure of
        ({"first": "ngram"}, [6, 0, 0]),  # by acceptance alone
    ],
)
def test_a_batch_budget_follows_the_confidences_of_a_head_that_drafts_alone(keys, lengths):
    speculation = SpeculativeConfig.of("medusa", 2, model="./head", batch_budget=True, **keys)
    config = engine_config(speculation=speculation, num_blocks=100, max_num_batched_tokens=96)
    scheduler = Scheduler(config, BlockManager(100, BLOCK_SIZE))
    sequences = [sequence(seq_id, 5) for seq_id in range(3)]
    scheduler.add(sequences)
    decision = Decision(chain(2), DecisionReason.OPERATOR)
    for row in scheduler.schedule(decision, CONTROL):
        row.seq.num_computed_tokens += row.num_tokens
        row.seq.token_ids.append(7)
    first, second, third = sequences
    first.head_draft = HeadDraft(6, 7, (1, 2, 3, 4, 5), None, (900, 900, 900, 100, 900))
    second.head_draft = HeadDraft(6, 7, (1, 2, 3), None, (800, 700, 20))
    third.head_draft = HeadDraft(5, 6, (1,), None, (990,))  # of an earlier text
    for seq, num_accepted in zip(sequences, (20.0, 10.0, 10.0), strict=True):
        seq.acceptance = AcceptanceHistory(20.0, num_accepted)
    assert [row.num_draft_tokens for row in scheduler.schedule(decision, CONTROL)] == lengths


@pytest.mark.parametrize("seed", range(10))
def test_predictions_are_counted_while_their_sequences_run(seed):
    source = random.Random(seed)
    predictions = [PredictedText([1, 2, 3]) if source.random() < 0.3 else None for _ in range(12)]
    sequences = [
        sequence(seq_id, source.randrange(2, 20), max_tokens=12, prediction=prediction)
        for seq_id, prediction in enumerate(predictions)
    ]
    scheduler, blocks = scheduler_with(12, sequences)
    num_preempted = 0
    for _ in steps(scheduler, blocks, 0):
        num_preempted += len(scheduler.preempted)
        running = [seq for seq in sequences if seq.status is SequenceStatus.RUNNING]
        assert scheduler.has_predictions == any(seq.prediction is not None for seq in running)
    assert num_preempted > 0
    assert not scheduler.has_predictions


def begin(scheduler, decision):
    """Run the prompts of a step, each with a token after it."""
    for row in scheduler.schedule(decision, CONTROL):
        row.seq.num_computed_tokens += row.num_tokens
        if row.seq.num_uncomputed_tokens == 0:
            row.seq.token_ids.append(7)


def test_a_decision_for_few_sequences_is_for_the_first_ones_that_can_draft():
    """The others neither have drafts verified, nor does a head draft after them."""
    speculation = SpeculativeConfig.of("medusa", 2, model="./head")
    config = engine_config(speculation=speculation, num_blocks=100, max_num_batched_tokens=96)
    scheduler = Scheduler(config, BlockManager(100, BLOCK_SIZE))
    sequences = [sequence(seq_id, 5, max_tokens=None if seq_id else 1) for seq_id in range(5)]
    sequences[2].may_draft = False
    scheduler.add(sequences)
    begin(scheduler, Decision(chain(0), DecisionReason.GOODPUT))
    decision = Decision(chain(2), DecisionReason.PROBE, num_drafting=2)
    late = sequence(5, 5)
    scheduler.add([late])
    rows = scheduler.schedule(decision, CONTROL)
    assert [row.num_draft_tokens for row in rows] == [0, 2, 0, 2, 0, 0]
    assert [row.num_next_drafts for row in rows] == [0, 2, 0, 2, 0, 0]
    assert [scheduler.draft_planner.may_draft(row.seq) for row in rows] == [
        False,
        True,
        False,
        True,
        False,
        False,
    ]
    scheduler.finish(sequences[1])
    rows = scheduler.schedule(decision, CONTROL)
    assert [row.seq.seq_id for row in rows if row.num_draft_tokens] == [3, 4]
    everyone = Decision(chain(2), DecisionReason.GOODPUT)
    assert sum(row.num_draft_tokens > 0 for row in scheduler.schedule(everyone, CONTROL)) == 2


def test_prompts_are_counted_up_to_what_a_step_can_run():
    scheduler, _ = scheduler_with(30, [sequence(0, 10), sequence(1, 6)], max_num_batched_tokens=40)
    assert scheduler.prompts == PromptLoad(16, 2)
    begin(scheduler, Decision(chain(0), DecisionReason.GOODPUT))
    assert scheduler.prompts == PromptLoad(0, 0)
    scheduler.add([sequence(2, 50)])
    assert scheduler.prompts == PromptLoad(38, 1), "two sequences decode in a step of 40 tokens"
    begin(scheduler, Decision(chain(0), DecisionReason.GOODPUT))
    assert scheduler.prompts == PromptLoad(12, 1), "the rest of a chunked prompt"
    scheduler.add([sequence(3, 80)])
    assert scheduler.prompts == PromptLoad(12, 1), "there are no blocks for another one"


def test_prompts_without_a_seat_are_not_counted():
    scheduler, _ = scheduler_with(100, [sequence(seq_id, 3) for seq_id in range(9)])
    begin(scheduler, Decision(chain(0), DecisionReason.GOODPUT))
    assert (scheduler.num_waiting, scheduler.prompts) == (1, PromptLoad(0, 0))


def test_prompts_whose_adapter_has_no_seat_are_not_counted():
    """They may wait for as long as the running requests take: these would not draft meanwhile."""
    seats = AdapterSeats(1, most_overtaking=4, is_ready=lambda _: True)
    scheduler, _ = scheduler_with(100, [sequence(0, 3, adapter_id=1)], seats=seats)
    begin(scheduler, Decision(chain(0), DecisionReason.GOODPUT))
    scheduler.add([sequence(1, 6, adapter_id=2)])
    assert (scheduler.num_waiting, scheduler.prompts) == (1, PromptLoad(0, 0))
    scheduler.add([sequence(2, 5, adapter_id=1)])
    assert scheduler.prompts == PromptLoad(5, 1)
