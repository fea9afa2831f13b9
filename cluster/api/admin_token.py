"""Who may call AdminService: everyone, or who has the operators' token."""

from __future__ import annotations

import hmac
import os
from pathlib import Path

from specdec.types.errors import InvalidValueError, UnauthenticatedError

TOKEN_VARIABLE = "SPECDEC_ADMIN_TOKEN"

_MIN_CHARS = 16
_SCHEME = "bearer "


class AdminAccess:
    """Compares what callers present with the token, in a time that tells nothing of it."""

    def __init__(self, token: str | None = None) -> None:
        """None: everyone may call."""
        self._token = None if token is None else token.encode()

    def __repr__(self) -> str:
        return f"AdminAccess({'open' if self._token is None else 'by token'})"

    def check(self, authorization: str | None) -> None:
        """Raises UnauthenticatedError unless the header `authorization` holds the token."""
        if self._token is None:
            return
        given = authorization or ""
        presented = given[len(_SCHEME) :] if given.lower().startswith(_SCHEME) else ""
        if not hmac.compare_digest(presented.strip().encode(), self._token):
            raise UnauthenticatedError


def read_token(field: str, path: Path | None) -> str | None:
    """The token in a file, else in the environment; None for none. Raises InvalidValueError.

    No message ever quotes it. field: what the file is called where it was given.
    """
    if path is None:
        text = os.environ.get(TOKEN_VARIABLE, "")
        return _checked(TOKEN_VARIABLE, "set", text) if text else None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        limit = "a file with a token that can be read"
        raise InvalidValueError(field, str(path), limit) from error
    return _checked(field, str(path), text)


def _checked(field: str, shown: str, text: str) -> str:
    token = text.strip()
    is_plain = token.isascii() and token.isprintable() and " " not in token
    if len(token) < _MIN_CHARS or not is_plain:
        limit = f"a token of {_MIN_CHARS} printable ASCII characters or more, without spaces"
        raise InvalidValueError(field, shown, limit)
    return token
