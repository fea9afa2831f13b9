"""Sampling parameters of the rows of a batch, as the host has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.kernels.reference.sample_rows import SAMPLE_PARAMS, RowArgmax, SampleParams
from specdec.sampling.device.device_sampler import DeviceRules
from specdec.sampling.gumbel import NoiseKeys
from specdec.sampling.truncation import DeviceLimits, min_score
from specdec.types.sampling.sampling_spec import SamplingRules

_LEAST_TEMPERATURE = 1e-30
"""Sampling is an argmax at this temperature and below, and logits divided by it are finite in
float32, also by a part of it (`draft_temperature`)."""


@dataclass(frozen=True, eq=False)
class SamplingBatch:
    """Sampling parameters of the rows of a batch, on the host, which selects the work to run."""

    params: SampleParams  # [num_rows], the rows in order
    device: torch.device
    argmax: RowArgmax | None = None  # of the logits to sample, if it is known already

    @classmethod
    def of_rules(
        cls,
        rules: Sequence[SamplingRules],
        positions: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> SamplingBatch:
        """Make a batch from the rules of each row of logits.

        positions: index of the sampled token among the output tokens of its choice.
        """
        params = np.empty(len(rules), dtype=SAMPLE_PARAMS)
        params["temperature"] = [_in_float32(each.temperature) for each in rules]
        params["min_score"] = [min_score(each.min_p) for each in rules]
        params["top_k"] = [each.top_k for each in rules]
        params["top_p"] = [each.top_p for each in rules]
        params["seed"] = [each.seed for each in rules]
        params["choice"] = [each.choice for each in rules]
        params["position"] = positions
        return cls.from_params(params, device)

    @classmethod
    def from_params(
        cls, params: SampleParams, device: torch.device | str, argmax: RowArgmax | None = None
    ) -> SamplingBatch:
        """Make a batch from one record for each row of logits; sets the row numbers in place."""
        params["row"] = np.arange(len(params))
        return cls(params, torch.device(device), argmax)

    def __getitem__(self, rows: NDArray[np.int64] | slice) -> SamplingBatch:
        """Return the batch of the given rows, without their argmax."""
        return self.from_params(self.params[rows].copy(), self.device)

    def with_temperatures(self, temperatures: NDArray[np.float32]) -> SamplingBatch:
        """Replace the temperatures, [num_rows]."""
        params = self.params.copy()
        params["temperature"] = temperatures
        return replace(self, params=params)

    @property
    def num_rows(self) -> int:
        return len(self.params)

    @cached_property
    def rules(self) -> DeviceRules:
        """The parameters of all rows, on the device of the logits."""
        top_k, top_p, min_scores = map(self._column, ("top_k", "top_p", "min_score"))
        limits, truncates = DeviceLimits(top_k, top_p, min_scores), bool(is_cut(self.params).any())
        return DeviceRules(self._column("temperature"), limits, self.noise_keys, truncates)

    @cached_property
    def noise_keys(self) -> NoiseKeys:
        """Noise keys of all rows."""
        choices, positions = (self.params[name].astype(np.int64) for name in ("choice", "position"))
        return NoiseKeys(*map(self._tensor, (self.params["seed"], choices, positions)))

    @cached_property
    def is_any_sampled(self) -> bool:
        """Return whether any row is not greedy."""
        return bool((self.params["temperature"] > 0).any())

    def _column(self, name: str) -> Tensor:
        return self._tensor(self.params[name])

    def _tensor(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)


def is_cut(params: SampleParams) -> NDArray[np.bool_]:
    """Return which rows sample with top_k, top_p or min_p, [num_rows]."""
    is_limited = (params["top_k"] > 0) | (params["top_p"] < 1) | (params["min_score"] > -np.inf)
    return np.asarray(is_limited & (params["temperature"] > 0))


def _in_float32(temperature: float) -> float:
    """Return a temperature that logits can be divided by in float32; 0 for an argmax."""
    return max(temperature, _LEAST_TEMPERATURE) if temperature > 0 else 0.0
