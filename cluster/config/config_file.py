"""A configuration as a YAML file holds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from specdec.types.errors import InvalidValueError


def read_config_file(path: Path) -> dict[str, Any]:
    """What a file says, by keys that nobody has looked at yet; an empty one says nothing.

    Raises InvalidValueError for one that cannot be read, or is no mapping.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        limit = f"a YAML file that can be read ({reason})"
        raise InvalidValueError("configuration file", str(path), limit) from error
    if not isinstance(content, dict | None):
        raise InvalidValueError("configuration file", str(path), "a mapping of settings")
    return content or {}
