"""How a family's layers differ from each other: attention windows and rotary embeddings by layer.

Each function reads a `config.json` in which missing keys have the defaults of the architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specdec.config.json_values import count, positive, unsupported
from specdec.models.config.rope import Rope, read_rope

Windows = tuple[int | None, ...]
"""Number of tokens visible to a query in each layer, itself included; None: all."""

LayerRopes = tuple[Rope | None, ...]
"""The rotary embedding of each layer; None: positions do not enter its attention."""

WindowRule = Callable[[Mapping[str, Any], int], Windows]
"""Returns the window of each layer; arguments: config.json, number of layers."""

RopeRule = Callable[[Mapping[str, Any], Windows], LayerRopes]
"""Returns the rotary embedding of each layer; arguments: config.json, windows."""

_FULL, _SLIDING = "full_attention", "sliding_attention"


def no_windows(raw: Mapping[str, Any], num_layers: int) -> Windows:
    """Return full attention for all layers. Raises UnsupportedModelError for other layer types."""
    types = raw.get("layer_types") or []
    if _SLIDING in types:
        raise unsupported("layer_types", types, f"without {_SLIDING} in this architecture")
    return (None,) * num_layers


def one_window(raw: Mapping[str, Any], num_layers: int) -> Windows:
    """Return `sliding_window` for all layers; null for none."""
    if raw.get("layer_types") is not None:
        raise unsupported("layer_types", raw["layer_types"], "left out of this architecture")
    window = None if raw["sliding_window"] is None else count(raw, "sliding_window")
    return (window,) * num_layers


def window_if_used(raw: Mapping[str, Any], num_layers: int) -> Windows:
    """Return `sliding_window` for all layers with `use_sliding_window`, else full attention."""
    is_used = bool(raw.get("use_sliding_window"))
    return one_window(raw, num_layers) if is_used else no_windows(raw, num_layers)


def last_layers_windows(raw: Mapping[str, Any], num_layers: int) -> Windows:
    """Return windows by `layer_types`, else from layer `max_window_layers` on.

    There are none without `use_sliding_window`.
    """
    is_used = bool(raw.get("use_sliding_window")) and raw["sliding_window"] is not None
    if raw.get("layer_types") is None:
        first = raw["max_window_layers"] if is_used else num_layers
        has_window = [index >= first for index in range(num_layers)]
    else:
        has_window = _layer_types(raw, num_layers, may_slide=is_used)
    return _windows(raw, has_window)


def periodic_windows(period: int, key: str | None = None) -> WindowRule:
    """Return windows by `layer_types`, else on all layers but each last one of a period.

    key: of config.json, with another period than `period` layers.
    """

    def windows(raw: Mapping[str, Any], num_layers: int) -> Windows:
        if raw.get("layer_types") is not None:
            return _windows(raw, _layer_types(raw, num_layers, may_slide=True))
        every = period if key is None else count(raw, key, period)
        return _windows(raw, [(index + 1) % every != 0 for index in range(num_layers)])

    return windows


def periodic_windows_if_any(period: int, key: str) -> WindowRule:
    """Return the windows of `periodic_windows`; none where `sliding_window` is null (EXAONE 4)."""
    periodic = periodic_windows(period, key)

    def windows(raw: Mapping[str, Any], num_layers: int) -> Windows:
        if raw["sliding_window"] is not None:
            return periodic(raw, num_layers)
        if raw.get("layer_types") is not None:
            _layer_types(raw, num_layers, may_slide=False)
        return no_windows(raw, num_layers)

    return windows


def windows_without_rope(raw: Mapping[str, Any], num_layers: int) -> Windows:
    """Return windows by `layer_types`, else on the layers without rotary embedding (SmolLM3)."""
    is_used = bool(raw.get("use_sliding_window")) and raw["sliding_window"] is not None
    if raw.get("layer_types") is not None:
        return _windows(raw, _layer_types(raw, num_layers, may_slide=is_used))
    return _windows(raw, [is_used and not has for has in layers_with_rope(raw, num_layers)])


def one_rope(
    raw: Mapping[str, Any], windows: Windows, *, may_be_partial: bool = False
) -> LayerRopes:
    """Return the same rotary embedding for all layers. may_be_partial: see `read_rope`."""
    return (read_rope(raw, may_be_partial=may_be_partial),) * len(windows)


def no_ropes(raw: Mapping[str, Any], windows: Windows) -> LayerRopes:
    """Return no rotary embedding for any layer."""
    del raw
    return (None,) * len(windows)


def rope_on_some_layers(raw: Mapping[str, Any], windows: Windows) -> LayerRopes:
    """Return rotary embeddings on the layers of `no_rope_layers` that have a 1 (SmolLM3)."""
    rope = read_rope(raw)
    return tuple(rope if has else None for has in layers_with_rope(raw, len(windows)))


def rope_on_windows(raw: Mapping[str, Any], windows: Windows) -> LayerRopes:
    """Return rotary embeddings on the layers with a window only (Cohere 2)."""
    rope = read_rope(raw)
    return tuple(None if window is None else rope for window in windows)


def rope_on_windows_if_any(raw: Mapping[str, Any], windows: Windows) -> LayerRopes:
    """Return the ropes of `rope_on_windows`; all layers where `sliding_window` is null."""
    rule = one_rope if raw["sliding_window"] is None else rope_on_windows
    return rule(raw, windows)


def rope_by_type(local_theta_key: str) -> RopeRule:
    """Return one rotary embedding for full attention, and one for windows (Gemma 3, OLMo 3).

    Newer files nest `rope_parameters` by the layers' type. In older ones `rope_theta` and
    `rope_scaling` are those of full attention; local_theta_key: key of theta with a window.
    """

    def ropes(raw: Mapping[str, Any], windows: Windows) -> LayerRopes:
        nested = raw.get("rope_parameters")
        if isinstance(nested, dict) and {_FULL, _SLIDING} & nested.keys():
            kinds = {kind: dict(nested.get(kind) or {}) for kind in (_FULL, _SLIDING)}
        else:
            kinds = {_FULL: dict(raw.get("rope_scaling") or nested or {}), _SLIDING: {}}
        kinds[_FULL].setdefault("rope_theta", positive(raw, "rope_theta"))
        kinds[_SLIDING].setdefault("rope_theta", positive(raw, local_theta_key))
        positions = {"max_position_embeddings": raw["max_position_embeddings"]}
        full, local = (
            read_rope({**positions, "rope_parameters": kinds[kind]}) for kind in (_FULL, _SLIDING)
        )
        return tuple(full if window is None else local for window in windows)

    return ropes


def layers_with_rope(raw: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Return which layers have rotary embeddings, by `no_rope_layers` or its interval."""
    given = raw.get("no_rope_layers")
    if given is None:
        period = count(raw, "no_rope_layer_interval")
        return [(index + 1) % period != 0 for index in range(num_layers)]
    if not isinstance(given, list) or len(given) < num_layers or not {0, 1}.issuperset(given):
        raise unsupported("no_rope_layers", given, f"a list of {num_layers} numbers, 0 or 1")
    return [bool(has) for has in given[:num_layers]]


def _layer_types(raw: Mapping[str, Any], num_layers: int, *, may_slide: bool) -> list[bool]:
    """Return which of `layer_types` have a window."""
    types = raw["layer_types"]
    allowed = {_FULL, _SLIDING} if may_slide else {_FULL}
    if not isinstance(types, list) or len(types) != num_layers or not allowed.issuperset(types):
        limit = f"{num_layers} times {' or '.join(sorted(allowed))}"
        raise unsupported("layer_types", types, limit)
    return [each == _SLIDING for each in types]


def _windows(raw: Mapping[str, Any], has_window: Sequence[bool]) -> Windows:
    return tuple(count(raw, "sliding_window") if has else None for has in has_window)


def main_rope(ropes: LayerRopes, windows: Windows) -> Rope | None:
    """Return the rotary embedding of layers with full attention, else that of others."""
    by_window = zip(ropes, windows, strict=True)
    found: list[Rope] = [rope for rope, window in by_window if rope is not None and window is None]
    found += [rope for rope in ropes if rope is not None]
    return found[0] if found else None
