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


def target_name(fields: Fields) -> str | None:
    """Return the model that the draft was trained for."""
    verifier = fields.nested("speculators_config").nested("verifier")
    return verifier.text("name_or_path") if "name_or_path" in verifier else None


def num_draft_tokens(fields: Fields) -> int | None:
    """Return the draft length of the first proposal method."""
    methods = fields.nested("speculators_config").raw.get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    if not isinstance(first, dict) or first.get("speculative_tokens") is None:
        return None
    return Fields(first, fields.path).count("speculative_tokens")
