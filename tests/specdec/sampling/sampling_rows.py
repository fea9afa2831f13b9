"""Batches of rows whose rules are given by field."""

from collections.abc import Sequence

from specdec.sampling.sampling_batch import SamplingBatch
from specdec.types.sampling.sampling_spec import SamplingRules


def sampling_rows(positions, **fields):
    """Return the batch of rows at `positions`.

    fields: of SamplingRules, with one value for each row or one for all of them.
    """
    count = len(positions)
    columns = [each if isinstance(each, Sequence) else [each] * count for each in fields.values()]
    rows = (dict(zip(fields, row, strict=True)) for row in zip(*columns, strict=True))
    return SamplingBatch.of_rules([SamplingRules(**row) for row in rows], positions)
