"""Batches of rows whose rules are given by field."""

from collections.abc import Sequence

from specdec.sampling.sampling_batch import SamplingBatch
from specdec.types.sampling.sampling_spec import SamplingRules


def sampling_rows(positions, *, seed=SamplingRules.seed, **fields):
    """Return the batch of rows at `positions`.

    seed, fields: of SamplingRules, with one value for each row or one for all of them. Rules are
    made once for all rows that differ in the seed alone: tests sample 100,000 rows.
    """
    count = len(positions)
    columns = [each if isinstance(each, Sequence) else [each] * count for each in fields.values()]
    rows = [*zip(*columns, strict=True)] if columns else [()] * count
    places = {row: place for place, row in enumerate(dict.fromkeys(rows))}
    rules = [SamplingRules(**dict(zip(fields, row, strict=True))) for row in places]
    batch = SamplingBatch.of_rules(rules, [0] * len(rules))
    batch = batch[[places[row] for row in rows]]
    batch.params["position"], batch.params["seed"] = positions, seed
    return batch
