"""A rank drafts with a head, with lookups, or with both."""

from unittest.mock import Mock

import pytest

from specdec.kernels.reference.ngram import NgramLengths
from specdec.worker.head.drafter import RankDrafter
from specdec.worker.head.lookup import LookupRunner

LOOKUPS = LookupRunner(NgramLengths(1, 3), max_model_len=64)


@pytest.mark.parametrize(
    ("has_kv", "lookups", "expected"),
    [
        (True, None, True),
        (False, None, False),
        (None, LOOKUPS, True),
        (True, LOOKUPS, True),
        (False, LOOKUPS, True),
    ],
)
def test_drafts_follow_steps_where_they_need_kv_or_text(has_kv, lookups, expected):
    head = None if has_kv is None else Mock(follows_steps=has_kv)
    assert RankDrafter(head, lookups).follows_steps is expected
