"""The temperature at which heads draft.

The target samples the argmax of y / T + g. A head has logits z instead of y, and errs most about
unlikely tokens: most of those are less likely than it assumes. At temperature T the noise g lets
too many of them win, so a head drafts the argmax of z / (c T) + g with c below 1. With the verifier
`coupled` this changes acceptance and never the output; `rejection` and `block` get the argmax of z
(`specdec.worker.head.sampler`).

c is fitted: in a conditional logit model of the target's token the weight of T g is 0.69 to 0.74
times that of z, over all depths (docs/adr/0042-temperature-of-head-drafts.md).
"""

from __future__ import annotations

from dataclasses import replace

from specdec.sampling.device.device_sampler import DeviceRules
from specdec.sampling.sampling_batch import SamplingBatch

HEAD_DRAFT_TEMPERATURE = 0.75
"""c, the temperature of a head's draft tokens as a share of the request's.

It is exact in float32, so the host and the device round the product alike.
"""


def draft_batch_of(batch: SamplingBatch) -> SamplingBatch:
    """Return how a head drafts tokens that the target samples by `batch`; reads no device."""
    params = batch.params.copy()
    params["temperature"] *= HEAD_DRAFT_TEMPERATURE
    return replace(batch, params=params)


def draft_rules_of(rules: DeviceRules) -> DeviceRules:
    """Return how a head drafts tokens that the target samples by `rules`; no value is read."""
    return replace(rules, temperatures=rules.temperatures * HEAD_DRAFT_TEMPERATURE)
