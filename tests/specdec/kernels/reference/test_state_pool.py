"""Tails of hidden states: replay returns those of accepted guesses before the tokens of a pass."""

import torch

from specdec.kernels.reference.forward_batch import AdapterRun, Chunk, ForwardBatch
from specdec.kernels.reference.state_pool import StatePool

WINDOW, HIDDEN, GUESSES = 2, 3, 4


def new_pool():
    return StatePool(
        1,
        WINDOW,
        2 * HIDDEN,
        (0,),
        num_slots=3,
        max_guesses=GUESSES,
        num_hidden=HIDDEN,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def test_accepted_guesses_of_each_row_are_replayed():
    pool = new_pool()
    text = torch.arange(60.0).view(2, 10, HIDDEN)  # hidden states of two sequences by position
    project = torch.randn(HIDDEN, 2 * HIDDEN, generator=torch.Generator().manual_seed(1))
    slots = (2, 0)
    for slot in slots:
        pool.reset(slot)

    def run(*rows):
        """Run rows (first position, tokens, guesses); return extended inputs of each."""
        chunks = [
            Chunk([1] * count, start, [slot], num_guesses=guesses, state_slot=slot)
            for slot, (start, count, guesses) in zip(slots, rows, strict=True)
        ]
        plan = pool.plan(ForwardBatch(chunks, 4))
        new = [text[i, start : start + count] for i, (start, count, _) in enumerate(rows)]
        found = pool.extend(0, pool.replay(0, torch.cat(new), plan) @ project, plan)
        return found.split([WINDOW + span.num_run for span in plan.spans])

    run((0, 4, 2), (0, 6, 4))  # committed at 2 and 2
    found = run((3, 3, 1), (5, 2, 1))  # of the guesses one and three are accepted
    for index, (first, last) in enumerate(((2, 6), (2, 7))):
        torch.testing.assert_close(found[index], text[index, first - WINDOW : last] @ project)
    found = run((5, 1, 0), (6, 1, 0))  # none was accepted
    for index, (first, last) in enumerate(((5, 6), (6, 7))):
        torch.testing.assert_close(found[index], text[index, first - WINDOW : last] @ project)


def test_the_path_of_a_tree_is_replayed():
    pool, x = new_pool(), torch.arange(18.0).view(6, HIDDEN)
    pool.reset(1)

    def extended(rows, *chunk, **settings):
        batch = ForwardBatch([Chunk([1] * len(rows), *chunk, state_slot=1, **settings)], 4)
        plan = pool.plan(batch)
        return pool.extend(0, pool.replay(0, rows, plan).repeat(1, 2), plan)

    extended(x[:5], 0, [0], (-1, -1, 0, 1), num_guesses=4)
    pool.keep_path(1, (1, 3))
    found = extended(x[5:], 3, [0])
    torch.testing.assert_close(found[WINDOW:], x[[2, 4, 5]].repeat(1, 2))


def test_replayed_rows_have_the_adapters_of_their_sequences():
    pool, plans = new_pool(), []
    for rows in (((0, 4, 2), (0, 6, 4), (0, 1, 0)), ((3, 3, 1), (5, 2, 1), (1, 1, 0))):
        chunks = [
            Chunk([1] * count, start, [slot], num_guesses=guesses, state_slot=slot, adapter_id=each)
            for slot, ((start, count, guesses), each) in enumerate(
                zip(rows, (5, 0, 7), strict=True)
            )
        ]
        plans.append((batch := ForwardBatch(chunks, 4), pool.plan(batch)))
    for (batch, plan), ends in zip(plans, ((4, 10, 11), (4, 9, 10)), strict=True):
        runs = [AdapterRun(5, 0, ends[0]), AdapterRun(7, *ends[1:])]
        assert plan.hidden_runs(batch) == runs
        assert plan.input_runs(batch) == [
            each._replace(begin=each.begin + shift, end=each.end + shift)
            for each, shift in zip(runs, (0, 2 * WINDOW), strict=True)
        ]  # with the earlier inputs of rows before
    assert plan.of_hidden(torch.arange(10)).tolist() == [1, 2, 3, 7, 8, 9]
