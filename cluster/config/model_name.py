"""The name of a model in requests that its path gives."""

from __future__ import annotations

import re
from pathlib import Path

_GGUF_SUFFIX = re.compile(r"(-\d{5}-of-\d{5})?\.gguf$")


def default_name(model: str) -> str:
    """Return the last part of a path or Hub id; of a GGUF file without its suffix and part."""
    name = Path(model).resolve().name
    return _GGUF_SUFFIX.sub("", name) or name
