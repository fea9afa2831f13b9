"""Tails of hidden states: replay returns those of accepted guesses before the tokens of a pass."""

import torch

from specdec.kernels.reference.forward_batch import Chunk, ForwardBatch
from specdec.kernels.reference.state_pool import StatePool

WINDOW, HIDDEN, GUESSES = 2, 3, 4


def pool_of_hidden():
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
    pool = pool_of_hidden()
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
    pool, x = pool_of_hidden(), torch.arange(18.0).view(6, HIDDEN)
    pool.reset(1)

    def extended(rows, *chunk, **settings):
        batch = ForwardBatch([Chunk([1] * len(rows), *chunk, state_slot=1, **settings)], 4)
        plan = pool.plan(batch)
        return pool.extend(0, pool.replay(0, rows, plan).repeat(1, 2), plan)

    extended(x[:5], 0, [0], (-1, -1, 0, 1), num_guesses=4)
    pool.keep_path(1, (1, 3))
    found = extended(x[5:], 3, [0])
    torch.testing.assert_close(found[WINDOW:], x[[2, 4, 5]].repeat(1, 2))
