"""EAGLE-3 (Li et al. 2025) in the layouts of its producers, and P-EAGLE, its parallel form.

Written by SafeAILab and SpecForge (`midlayer`), ModelOpt (`layers.0`), DeepSpec and speculators.
They differ in the numbering of the target's layers. EAGLE-3.1 adds `fc_norm` and `norm_output`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from specdec.models.config.model_config import ModelConfig
from specdec.models.heads.formats import speculators
from specdec.models.heads.formats.layers import (
    describe_windows,
    layer_shapes,
    layers_note,
    read_layers,
    theta_note,
)
from specdec.models.heads.formats.shape import HeadFormat, MappedShape, Reading
from specdec.models.heads.formats.source import Fields, HeadSource, Shape, TensorNames
from specdec.models.heads.formats.taps import Taps, default_note, default_taps, input_of, output_of
from specdec.types.errors import UnsupportedModelError

_IDS = "eagle_aux_hidden_state_layer_ids"
_LEGACY_NORMS = {"aux_norm_low": 0, "aux_norm_mid": 1, "aux_norm_high": 2}
_PARALLEL = "parallel_draft_heads."
_UNUSED = re.compile(rf".*rotary_emb\.inv_freq|t2d|d2t|{re.escape(_PARALLEL)}.*|norm\.weight")


@dataclass(frozen=True)
class Eagle3Shape(MappedShape):
    """Sizes and switches of an EAGLE-3 head.

    layers_read: inputs of the projection `fc`; None without it: the feature is the target's final
    hidden state. target_size: its width. norm_before_fc: one norm over all inputs; fc_norm: one for
    each. has_token_norm: of the embedding. norm_before_residual: the residual is the normed
    feature. has_final_norm: before the output head. recycles_norm: the feature of a drafted token
    is after that norm. mask_token_id, mask_shape: of the mask token and its hidden state in
    P-EAGLE.
    """

    target_size: int
    layers_read: Taps | None
    has_bias: bool
    norm_before_fc: bool
    fc_norm: bool
    has_token_norm: bool
    norm_before_residual: bool
    has_final_norm: bool
    recycles_norm: bool
    mask_token_id: int | None = None
    mask_shape: Shape = ()

    @property
    def taps(self) -> tuple[int, ...]:
        return self.layers_read.ascending if self.layers_read else ()

    @property
    def num_inputs(self) -> int:
        """Hidden states of a token that `fc` projects together."""
        return len(self.layers_read.layer_ids) if self.layers_read else 1

    def block_len(self, num_draft_tokens: int) -> int:
        """See HeadShape; one draft token needs no mask token, and has one."""
        return 0 if self.mask_token_id is None else max(1, num_draft_tokens - 1)

    def tensors(self) -> dict[str, Shape]:
        """See HeadShape."""
        hidden = self.decoder.hidden_size
        shapes = self._feature_tensors()
        shapes |= layer_shapes(self.decoder, 0, 2 * hidden, has_input_norm=self.has_token_norm)
        shapes["layers.0.hidden_norm.weight"] = (hidden,)
        for index in range(1, self.decoder.num_layers):
            shapes |= layer_shapes(self.decoder, index)
        if self.has_final_norm:
            shapes["norm.weight"] = (hidden,)
        return shapes | self.vocabulary_tensors()

    def _feature_tensors(self) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {}
        width = self.num_inputs * self.target_size
        if self.layers_read:
            shapes["fc.weight"] = (self.decoder.hidden_size, width)
            if self.has_bias:
                shapes["fc.bias"] = (self.decoder.hidden_size,)
        if self.norm_before_fc:
            shapes["input_norm.weight"] = (width,)
        if self.fc_norm:
            for index in range(self.num_inputs):
                shapes[f"fc_norm.{index}.weight"] = (self.target_size,)
        if self.mask_token_id is not None:
            is_flat = math.prod(self.mask_shape) == width
            shapes["mask_hidden"] = self.mask_shape if is_flat else (1, 1, width)
        return shapes

    def summary(self) -> str:
        """See HeadShape."""
        read = self.layers_read.describe() if self.layers_read else "the final hidden state"
        parts = [read, f"layers: {self.decoder.num_layers}", describe_windows(self.decoder)]
        switches = ("norm_before_fc", "fc_norm", "norm_before_residual")
        parts += [name for name in switches if getattr(self, name)]
        parts.append("final norm" if self.has_final_norm else "no final norm")
        parts += ["normalized output recycled"] * self.recycles_norm
        parts.append(f"{self.draft_vocab_size} draft tokens")
        parts.append(f"embedding {'own' if self.has_embedding else 'of the target'}")
        parts.append(f"output head {'own' if self.has_lm_head else 'of the target'}")
        return ", ".join(parts)


def read_eagle3(source: HeadSource, target: ModelConfig) -> Reading:
    """Read an EAGLE-3 head of any producer, or a P-EAGLE head."""
    fields, switches = source.fields, _switches(source.fields)
    _require_fit(source, target)
    names = _renamed(source)
    layers = speculators.layer_fields(fields)
    has_lm_head = "lm_head.weight" in names
    has_final_norm = switches.flag("use_last_layernorm", default=True)
    draft_vocab_size = names.shape("lm_head.weight", 2)[0] if has_lm_head else target.vocab_size
    fields.require_equal("draft_vocab_size", draft_vocab_size, "lm_head.weight")
    shape = Eagle3Shape(
        decoder=read_layers(layers, names, target),
        draft_vocab_size=draft_vocab_size,
        target_size=target.hidden_size,
        layers_read=_layers_read(fields, switches, names, target),
        has_bias="fc.bias" in names,
        norm_before_fc=switches.flag("norm_before_fc", default="input_norm.weight" in names),
        fc_norm=_has_fc_norm(switches, names),
        has_token_norm=switches.flag("use_input_layernorm_in_first_layer", default=True),
        norm_before_residual=switches.flag("norm_before_residual", default=False),
        has_final_norm=has_final_norm,
        recycles_norm=has_final_norm and switches.flag("norm_output", default=False),
        has_embedding="embed_tokens.weight" in names,
        has_lm_head=has_lm_head,
        has_draft_ids="d2t" in names and draft_vocab_size < target.vocab_size,
        mask_token_id=_mask_token_id(fields, names, target),
        mask_shape=names.shapes.get("mask_hidden", ()),
    )
    _require_sharing(shape, source)
    return Reading(
        _format(fields, shape, names),
        shape,
        names,
        speculators.target_name(fields),
        speculators.num_draft_tokens(fields),
        (*theta_note(layers, target), *_notes(shape, source, target)),
        lambda name: bool(_UNUSED.fullmatch(name)),
    )


def _notes(shape: Eagle3Shape, source: HeadSource, target: ModelConfig) -> tuple[str, ...]:
    """Return notes on sizes, on Medusa-like heads beside the recurrent one (ModelOpt), and taps."""
    has_parallel = any(name.startswith(_PARALLEL) for name in source.short_names)
    is_given = _given_layers(source.fields, target) is not None
    sizes = layers_note(speculators.layer_fields(source.fields), shape.decoder)
    unused = ("its parallel_draft_heads are not used",) * has_parallel
    return (*sizes, *unused, *default_note(shape.layers_read, is_given=is_given))


def _switches(fields: Fields) -> Fields:
    """Return the keys of `eagle_config` and those at the top level, which win."""
    nested = fields.nested("eagle_config").raw
    return Fields({**nested, **fields.raw}, fields.path)


def _require_fit(source: HeadSource, target: ModelConfig) -> None:
    fields = source.fields
    fields.require_equal("target_hidden_size", target.hidden_size, "the target (hidden_size)")
    layers = speculators.layer_fields(fields)
    layers.require_equal("vocab_size", target.vocab_size, "the target")
    speculators.require_whole_heads(fields)
    if any("q_a_proj" in name or "kv_a_proj" in name for name in source.shapes):
        raise UnsupportedModelError(
            f"{source.directory}: heads with multi-head latent attention (q_a_proj) are not "
            "supported"
        )


def _renamed(source: HeadSource) -> TensorNames:
    names = source.renamed(_canonical)
    if "layers.1.hidden_norm.weight" not in names:
        return names
    # Some producers apply a norm of this name in all layers; after the first it is ordinary.
    return source.renamed(
        lambda name: re.sub(
            r"layers\.([1-9]\d*)\.hidden_norm", r"layers.\1.input_layernorm", _canonical(name)
        )
    )


def _canonical(stored: str) -> str:
    name = stored.removeprefix("model.")
    name = re.sub(r"^midlayer\.", "layers.0.", name)
    stem = name.removesuffix(".weight")
    if stem in _LEGACY_NORMS:
        return f"fc_norm.{_LEGACY_NORMS[stem]}.weight"
    return name


def _has_fc_norm(switches: Fields, names: TensorNames) -> bool:
    name = "use_aux_norm" if "use_aux_norm" in switches else "fc_norm"
    return switches.flag(name, default="fc_norm.0.weight" in names)


def _layers_read(
    fields: Fields, switches: Fields, names: TensorNames, target: ModelConfig
) -> Taps | None:
    if not switches.flag("use_aux_hidden_state", default="fc.weight" in names):
        return None
    _, width = names.shape("fc.weight", 2)
    count, rest = divmod(width, target.hidden_size)
    taps = _given_layers(fields, target) or default_taps(count, target)
    if rest or taps is None:
        raise UnsupportedModelError(
            f"{names.directory}: tensor fc.weight has {width} inputs, which is not the default "
            f"layers of width {target.hidden_size} of the target; config.json has no {_IDS}"
        )
    return taps


def _given_layers(fields: Fields, target: ModelConfig) -> Taps | None:
    """Return the layers that the file names.

    The key decides about the numbering. Those of `eagle_config` are output-of ids, unless they are
    the default's input-of ids (TorchSpec), or name the output of the last layer as one.
    """
    if _IDS in fields:
        return input_of(fields, _IDS, target)
    nested = fields.nested("eagle_config")
    if _IDS in nested:
        ids = nested.counts(_IDS)
        is_entered = default_taps(len(ids), target) == Taps(ids) or target.num_layers in ids
        return (input_of if is_entered else output_of)(nested, _IDS, target)
    return output_of(fields, "target_layer_ids", target) if "target_layer_ids" in fields else None


def _mask_token_id(fields: Fields, names: TensorNames, target: ModelConfig) -> int | None:
    if "mask_hidden" not in names:
        return None
    for name in ("mask_token_id", "ptd_token_id", "pard_token"):
        if name in fields:
            return fields.count(name, least=0, most=target.vocab_size - 1)
    raise UnsupportedModelError(f"{fields.path} has no mask_token_id, which mask_hidden needs")


def _require_sharing(shape: Eagle3Shape, source: HeadSource) -> None:
    """Raise UnsupportedModelError if the target's matrices are needed and do not fit."""
    hidden, target_size = shape.decoder.hidden_size, shape.target_size
    if hidden != target_size and not (
        shape.has_embedding and shape.has_lm_head and shape.layers_read
    ):
        raise UnsupportedModelError(
            f"{source.directory}: hidden_size is {hidden} and the target's is {target_size}, so it "
            "must have the tensors embed_tokens.weight, lm_head.weight and fc.weight"
        )
    shape.require_map(source)


def _format(fields: Fields, shape: Eagle3Shape, names: TensorNames) -> str:
    name = "EAGLE-3" if shape.mask_token_id is None else "P-EAGLE"
    if speculators.is_speculators(fields):
        return speculators.described(fields, name)
    if "target_layer_ids" in fields:
        return f"{name} (DeepSpec)"
    stored = names.stored.get("layers.0.self_attn.q_proj.weight", "")
    return f"{name} ({'SafeAILab or SpecForge' if 'midlayer' in stored else 'ModelOpt'})"


def _is_eagle3(source: HeadSource) -> bool:
    names = source.short_names
    by_tensors = bool({"d2t", "mask_hidden", "layers.0.hidden_norm.weight"} & names)
    is_known = (
        "Eagle3" in source.architecture
        or by_tensors
        or any(name.startswith("midlayer.") for name in names)
    )
    return is_known and not source.is_pard


def _is_parallel(source: HeadSource) -> bool:
    return "mask_hidden" in source.short_names


EAGLE3 = HeadFormat(
    read_eagle3,
    _is_eagle3,
    lambda source: not _is_parallel(source),
    speculators_types=("eagle3", "peagle"),
    keys=("pard_token",),
    tensors=("midlayer.*", "d2t", "mask_hidden"),
    order=6,
)
P_EAGLE = replace(EAGLE3, is_variant=_is_parallel)
