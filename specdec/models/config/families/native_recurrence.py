"""Recurrent layers by kernels: those that have native ones, and the states that Triton's keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

from specdec.config.engine import Kernels
from specdec.models.config.recurrent import (
    GatedDelta,
    KimiDelta,
    Recurrent,
    SelectiveScan,
    ShortConvolution,
    StateSpace,
)
from specdec.types.errors import InvalidValueError

_KERNEL_FIELDS: Mapping[type[Any], frozenset[str]] = MappingProxyType(
    {
        Recurrent: frozenset({"layers", "kind"}),
        ShortConvolution: frozenset({"num_channels", "kernel_size", "has_bias", "prefix"}),
        GatedDelta: frozenset(
            {"num_key_heads", "num_value_heads", "key_dim", "value_dim", "kernel_size"}
            | {"is_grouped", "is_separate", "prefix"}
        ),
        StateSpace: frozenset(
            {"num_heads", "head_dim", "num_groups", "state_dim", "kernel_size"}
            | {"has_bias", "has_conv_bias", "has_output_bias", "prefix"}
        ),
    }
)
"""The kinds that the kernels run, with the fields that they, or the layers' weights, follow."""


_KINDS: Mapping[type[Any], str] = MappingProxyType(
    {KimiDelta: "layers of Kimi Delta Attention", SelectiveScan: "layers of Mamba"}
)
_FIELDS = MappingProxyType(
    {
        "beside": "recurrences beside attention",
        "mlps": "layers that are an MLP or a mixture alone",
        "traits": "recurrent layers with norms of their own",
    }
)


def recurrence_fault(recurrent: Recurrent) -> str | None:
    """Return what of recurrent layers has no native kernel; None where the kernels run them.

    The kernels do not follow a field that they do not name, so it must have its default.
    """
    for part in (recurrent, recurrent.kind):
        known = _KERNEL_FIELDS.get(type(part))
        if known is None:
            return _KINDS.get(type(part), f"layers of {type(part).__name__}")
        for each in fields(part):
            if each.name not in known and getattr(part, each.name) != each.default:
                return _FIELDS.get(each.name, f"recurrent layers with {each.name}")
    return None


def kernels_of_hybrids(kernels: Kernels, recurrent: Recurrent) -> Kernels:
    """Return the kernels on a CPU: torch in place of native ones that the layers do not have.

    Raises InvalidValueError for native kernels that they do not have and that are asked for.
    """
    fault = recurrence_fault(recurrent)
    if fault is None or kernels == "triton":
        return kernels
    if kernels == "native":
        raise InvalidValueError("kernels", kernels, f"auto or torch: {fault} have no native kernel")
    return "torch"


def as_kept(recurrent: Recurrent, *, is_triton: bool) -> Recurrent:
    """Return recurrent layers whose guesses are those that kernels keep: Triton's keep inputs."""
    kind = recurrent.kind
    if is_triton and isinstance(kind, SelectiveScan):
        return replace(recurrent, kind=replace(kind, keeps_hidden=False))
    return recurrent
