"""Sampling rules of rows of logits on the device, from records that the host has packed."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.reference.sample_rows import SAMPLE_PARAMS
from specdec.sampling.device.device_sampler import DeviceRules
from specdec.sampling.gumbel import NoiseKeys
from specdec.sampling.truncation import DeviceLimits

PARAM_WORDS = SAMPLE_PARAMS.itemsize // 8
"""Size of a record of SAMPLE_PARAMS in words of 8 bytes."""


def rules_of(params: Tensor, positions: Tensor, num_prompt: Tensor) -> DeviceRules:
    """Return the sampling parameters of all rows of logits.

    params: [num_rows, PARAM_WORDS] int64, records of SAMPLE_PARAMS. positions: [num_rows, Q] int64,
    of the tokens that run; each samples the token after it. num_prompt: [num_rows] int64, tokens
    of the prompts.
    """
    words = params.contiguous()
    halves = words.view(torch.float32)

    def spread(values: Tensor) -> Tensor:
        return values[:, None].expand_as(positions).flatten()

    return DeviceRules(
        temperatures=spread(halves[:, _half("temperature")]),
        limits=DeviceLimits(
            top_k=spread(words[:, _word("top_k")]),
            top_p=spread(words.view(torch.float64)[:, _word("top_p")]),
            min_scores=spread(halves[:, _half("min_score")]),
        ),
        keys=NoiseKeys(
            seeds=spread(words[:, _word("seed")]),
            choices=spread(words.view(torch.int32)[:, _half("choice")].long() & _UINT32),
            positions=(positions + 1 - num_prompt[:, None]).flatten(),
        ),
    )


_UINT32 = 2**32 - 1


def _word(name: str) -> int:
    """Return the index of a field of SAMPLE_PARAMS in 8-byte words."""
    fields = SAMPLE_PARAMS.fields
    assert fields is not None, "SAMPLE_PARAMS has fields"
    return int(fields[name][1]) // 8


def _half(name: str) -> int:
    """Return the index of a field of SAMPLE_PARAMS in 4-byte words."""
    fields = SAMPLE_PARAMS.fields
    assert fields is not None, "SAMPLE_PARAMS has fields"
    return int(fields[name][1]) // 4
