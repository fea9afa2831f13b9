"""The temperature at which heads draft.

The target samples the argmax of y / T + g. A head has logits z instead of y, and errs most about
unlikely tokens: most of those are less likely than it assumes. At temperature T the noise g lets
too many of them win, so a head drafts the argmax of z / (c T) + g with c below 1. Verification is
coupled (`specdec.sampling.verifiers.coupled`), so this changes acceptance and never the output.

c is fitted to acceptance: of log q and g, a conditional logit model of the target's token gives g
0.70 to 0.78 times the weight of log q (docs/training.md).
"""

from __future__ import annotations

from dataclasses import replace

from specdec.sampling.device_sampler import DeviceRules
from specdec.sampling.sampler import SamplingBatch

HEAD_DRAFT_TEMPERATURE = 0.75
"""c, the temperature of a head's draft tokens as a share of the request's. Exact in float32."""


def draft_batch_of(batch: SamplingBatch) -> SamplingBatch:
    """Return how a head drafts tokens that the target samples by `batch`."""
    return batch.with_temperatures(batch.temperatures * HEAD_DRAFT_TEMPERATURE)


def draft_rules_of(rules: DeviceRules) -> DeviceRules:
    """Return how a head drafts tokens that the target samples by `rules`; no value is read."""
    return replace(rules, temperatures=rules.temperatures * HEAD_DRAFT_TEMPERATURE)
