"""Detection of the format of a head, by the keys of its config.json and its tensors."""

from __future__ import annotations

from collections.abc import Callable

from specdec.models.config import ModelConfig
from specdec.models.heads.formats.medusa import read_medusa
from specdec.models.heads.formats.mlp_speculator import read_mlp_speculator
from specdec.models.heads.formats.shape import Reading
from specdec.models.heads.formats.source import HeadSource
from specdec.types.errors import UnsupportedModelError

Reader = Callable[[HeadSource, ModelConfig], Reading]


def read_head(source: HeadSource, target: ModelConfig) -> Reading:
    """Read a head with the reader of its format.

    Raises UnsupportedModelError for a format that is not known, or for its content.
    """
    return _reader_of(source)(source, target)


def _reader_of(source: HeadSource) -> Reader:
    fields = source.fields
    model_type = fields.raw.get("model_type")
    if model_type == "mlp_speculator":
        return read_mlp_speculator
    if model_type == "medusa" or "medusa_num_heads" in fields or _has_medusa_file(source):
        return read_medusa
    architecture = (fields.raw.get("architectures") or ["none"])[0]
    raise UnsupportedModelError(
        f"{source.directory} is not a draft head of a known format (architecture {architecture}, "
        f"model_type {model_type}, {len(source.shapes)} tensors)"
    )


def _has_medusa_file(source: HeadSource) -> bool:
    return any(path.name.startswith("medusa_lm_head") for path in source.files)
