"""Block drafters: DFlash (z-lab), and DSpark and the DFlash of DeepSpec.

Both read several layers of the target as a context and predict a block of masked tokens at once.
They differ in what a slot predicts: in DFlash each mask predicts its own token; in DSpark each
slot, that of the last known token (the anchor) included, predicts the token after it. DeepSpec's
files named DFlash are DSpark with `markov_rank` 0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from specdec.models.config.model_config import ModelConfig
from specdec.models.heads.formats import speculators
from specdec.models.heads.formats.layers import (
    describe_windows,
    layer_shapes,
    layers_note,
    read_layers,
    theta_note,
    with_embedding_scale,
)
from specdec.models.heads.formats.shape import HeadFormat, MappedShape, Reading
from specdec.models.heads.formats.source import Fields, HeadSource, Shape, TensorNames
from specdec.models.heads.formats.taps import Taps, default_note, input_of, output_of
from specdec.types.errors import UnsupportedModelError

MarkovKind = Literal["vanilla", "gated", "rnn"]

_MAX_BLOCK_SIZE = 64

_PREFIX = re.compile(r"^(?:model\.|logit_head\.)")  # the latter in older files of SpecForge
_UNUSED = re.compile(r".*rotary_emb\.inv_freq|t2d|d2t|confidence_head\..*")
_SLIDING = "sliding_attention"
_UNSUPPORTED = {
    "selector_rank": "DFlash 2",
    "attention_conv": "DFlash 2",
    "mlp_conv": "DFlash 2",
    "gru_hidden_dim": "Domino",
    "prefix_gru": "Domino",
    "kv_a_proj_with_mqa": "multi-head latent attention",
    "attention_sink_bias": "an attention sink",
    "attention_value_scale": "a scale of values",
}
"""Kinds of block drafters that are not supported, by a key or a part of the name of a tensor."""


@dataclass(frozen=True)
class DFlashShape(MappedShape):
    """Sizes and switches of a block drafter.

    layers_read: inputs of the projection of the context. block_size: slots of a block, the anchor
    included. predicts_from_anchor: as in DSpark. causal_layers: layers in which a slot of the block
    sees no later one. markov_rank: of the correction by the token before; 0 without it.
    markov_has_bias: of its projection.
    """

    layers_read: Taps
    block_size: int
    mask_token_id: int
    predicts_from_anchor: bool
    causal_layers: frozenset[int]
    markov_rank: int = 0
    markov_kind: MarkovKind = "vanilla"
    markov_has_bias: bool = False

    @property
    def taps(self) -> tuple[int, ...]:
        return self.layers_read.ascending

    @property
    def max_draft_tokens(self) -> int:
        return self.block_size if self.predicts_from_anchor else self.block_size - 1

    @property
    def _output_names(self) -> tuple[str, ...]:
        return ("lm_head.weight", *("markov_head.markov_w2.weight",) * bool(self.markov_rank))

    def block_len(self, num_draft_tokens: int) -> int:
        """See HeadShape; a token of the block may see all others."""
        return self.block_size

    def tensors(self) -> dict[str, Shape]:
        """See HeadShape."""
        hidden = self.decoder.hidden_size
        shapes: dict[str, Shape] = {
            "fc.weight": (hidden, len(self.layers_read.layer_ids) * hidden),
            "hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
        }
        for index in range(self.decoder.num_layers):
            shapes |= layer_shapes(self.decoder, index)
        return shapes | self.vocabulary_tensors() | self._markov_tensors()

    def markov_projection(self) -> tuple[int, int] | None:
        """Return the shape of the gated or recurrent correction's projection."""
        hidden, rank = self.decoder.hidden_size, self.markov_rank
        match self.markov_kind:
            case "vanilla":
                return None
            case "gated":
                return rank, hidden + rank
            case "rnn":
                return 3 * rank, 2 * rank + hidden

    def _markov_tensors(self) -> dict[str, Shape]:
        if not self.markov_rank:
            return {}
        shapes: dict[str, Shape] = {
            "markov_head.markov_w1.weight": (self.decoder.vocab_size, self.markov_rank),
            "markov_head.markov_w2.weight": (self.draft_vocab_size, self.markov_rank),
        }
        projection = self.markov_projection()
        if projection is not None:
            name = "gate_proj" if self.markov_kind == "gated" else "joint_proj"
            shapes[f"markov_head.{name}.weight"] = projection
            if self.markov_has_bias:
                shapes[f"markov_head.{name}.bias"] = projection[:1]
        return shapes

    def summary(self) -> str:
        """See HeadShape."""
        source = (
            "each slot predicts the next token"
            if self.predicts_from_anchor
            else ("each mask predicts its own token")
        )
        parts = [self.layers_read.describe(), f"layers: {self.decoder.num_layers}"]
        parts += [describe_windows(self.decoder), f"blocks of {self.block_size}", source]
        if self.causal_layers:
            is_all = len(self.causal_layers) == self.decoder.num_layers
            some = f" in layers {', '.join(map(str, sorted(self.causal_layers)))}"
            parts.append(f"causal blocks{'' if is_all else some}")
        if self.markov_rank:
            parts.append(f"{self.markov_kind} Markov head of rank {self.markov_rank}")
        parts.append(f"{self.draft_vocab_size} draft tokens")
        return ", ".join(parts)


def read_dflash(source: HeadSource, target: ModelConfig) -> Reading:
    """Read a block drafter of z-lab, DeepSpec or speculators."""
    fields, keys = source.fields, _all_keys(source.fields)
    names = source.renamed(lambda name: _PREFIX.sub("", name, count=1))
    _require_supported(source, keys)
    layers = _with_usual_window(speculators.layer_fields(fields), keys)
    layers.require_equal("hidden_size", target.hidden_size, "the target")
    layers.require_equal("vocab_size", target.vocab_size, "the target")
    is_own = "lm_head.weight" in names
    draft_vocab_size = names.shape("lm_head.weight", 2)[0] if is_own else target.vocab_size
    is_dspark = _predicts_from_anchor(fields)
    decoder = _read_decoder(fields, layers, names, target)
    rank = keys.count("markov_rank", 0, least=0)
    shape = DFlashShape(
        decoder=decoder,
        draft_vocab_size=draft_vocab_size,
        layers_read=_layers_read(fields, keys, names, target),
        block_size=keys.count("block_size", least=1 if is_dspark else 2, most=_MAX_BLOCK_SIZE),
        mask_token_id=keys.count("mask_token_id", least=0, most=target.vocab_size - 1),
        predicts_from_anchor=is_dspark,
        causal_layers=_causal_layers(keys, layers, decoder),
        has_embedding="embed_tokens.weight" in names,
        has_lm_head=is_own,
        has_draft_ids="d2t" in names and draft_vocab_size < target.vocab_size,
        markov_rank=rank,
        markov_kind=_markov_kind(keys) if rank else "vanilla",
        markov_has_bias=any(f"markov_head.{name}_proj.bias" in names for name in ("gate", "joint")),
    )
    shape.require_map(source)
    is_given = _given_layers(fields, keys, target) is not None
    notes = (*theta_note(layers, target), *layers_note(layers, decoder))
    return Reading(
        _format(fields, shape),
        shape,
        names,
        speculators.target_name(fields),
        speculators.num_draft_tokens(fields),
        (*notes, *default_note(shape.layers_read, is_given=is_given)),
        lambda name: bool(_UNUSED.fullmatch(name)),
    )


def _read_decoder(
    fields: Fields, layers: Fields, names: TensorNames, target: ModelConfig
) -> ModelConfig:
    """Read the layers. The library speculators trains on the target's table without its factor."""
    decoder = read_layers(layers, names, target)
    is_scaled = "embed_tokens.weight" not in names and not speculators.is_speculators(fields)
    return with_embedding_scale(decoder, target) if is_scaled else decoder


def _is_block_drafter(source: HeadSource) -> bool:
    """Return whether a file that speculators did not write is a block drafter."""
    fields = source.fields
    architecture = str(fields.raw.get("architectures"))
    has_key = "dflash_config" in fields or "markov_rank" in fields
    is_known = has_key or "DFlash" in architecture or "DSpark" in architecture
    return is_known and not source.is_pard


def _require_supported(source: HeadSource, keys: Fields) -> None:
    speculators.require_whole_heads(source.fields)
    parts = {part for stored in source.shapes for part in stored.split(".")}
    for name, kind in _UNSUPPORTED.items():
        if keys.raw.get(name) or name in parts:
            raise UnsupportedModelError(f"{source.directory}: {kind} ({name}) is not supported")


def _all_keys(fields: Fields) -> Fields:
    """Return the keys of a head and, before them, those of its `dflash_config`."""
    return Fields({**fields.raw, **fields.nested("dflash_config").raw}, fields.path)


def _predicts_from_anchor(fields: Fields) -> bool:
    """Return whether the slot of the anchor predicts.

    A key decides in files of speculators, which default to false. Otherwise DeepSpec's
    architectures, and those with a Markov head, predict from the anchor, and z-lab's do not.
    """
    keys = _all_keys(fields)
    if speculators.is_speculators(keys):
        return keys.flag("sample_from_anchor", default=False)
    architecture = str(keys.raw.get("architectures"))
    is_deepspec = "DSpark" in architecture or "markov_rank" in keys
    return keys.flag("sample_from_anchor", default=is_deepspec)


def _with_usual_window(layers: Fields, keys: Fields) -> Fields:
    """Return the fields of the layers, with z-lab's window (`use_swa`) under transformers' keys.

    All layers have it, unless `layer_types` gives some a window. `sliding_window` wins where both
    are given.
    """
    if not keys.flag("use_swa", default=False):
        return layers
    window = layers.raw.get("sliding_window") or keys.count("swa_window_size")
    changes = {"use_sliding_window": True, "sliding_window": window}
    types = layers.raw.get("layer_types")
    if isinstance(types, list) and _SLIDING not in types:
        changes["layer_types"] = None
    return Fields({**layers.raw, **changes}, layers.path)


def _causal_layers(keys: Fields, layers: Fields, decoder: ModelConfig) -> frozenset[int]:
    """Return the layers with causal blocks: all or none by `is_causal` or `causal`.

    Without these keys those that `layer_types` gives a window, for which vLLM, SGLang and SpecForge
    have causal blocks; in speculators' files only if `sliding_window_non_causal` is false.
    """
    for name in ("is_causal", "causal"):
        if name in keys:
            is_causal = keys.flag(name, default=False)
            return frozenset(range(decoder.num_layers) if is_causal else ())
    if speculators.is_speculators(keys) and keys.flag("sliding_window_non_causal", default=True):
        return frozenset()
    if "layer_types" not in layers:
        return frozenset()
    return frozenset(i for i, size in enumerate(decoder.sliding_windows) if size)


def _layers_read(fields: Fields, keys: Fields, names: TensorNames, target: ModelConfig) -> Taps:
    _, width = names.shape("fc.weight", 2)
    count = width // target.hidden_size
    return _given_layers(fields, keys, target) or evenly_spaced(count, target)


def _given_layers(fields: Fields, keys: Fields, target: ModelConfig) -> Taps | None:
    """Return the layers that the file names."""
    if "aux_hidden_state_layer_ids" in fields:
        return input_of(fields, "aux_hidden_state_layer_ids", target)
    return output_of(keys, "target_layer_ids", target) if "target_layer_ids" in keys else None


def evenly_spaced(count: int, target: ModelConfig) -> Taps:
    """Return the default of z-lab: output-of ids from 1 to n - 3, evenly spaced.

    One layer is the middle one. Raises UnsupportedModelError where the target has fewer layers.
    """
    last = target.num_layers - 3
    if count == 1:
        return Taps((target.num_layers // 2 + 1,))
    if count < 1 or last - 1 < count - 1:
        raise UnsupportedModelError("config.json has no target_layer_ids")
    return Taps(tuple(round(1 + i * (last - 1) / (count - 1)) + 1 for i in range(count)))


def _markov_kind(keys: Fields) -> MarkovKind:
    match keys.text("markov_head_type", "vanilla"):
        case "vanilla":
            return "vanilla"
        case "gated":
            return "gated"
        case "rnn":
            return "rnn"
    raise keys.error("markov_head_type", "vanilla, gated or rnn")


def _format(fields: Fields, shape: DFlashShape) -> str:
    name = "DSpark" if shape.predicts_from_anchor else "DFlash"
    if speculators.is_speculators(fields):
        return speculators.described(fields, name)
    return f"{name} ({'DeepSpec' if shape.predicts_from_anchor else 'z-lab'})"


DFLASH = HeadFormat(
    read_dflash,
    _is_block_drafter,
    lambda source: not _predicts_from_anchor(source.fields),
    speculators_types=("dflash", "dspark"),
    keys=("dflash_config", "markov_rank"),
    order=5,
)
DSPARK = replace(DFLASH, is_variant=lambda source: _predicts_from_anchor(source.fields))
