"""Types of keys of config.json that no reader of a number or a list checks itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from specdec.config.json_values import MAX_COUNT, unsupported, whole


class _Type(NamedTuple):
    """Types and bound of a value. least: of a whole number; None for any value of `kinds`."""

    kinds: tuple[type, ...]
    limit: str
    least: int | None = None
    is_nullable: bool = True

    def fits(self, value: Any) -> bool:
        """Return whether a value has the type."""
        if value is None:
            return self.is_nullable
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if is_number and self.least is not None and not self.least <= value <= MAX_COUNT:
            return False
        return type(value) in self.kinds


def _whole(least: int, *, is_nullable: bool = False) -> _Type:
    limit = f"a whole number from {least} to {MAX_COUNT}"
    return _Type((int,), f"{limit}, or null" if is_nullable else limit, least, is_nullable)


_FLAG = _Type((bool, int), "true or false", 0)
_LIST = _Type((list, tuple), "a list, or null")
_OBJECT = _Type((dict,), "an object, or null")

_NAMES: Mapping[_Type, str] = {
    _FLAG: """
        attention_bias attention_k_eq_v attention_out_bias attn_temperature_tuning
        block_auto_adjust_ff_dim conv_bias enable_moe_block linear_allow_neg_eigval mamba_conv_bias
        mamba_norm_before_gate mamba_proj_bias mamba_rms_norm mlp_bias moe_renormalize mup_enabled
        norm_topk_prob projectors_bias qk_layernorm qkv_bias rope_interleave tie_embedding
        tie_word_embeddings use_bias use_cla use_conv_bias use_double_wide_mlp use_expert_bias
        use_parallel_residual use_qk_norm use_qkv_bias use_sliding_window
    """,
    _LIST: """
        attn_layer_indices full_attn_idxs is_moe_layer layer_types mlp_layer_types mlp_only_layers
        moe_layers no_rope_layers
    """,
    _OBJECT: "linear_attn_config per_layer_config quantization_config rope_parameters rope_scaling",
    _whole(0): """
        first_k_dense_replace first_last_k_dense_replace max_window_layers moe_num_shared_experts
        moe_layer_start_index num_dense_layers
    """,
    _whole(0, is_nullable=True): "hidden_size_per_layer_input num_local_experts",
    _whole(1): """
        max_position_embeddings model_max_length moe_layer_interval num_expert_group num_experts
        num_experts_per_token num_shared_experts
    """,
    _whole(1, is_nullable=True): """
        head_dim mamba_d_ssm moe_intermediate_size shared_intermediate_size sliding_window
    """,
    _whole(-1): "moe_layer_end_index",
}
_TYPES = MappingProxyType({name: kind for kind, names in _NAMES.items() for name in names.split()})


class TypedKeys(Mapping[str, Any]):
    """The keys of a config.json, whose types are checked when they are read."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def __getitem__(self, key: str) -> Any:
        """Return a value. Raises UnsupportedModelError, with the key, for one of another type."""
        value, kind = self._fields[key], _TYPES.get(key)
        if kind is not None and kind.kinds == (int,):
            value = whole(value)
        if kind is not None and not kind.fits(value):
            raise unsupported(key, value, kind.limit)
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)
