"""What the registry knows of one architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from specdec.config.json_values import unsupported
from specdec.models.config.attention.latent import Latent
from specdec.models.config.attention.varied_layers import VariedLayers
from specdec.models.config.layer_patterns import (
    LayerRopes,
    RopeRule,
    WindowRule,
    Windows,
    no_windows,
    one_rope,
)
from specdec.models.config.recurrent import Recurrent
from specdec.models.config.traits import LLAMA, Activation, DecoderTraits, Experts

_NAMED_ACTIVATIONS = (Activation.SILU, Activation.GELU_TANH)
"""Those that any family may have; the others are values of `legacy_activations`."""

Feature = str | bool
"""Presence of a feature: always, never, or by a key of config.json."""


def _as_given(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return raw


@dataclass(frozen=True)
class Architecture:
    """One architecture of Hugging Face.

    model_type: by which a config.json without `architectures` is recognized.
    models: published models of the family, for the documentation.
    config_defaults: values of keys that config.json may omit, other than zero, false and null.
    norm_eps_key, activation_key: their keys in config.json. legacy_activations: values of the
        latter that mean another function than they name.
    qkv_bias, output_bias, mlp_bias: of the projections to queries, keys and values, of attention's
        output (None: as the former), and of the MLP. qk_norm: whether queries and keys are
        normalized.
    windows, ropes: by layer; without a rule of ropes all layers have the same one.
    rotary_fraction: the part of each head that is rotated; None: all.
    traits: how the layers differ; if config.json decides, a function of it with these defaults.
    experts: the mixture of experts, if there is one; called with the number of layers too. latent:
        sizes of latent attention, if it is that. recurrent: the layers without attention, if there
        are any. varied: sizes of layers that differ from each other, if they do.
    canonical: returns config.json, with these defaults, under the usual keys.
    notes: what the family has beside Llama, for the documentation.
    """

    model_type: str
    models: tuple[str, ...]
    notes: str
    config_defaults: Mapping[str, Any] = field(default_factory=dict)
    norm_eps_key: str = "rms_norm_eps"
    activation_key: str = "hidden_act"
    legacy_activations: Mapping[str, Activation] = field(default_factory=dict)
    qkv_bias: Feature = False
    output_bias: Feature | None = None
    mlp_bias: Feature = False
    qk_norm: Feature = False
    windows: WindowRule = no_windows
    ropes: RopeRule | None = None
    rotary_fraction: Callable[[Mapping[str, Any]], float] | None = None
    traits: DecoderTraits | Callable[[Mapping[str, Any]], DecoderTraits] = LLAMA
    experts: Callable[[Mapping[str, Any], int], Experts | None] | None = None
    latent: Callable[[Mapping[str, Any]], Latent] | None = None
    recurrent: Callable[[Mapping[str, Any], int], Recurrent | None] | None = None
    varied: Callable[[Mapping[str, Any], int], VariedLayers] | None = None
    canonical: Callable[[Mapping[str, Any]], Mapping[str, Any]] = _as_given

    @property
    def bias_of_output(self) -> Feature:
        """Presence of the bias of attention's output."""
        return self.qkv_bias if self.output_bias is None else self.output_bias

    def ropes_of(self, raw: Mapping[str, Any], windows: Windows) -> LayerRopes:
        """Return the rotary embedding of each layer."""
        if self.ropes is not None:
            return self.ropes(raw, windows)
        return one_rope(raw, windows, may_be_partial=self.rotary_fraction is not None)

    def traits_of(self, raw: Mapping[str, Any]) -> DecoderTraits:
        """Return the traits of a model, with its activation function."""
        found = self.traits if isinstance(self.traits, DecoderTraits) else self.traits(raw)
        return replace(found, activation=self.activation(raw))

    def activation(self, raw: Mapping[str, Any]) -> Activation:
        """Return the activation function. Raises UnsupportedModelError for another one."""
        given = raw.get(self.activation_key, Activation.SILU)
        if isinstance(given, str) and given in self.legacy_activations:
            return self.legacy_activations[given]
        if given not in _NAMED_ACTIVATIONS:
            raise unsupported(self.activation_key, given, " or ".join(_NAMED_ACTIVATIONS))
        return Activation(given)


def has(raw: Mapping[str, Any], feature: Feature) -> bool:
    """Return whether a model has a feature: always, never, or by a key of its config.json."""
    return feature if isinstance(feature, bool) else bool(raw.get(feature))
