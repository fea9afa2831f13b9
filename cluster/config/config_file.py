"""Reads configuration files in YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from specdec.types.errors import InvalidValueError


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the unvalidated mapping of a YAML file; {} if it is empty.

    Raises InvalidValueError if the file cannot be read or is not a mapping.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        limit = f"a readable YAML file ({reason})"
        raise InvalidValueError("configuration file", str(path), limit) from error
    if not isinstance(content, dict | None):
        raise InvalidValueError(
            "configuration file", str(path), "a YAML mapping of settings, such as model: ./my-llama"
        )
    return content or {}
