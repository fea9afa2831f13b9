# Modules: specdec.worker.device.input.rows
"""Columns of the rows of a step have the numbers of the rows, one by one."""

import random

import numpy as np
import pytest

from specdec.types.messages import BASE_MODEL, PENDING_TOKEN, RowDrafting, StepRow
from specdec.worker.device.input.columns import StepColumns
from specdec.worker.device.input.rows import is_prompt, num_drafts, num_tokens

WIDTH = 6


def random_row(generator, kind):
    """Return a row of up to WIDTH last known tokens and drafts."""
    count = generator.randrange(WIDTH)
    if kind == "pending":
        return StepRow(
            0,
            generator.randrange(40),
            (PENDING_TOKEN,),
            0,
            True,
            adapter_id=generator.choice((BASE_MODEL, 7)),
            drafting=RowDrafting(
                num_next=generator.randrange(3),
                num_held=count,
                next_depth=generator.randrange(2),
                held_depth=generator.choice((0, count)),
                num_lookup=generator.randrange(3),
            ),
        )
    num_known = generator.randrange(1, 9) if kind == "prompt" else 1
    samples = kind != "prompt" or generator.random() < 0.5
    tokens = tuple(generator.randrange(100) for _ in range(num_known + count * samples))
    return StepRow(
        0,
        generator.randrange(40),
        tokens,
        count * samples,
        samples,
        drafting=RowDrafting(
            parents=generator.choice((None, (-1,) * count)) if count and samples else None,
            num_next=generator.randrange(3),
            num_held=generator.randrange(3),  # that the device has held
            next_depth=generator.randrange(2),
            held_depth=generator.randrange(2),
            num_lookup=generator.randrange(3),
        ),
    )


def may_have_tree(row):
    return row.drafting.parents is not None or (row.is_pending and row.drafting.held_depth > 0)


@pytest.mark.parametrize("kinds", [("known",), ("pending",), ("known", "pending", "prompt")])
@pytest.mark.parametrize("num_rows", [1, 2, 9])
def test_the_numbers_are_those_of_the_rows(kinds, num_rows):
    generator = random.Random(num_rows)
    for _ in range(50):
        rows = [random_row(generator, generator.choice(kinds)) for _ in range(num_rows)]
        columns = StepColumns(rows)
        assert [*columns.num_drafts] == [*map(num_drafts, rows)]
        assert columns.num_tokens == sum(map(num_tokens, rows))
        assert columns.has_prompts == any(map(is_prompt, rows))
        assert columns.has_trees == any(map(may_have_tree, rows))
        assert columns.grows_trees == any(row.samples and row.drafting.next_depth for row in rows)
        assert columns.has_adapters == any(row.adapter_id != BASE_MODEL for row in rows)
        assert columns.has_head_prompts == any(
            row.drafting.num_next and is_prompt(row) for row in rows
        )
        assert columns.is_pending.tolist() == [row.is_pending for row in rows]
        assert columns.samples.tolist() == [row.samples for row in rows]
        assert [*columns.starts] == [row.known_end - 1 for row in rows]
        assert [*columns.num_next_drafts] == [row.drafting.num_next * row.samples for row in rows]
        assert [*columns.num_lookups] == [row.drafting.num_lookup * row.samples for row in rows]
        table = np.zeros((num_rows, WIDTH), np.int64)
        columns.write_tokens(table)
        for own, row in zip(table.tolist(), rows, strict=True):
            tokens = (0,) if row.is_pending else (row.known[-1], *row.drafts)
            assert own == [*tokens, *(0,) * (WIDTH - len(tokens))]
