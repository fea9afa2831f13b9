"""Sampling rules of rows of logits on the device, from records that the host has packed."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.reference.sample_rows import SAMPLE_PARAMS
from specdec.sampling.device.device_sampler import DeviceRules, SamplingKind
from specdec.sampling.gumbel import NoiseKeys
from specdec.sampling.truncation import DeviceLimits

PARAM_WORDS = SAMPLE_PARAMS.itemsize // 8
"""Size of a record of SAMPLE_PARAMS in words of 8 bytes."""


def rules_of(
    kind: SamplingKind, params: Tensor, positions: Tensor, num_prompt: Tensor
) -> DeviceRules | None:
    """Return the sampling parameters of all rows of logits; None where all are greedy.

    params: [num_rows, PARAM_WORDS] int64, records of SAMPLE_PARAMS. positions: [num_rows, Q] int64,
    of the tokens that run; each samples the token after it. num_prompt: [num_rows] int64, tokens
    of the prompts.
    """
    if kind is SamplingKind.GREEDY:
        return None
    words = params.contiguous()
    halves = words.view(torch.float32)

    def spread(values: Tensor) -> Tensor:
        return values[:, None].expand_as(positions).flatten()

    return DeviceRules(
        temperatures=spread(halves[:, _place(4, "temperature")]),
        limits=DeviceLimits(
            top_k=spread(words[:, _place(8, "top_k")]),
            top_p=spread(words.view(torch.float64)[:, _place(8, "top_p")]),
            min_scores=spread(halves[:, _place(4, "min_score")]),
        ),
        keys=NoiseKeys(
            seeds=spread(words[:, _place(8, "seed")]),
            choices=spread(words.view(torch.int32)[:, _place(4, "choice")].long() & _UINT32),
            positions=(positions + 1 - num_prompt[:, None]).flatten(),
        ),
        truncates=kind is SamplingKind.TRUNCATED,
    )


_UINT32 = 2**32 - 1


def _place(size: int, name: str) -> int:
    """Return the index of a field of SAMPLE_PARAMS in words of `size` bytes."""
    fields = SAMPLE_PARAMS.fields
    assert fields is not None, "SAMPLE_PARAMS has fields"
    return int(fields[name][1]) // size
