"""The names of a model in requests."""

from __future__ import annotations

import re
from pathlib import Path

MAX_MODEL_CHARS = 256
DEFAULT_MODEL = "default"
"""SGLang's name for the served model; a model or adapter of this name takes precedence."""

_GGUF_SUFFIX = re.compile(r"(-\d{5}-of-\d{5})?\.gguf$")


def default_name(model: str) -> str:
    """Return the last part of a path or Hub id; of a GGUF file without its suffix and part."""
    # A path with a null character, as from YAML, is refused with the other limits.
    name = Path(model.replace("\0", "")).resolve().name
    return _GGUF_SUFFIX.sub("", name) or name
