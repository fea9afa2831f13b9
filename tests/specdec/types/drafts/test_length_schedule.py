"""vLLM's num_speculative_tokens_per_batch_size."""

import pytest

from specdec.types.drafts.draft_length import LengthSchedule
from specdec.types.errors import InvalidValueError

TABLE = LengthSchedule(((1, 4, 5), (5, 16, 2), (17, 32, 0)))


@pytest.mark.parametrize(
    ("num_decoding", "count"), [(1, 5), (4, 5), (5, 2), (16, 2), (17, 0), (32, 0), (500, 0)]
)
def test_both_ends_of_a_row_belong_to_it_and_the_last_goes_on(num_decoding, count):
    assert TABLE.num_draft_tokens(num_decoding) == count


@pytest.mark.parametrize(
    ("rows", "index", "limit"),
    [
        (((2, 4, 5),), 0, "a row that begins with 1"),
        (((1, 4, 5), (6, 8, 1)), 1, "a row that begins with 5"),
        (((1, 4, 5), (4, 8, 1)), 1, "a row that begins with 5"),
        (((1, 0, 5),), 0, "a row whose last batch size is not below its first"),
        (((1, 4, 33),), 0, "a row with k from 0 to 32"),
        (((1, 4),), 0, "three whole numbers"),
    ],
)
def test_a_row_that_cannot_be_is_named(rows, index, limit):
    with pytest.raises(InvalidValueError) as caught:
        LengthSchedule(rows)
    assert caught.value.field.endswith(f"num_speculative_tokens_per_batch_size[{index}]")
    assert caught.value.limit.startswith(limit)
