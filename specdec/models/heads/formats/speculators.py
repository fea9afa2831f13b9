"""Fields that files of the `speculators` library share: version, target and draft length."""

from __future__ import annotations

from specdec.models.heads.formats.source import Fields


def is_speculators(fields: Fields) -> bool:
    """Return whether a config.json was written by the library."""
    return "speculators_model_type" in fields


def described(fields: Fields, name: str) -> str:
    """Return the name of a format, with the library's version."""
    return f"{name} (speculators {fields.text('speculators_version', 'of an unknown version')})"


def layer_fields(fields: Fields) -> Fields:
    """Return the configuration of the draft's layers."""
    return fields.nested("transformer_layer_config") if is_speculators(fields) else fields


def require_whole_heads(fields: Fields) -> None:
    """Raise UnsupportedModelError for layers that are trained to rotate a part of each head.

    The library trains them so only with --no-draft-mrope-full-head-hack, which leaves the target's
    mrope_section and its factor.
    """
    layers = layer_fields(fields)
    for name in ("rope_parameters", "rope_scaling") if is_speculators(fields) else ():
        rope = layers.nested(name)
        if "mrope_section" in rope and rope.number("partial_rotary_factor", 1.0) < 1:
            limit = "1.0 beside mrope_section: only heads trained on whole heads are supported"
            raise rope.error("partial_rotary_factor", limit)


def target_name(fields: Fields) -> str | None:
    """Return the model that the draft was trained for."""
    verifier = fields.nested("speculators_config").nested("verifier")
    return verifier.optional_text("name_or_path")


def num_draft_tokens(fields: Fields) -> int | None:
    """Return the draft length of the first proposal method."""
    methods = fields.nested("speculators_config").raw.get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    if not isinstance(first, dict) or first.get("speculative_tokens") is None:
        return None
    return Fields(first, fields.path).count("speculative_tokens")
