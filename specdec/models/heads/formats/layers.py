"""The decoder layers of a head: their sizes from config.json, and the shapes of their tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specdec.models.config.decoder_tensors import layer_tensors
from specdec.models.config.families.text_models import without_image_positions
from specdec.models.config.model_config import ModelConfig
from specdec.models.config.rope import Rope, read_rope, rotary_fraction
from specdec.models.config.traits import LLAMA
from specdec.models.heads.formats.source import MAX_MODULES, Fields, Shape, TensorNames
from specdec.types.errors import UnsupportedModelError
from specdec.types.sampling.sampling_params import SamplingDefaults

_WINDOW_TYPES = {"full_attention": False, "sliding_attention": True}


def read_layers(
    fields: Fields, names: TensorNames, target: ModelConfig, num_layers: int | None = None
) -> ModelConfig:
    """Read a head's layers, as those of a decoder.

    The tensors decide about the number of layers, inner size, biases and norms. num_layers: with
    full attention, where config.json describes the layers of another model, such as the target.
    """
    hidden_size = fields.count("hidden_size", target.hidden_size)
    num_heads = fields.count("num_attention_heads")
    windows = (None,) * num_layers if num_layers else _read_windows(fields, names)
    attention, rotary = "layers.0.self_attn", _rope_fields(fields, target, bool(num_layers))
    try:
        return ModelConfig(
            architecture=fields.text("model_type", "llama"),
            vocab_size=target.vocab_size,
            hidden_size=hidden_size,
            intermediate_size=_inner_size(fields, names),
            num_layers=len(windows),
            num_heads=num_heads,
            num_kv_heads=fields.count("num_key_value_heads", num_heads),
            head_dim=fields.count("head_dim", hidden_size // num_heads),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=read_rope(rotary, may_be_partial=True),
            # Separate heads are trained on whole heads, whatever factor of the target they repeat.
            rotary_fraction=rotary_fraction(rotary) if num_layers else 1.0,
            traits=replace(LLAMA, is_rope_interleaved=not _rotates_halves(fields)),
            max_position_embeddings=target.max_position_embeddings,
            tie_word_embeddings=False,
            eos_token_ids=frozenset(),
            sampling_defaults=SamplingDefaults(),
            has_qkv_bias=f"{attention}.q_proj.bias" in names,
            has_output_bias=f"{attention}.o_proj.bias" in names,
            has_mlp_bias="layers.0.mlp.gate_proj.bias" in names,
            has_qk_norm=f"{attention}.q_norm.weight" in names,
            sliding_windows=windows,
            checkpoint_dtype="float32",
        )
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{names.directory}: {error}") from error


def layer_of_target(target: ModelConfig, *, has_experts: bool) -> ModelConfig:
    """Return one layer with full attention that is like those of the target.

    has_experts: whether its MLP is a mixture like the target's. It attends to all tokens.
    """
    experts, latent = target.experts if has_experts else None, target.latent
    return replace(
        target,
        latent=None if latent is None else replace(latent, indexer=None),
        recurrent=None,
        num_layers=1,
        sliding_windows=(None,),
        layer_ropes=(),
        experts=None if experts is None else replace(experts, layers=frozenset({0})),
    )


def layer_shapes(
    decoder: ModelConfig, index: int, input_size: int | None = None, *, has_input_norm: bool = True
) -> dict[str, Shape]:
    """Return the shapes of a layer's tensors. input_size: of attention, if not `hidden_size`."""
    shapes = layer_tensors(decoder, index, input_size)
    if not has_input_norm:
        del shapes["input_layernorm.weight"]
    return {f"layers.{index}.{name}": shape for name, shape in shapes.items()}


def with_embedding_scale(decoder: ModelConfig, target: ModelConfig) -> ModelConfig:
    """Return layers that read a Gemma's embeddings as its own do: multiplied by a factor.

    transformers' table of Gemma, on which z-lab trains, includes the factor; those of other
    families do not. SpecForge trains without the factor, as speculators does, but its files look
    like those of z-lab.
    """
    if not target.traits.rounds_embedding_scale:
        return decoder
    scale = target.traits.embedding_scale
    traits = replace(decoder.traits, embedding_scale=scale, rounds_embedding_scale=True)
    return replace(decoder, traits=traits)


def with_window(decoder: ModelConfig, window: int) -> ModelConfig:
    """Return the same layers with this attention window on each."""
    return replace(decoder, sliding_windows=(window,) * decoder.num_layers)


def describe_windows(decoder: ModelConfig) -> str:
    """Return the attention windows in words."""
    windows = set(decoder.sliding_windows)
    if windows == {None}:
        return "full attention"
    if len(windows) == 1:
        return f"window {windows.pop()}"
    return f"windows {', '.join(str(each or 'none') for each in decoder.sliding_windows)}"


def theta_note(fields: Fields, target: ModelConfig) -> tuple[str, ...]:
    """Return a note if the file has no rope_theta and the target's differs from the default."""
    given = any(name in fields for name in ("rope_theta", "rope_parameters"))
    if given or target.rope.theta == _read_rope(fields, target).theta:
        return ()
    return (
        f"config.json has no rope_theta: {_read_rope(fields, target).theta:g} is assumed; if the "
        f'acceptance is low, add the target\'s "rope_theta": {target.rope.theta:g} to it',
    )


def _read_rope(fields: Fields, target: ModelConfig) -> Rope:
    return read_rope(_rope_fields(fields, target), may_be_partial=True)


def _rope_fields(fields: Fields, target: ModelConfig, is_of_target: bool = False) -> dict[str, Any]:
    """Return the keys with the rotary embedding of all layers.

    Parameters by type of layer are those of a target, whose own layers here have full attention.
    Of a separate head they are the sliding ones, as speculators takes them.
    """
    longest = fields.count("max_position_embeddings", target.max_position_embeddings)
    raw = {**fields.raw, "max_position_embeddings": longest}
    given, kind = raw.get("rope_parameters"), "full" if is_of_target else "sliding"
    if isinstance(given, dict) and isinstance(given.get(f"{kind}_attention"), dict):
        raw["rope_parameters"] = given[f"{kind}_attention"]
    return dict(without_image_positions(raw))


def _rotates_halves(fields: Fields) -> bool:
    """Return whether rotary pairs are in the halves of a head, by either key of DFlash files."""
    default = fields.flag("is_neox_style", default=True)
    return fields.flag("rope_is_neox_style", default=default)


def layers_note(fields: Fields, decoder: ModelConfig) -> tuple[str, ...]:
    """Return a note if config.json has another number of layers, or another inner size."""
    found = {
        "num_hidden_layers": decoder.num_layers,
        "intermediate_size": decoder.intermediate_size,
    }
    return tuple(
        f"config.json has {name} {fields.raw[name]}, and the tensors {size}, which is used"
        for name, size in found.items()
        if name in fields and fields.raw[name] != size
    )


def _inner_size(fields: Fields, names: TensorNames) -> int:
    """Return the hidden units of an MLP, whose activation must be silu."""
    if fields.raw.get("hidden_act", "silu") != "silu":
        raise fields.error("hidden_act", "silu")
    gate, up = (names.shapes.get(f"layers.0.mlp.{each}_proj.weight") for each in ("gate", "up"))
    if gate is not None and gate == up and gate[0] > 0:
        return gate[0]
    return fields.count("intermediate_size")


def _read_windows(fields: Fields, names: TensorNames) -> tuple[int | None, ...]:
    """Return the window of each layer: by `layer_types`, else by `use_sliding_window`.

    None for each, where config.json describes another number of layers than the tensors are.
    """
    num_layers = fields.count("num_hidden_layers", 1, most=MAX_MODULES)
    num_stored = names.count("layers")
    if num_stored not in (0, num_layers) and num_stored <= MAX_MODULES:
        return (None,) * num_stored
    types = fields.raw.get("layer_types")
    if types is None:
        is_used = fields.flag("use_sliding_window", default=False)
        return ((fields.count("sliding_window") if is_used else None),) * num_layers
    is_list = isinstance(types, list) and len(types) == num_layers
    if not is_list or not all(isinstance(each, str) and each in _WINDOW_TYPES for each in types):
        raise fields.error("layer_types", f"{num_layers} times {' or '.join(_WINDOW_TYPES)}")
    return tuple(fields.count("sliding_window") if _WINDOW_TYPES[each] else None for each in types)
