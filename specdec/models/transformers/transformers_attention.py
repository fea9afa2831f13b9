"""Paged attention for the models of transformers, registered as an attention function there.

A layer of transformers passes queries, keys and values to the function that its configuration
names. Here that function calls the `AttentionCall` of the model that the layer belongs to: when a
model is loaded an `AttentionRecord`, which notes how each layer attends, and then, for each forward
pass, a `PagedPass`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from specdec.kernels import AttentionPlan, PagedAttention
from specdec.types.errors import UnsupportedModelError

PAGED = "specdec_paged"
PROBE = "specdec_probe"
"""Names of the attention function; with the second one, layers get windows in place of masks."""

_WITHOUT_EFFECT = frozenset(
    {
        # Dropout is that of training; the mask that was built has the window.
        *("dropout", "sliding_window", "is_causal", "position_ids", "use_cache", "cache_position"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
        *("position_embeddings", "layer_type", "logits_to_keep", "past_key_values", "layer_idx"),
        *("training", "token_type_ids"),
    }
)
_CALLS = "specdec_calls"
_SINKS = "s_aux"
_FULL, _OTHER = 0, -1
_LONGEST_MASK = 2**20


class AttentionCall(Protocol):
    """Function that the layers of a model call as their attention."""

    def attend(
        self,
        index: int,
        query: Tensor,  # [1, num_heads, T, key_dim]
        key: Tensor,  # [1, num_kv_heads, T, key_dim]
        value: Tensor,  # [1, num_kv_heads, T, value_dim]
        mask: Tensor | None,
        arguments: Mapping[str, Any],
    ) -> Tensor:
        """Return [1, T, num_heads, value_dim], of layer `index`; arguments: further ones."""
        ...


class AttentionCalls:
    """The attention of all layers of one model; `using` sets it for a call of the model."""

    def __init__(self, model: nn.Module) -> None:
        """Give each layer of `model` access to it."""
        self.current: AttentionCall | None = None
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, _CALLS, self)

    @contextmanager
    def using(self, call: AttentionCall) -> Iterator[None]:
        """Let the layers attend by `call`."""
        self.current = call
        try:
            yield
        finally:
            self.current = None


@dataclass(frozen=True)
class LayerAttention:
    """Shapes and options of the attention of one layer.

    scale, softcap: as in PagedAttention. window: visible tokens, the query's included; None: all.
    has_sinks: whether each call has scores of sinks, as in `PagedAttention.run`.
    """

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    softcap: float | None
    window: int | None
    has_sinks: bool


@dataclass
class AttentionRecord:
    """Attention of the layers of a model, by their index, as a pass has called it."""

    layers: dict[int, LayerAttention] = field(default_factory=dict)

    def attend(
        self,
        index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        arguments: Mapping[str, Any],
    ) -> Tensor:
        """Record a layer, and return zeros in place of its attention; see AttentionCall.

        Raises UnsupportedModelError for a layer that attends in another way than the cache allows.
        """
        if index in self.layers:
            raise UnsupportedModelError(f"layer {index} of the model attends twice in a pass")
        given = dict(arguments)
        scale, softcap = given.pop("scaling", None), given.pop("softcap", None)
        sinks = given.pop(_SINKS, None)
        for name, argument in given.items():
            if name not in _WITHOUT_EFFECT and argument is not None:
                raise UnsupportedModelError(f"layer {index} of the model has attention with {name}")
        key_dim, value_dim = key.shape[-1], value.shape[-1]
        self.layers[index] = LayerAttention(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_dim=key_dim,
            value_dim=value_dim,
            scale=key_dim**-0.5 if scale is None else float(scale),
            softcap=softcap,
            window=given.get("sliding_window") if mask is None else _window(mask),
            has_sinks=sinks is not None,
        )
        return query.new_zeros(1, query.shape[2], query.shape[1], value_dim)


@dataclass(frozen=True)
class PagedPass:
    """One forward pass: the attention, KV cache and plan of each layer.

    kv_cache: [num_layers, num_slots, 2, num_kv_heads, key_dim].
    """

    layers: Sequence[LayerAttention]
    attentions: Sequence[PagedAttention]
    kv_cache: Tensor
    plans: Mapping[int | None, AttentionPlan]  # by window

    def attend(
        self,
        index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        arguments: Mapping[str, Any],
    ) -> Tensor:
        """Write the keys and values of the pass, and attend; see AttentionCall."""
        del mask
        layer = self.layers[index]
        padding = layer.key_dim - layer.value_dim
        value = F.pad(value, (0, padding)) if padding else value
        attended = self.attentions[index].run(
            query[0].transpose(0, 1),
            torch.cat((key, value)).permute(2, 0, 1, 3),
            self.kv_cache[index],
            self.plans[layer.window],
            arguments.get(_SINKS),
        )
        return attended[None, ..., : layer.value_dim]


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Return the attention of a layer, and no attention weights; shapes as in AttentionCall."""
    calls, index = getattr(module, _CALLS, None), getattr(module, "layer_idx", None)
    if not isinstance(calls, AttentionCalls) or not isinstance(index, int):
        raise UnsupportedModelError(f"{type(module).__name__} of transformers has no layer_idx")
    assert calls.current is not None, "a call of the model without attention"
    return calls.current.attend(index, query, key, value, attention_mask, arguments), None


def _window_as_mask(
    mask_function: Callable[[Any, Any, Tensor, Tensor], Tensor], config: Any, **_: Any
) -> Tensor:
    """Return, in place of a mask, its code: [1, 1, 1, 1] int64.

    That is its window, _FULL for a causal mask without one, or _OTHER; models also make masks that
    no layer uses.
    mask_function: from batch row, head, query and keys to which keys the query sees.
    """
    length = min(getattr(config, "max_position_embeddings", None) or _LONGEST_MASK, _LONGEST_MASK)
    keys, first = torch.arange(length), torch.tensor(0)

    def num_visible(query: int) -> int:
        visible = mask_function(first, first, torch.tensor(query), keys).expand(length)
        count = int(visible.sum())
        is_window = 0 < count <= query + 1 and bool(visible[query + 1 - count : query + 1].all())
        return count if is_window else _OTHER

    window = num_visible(length - 1)
    queries = {length // divisor - 1 for divisor in range(2, 9) if length >= divisor}
    if any(num_visible(query) != min(window, query + 1) for query in queries):
        window = _OTHER
    return torch.full((1, 1, 1, 1), _FULL if window == length else window)


def _window(mask: Tensor) -> int | None:
    """Return the window in what `_window_as_mask` returned."""
    if mask.dtype != torch.int64 or mask.numel() != 1:
        raise UnsupportedModelError("the model makes its own attention mask")
    code = int(mask)
    if code == _OTHER:
        raise UnsupportedModelError(
            "a layer of the model has a mask that is neither causal nor a sliding window"
        )
    return None if code == _FULL else code


AttentionInterface.register(PAGED, _attend)
AttentionInterface.register(PROBE, _attend)
AttentionMaskInterface.register(PROBE, _window_as_mask)
