"""Floors of top_k, top_p and min_p on the device against those of torch on the CPU.

Rows are flat, peaked, and with more equal scores than a program searches in registers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.parts import Case, Context, Result
from specdec.sampling.truncation import DeviceLimits, truncation_floors

_TOP_P_ERROR = 1e-5
"""A token may be kept or not where the probability above it equals top_p to within this."""
_ERRORS = (-_TOP_P_ERROR, _TOP_P_ERROR)


class _Limits(NamedTuple):
    """Sampling parameters of a row."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


_LIMITS = (
    _Limits(0.6, top_p=0.9),
    _Limits(top_k=50, top_p=0.95),
    _Limits(0.7, top_k=20, top_p=0.8, min_p=0.05),
    _Limits(top_k=1),
    _Limits(top_k=50),
    _Limits(1.5, top_k=1500),
    _Limits(top_k=2500, top_p=0.9),  # more than one program searches in registers
    _Limits(top_p=0.999),
    _Limits(top_p=0.5, min_p=0.01),
    _Limits(0.3, min_p=0.1),
    _Limits(0.05, top_p=0.99),
    _Limits(),
    _Limits(0.0, top_k=5, top_p=0.5),
)


def truncation_cases(context: Context) -> list[Case]:
    """Return the comparisons, one for each kind of rows."""
    vocab = 3000 if context.is_small else 128256
    names = ("flat rows", "rows with equal scores") if context.is_small else tuple(_KINDS)
    return [
        (f"floors, {name} of {vocab}", partial(_floors, _KINDS[name], vocab, context.device))
        for name in names
    ]


def _flat(noise: Tensor) -> Tensor:
    return 3 * noise


def _narrow(noise: Tensor) -> Tensor:
    return 0.1 * noise


def _peaked(noise: Tensor) -> Tensor:
    ranks = torch.arange(1, noise.shape[1] + 1).float()
    return 0.5 * noise - 1.5 * ranks.log()


def _equal(noise: Tensor) -> Tensor:
    return noise.round()


_KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "flat rows": _flat,
    "narrow rows": _narrow,
    "peaked rows": _peaked,
    "rows with equal scores": _equal,
}


def _floors(make: Callable[[Tensor], Tensor], vocab: int, device: torch.device) -> Result:
    """Compare what is kept, and the floors of some rows with those of each row alone."""
    noise = torch.randn(len(_LIMITS), vocab, generator=torch.Generator().manual_seed(0))
    logits, rows = make(noise), torch.tensor([0, 2, 6])
    found = _truncation_floors(logits.to(device), _LIMITS)
    alone = [
        _truncation_floors(logits[row : row + 1].to(device), (_LIMITS[row],))
        for row in rows.tolist()
    ]
    is_same = torch.equal(torch.cat(alone), found[rows])
    temperatures = torch.tensor([each.temperature for each in _LIMITS])
    is_sampled = temperatures > 0
    scores = (logits - logits.amax(1, keepdim=True)) / temperatures.where(is_sampled, 1)[:, None]
    fewest, most = (_num_kept(scores, _expected(scores, error)) for error in _ERRORS)
    kept = _num_kept(scores, found)
    differing = int((((kept < fewest) | (kept > most)) & is_sampled).sum())
    has_floor = bool((found[~is_sampled] > -torch.inf).any())
    passed = is_same and differing == 0 and not has_floor
    return {"passed": passed, "rows_that_differ": differing, "same_alone": is_same}


def _num_kept(scores: Tensor, floors: Tensor) -> Tensor:
    return (scores >= floors[:, None]).sum(1)


def _expected(scores: Tensor, error: float) -> Tensor:
    """Return the floors of torch with other values of top_p, [R] float32."""
    columns = _columns(_LIMITS)
    top_p = torch.where(columns.top_p < 1, columns.top_p + error, columns.top_p)
    return truncation_floors(scores, DeviceLimits(columns.top_k, top_p, columns.min_scores))


def _columns(limits: tuple[_Limits, ...]) -> DeviceLimits:
    return DeviceLimits(
        torch.tensor([each.top_k for each in limits]),
        torch.tensor([each.top_p for each in limits], dtype=torch.float64),
        torch.tensor([math.log(each.min_p) if each.min_p else -math.inf for each in limits]),
    )


def _truncation_floors(logits: Tensor, limits: tuple[_Limits, ...]) -> Tensor:
    """Return the floors of the kernels, on the CPU."""
    from specdec.kernels.triton.sample import TileArgmax  # imports Triton
    from specdec.kernels.triton.truncation import truncation_floors

    tiles, columns = TileArgmax(logits), _columns(limits)
    temperatures = torch.tensor([each.temperature for each in limits])
    values = (temperatures, columns.top_k, columns.top_p, columns.min_scores)
    row_limits = tuple(each.to(logits.device) for each in values)
    return truncation_floors(logits, tiles.best, tiles.reduce().values, row_limits).cpu()
