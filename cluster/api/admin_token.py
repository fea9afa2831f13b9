"""Authentication of AdminService calls by the operators' token."""

from __future__ import annotations

import hmac
import os
from pathlib import Path

from specdec.types.errors import InvalidValueError, UnauthenticatedError

TOKEN_VARIABLE = "SPECDEC_ADMIN_TOKEN"

_MIN_CHARS = 16
_SCHEME = "bearer "


class AdminAccess:
    """Check of the operators' token in constant time."""

    def __init__(self, token: str | None = None) -> None:
        """Keep the token; None accepts every call."""
        self._token = None if token is None else token.encode()

    def __repr__(self) -> str:
        return f"AdminAccess({'open' if self._token is None else 'by token'})"

    def check(self, authorization: str | None) -> None:
        """Raise UnauthenticatedError unless the header `authorization` holds the token."""
        if self._token is None:
            return
        if not hmac.compare_digest(bearer_credentials(authorization).encode(), self._token):
            raise UnauthenticatedError


def bearer_credentials(authorization: str | None) -> str:
    """Return the credentials of a header `Authorization: Bearer ...`; empty if there are none."""
    given = authorization or ""
    return given[len(_SCHEME) :].strip() if given.lower().startswith(_SCHEME) else ""


def read_token(field: str, path: Path | None) -> str | None:
    """Read the token from a file, else from the environment; return None without either.

    Raise InvalidValueError for an unusable token, without quoting it. field: the name of the
    option that gave the path, for errors.
    """
    if path is None:
        text = os.environ.get(TOKEN_VARIABLE, "")
        return _checked(TOKEN_VARIABLE, "set", text) if text else None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        limit = "a readable file with a token"
        raise InvalidValueError(field, str(path), limit) from error
    return _checked(field, str(path), text)


def _checked(field: str, shown: str, text: str) -> str:
    token = text.strip()
    is_plain = token.isascii() and token.isprintable() and " " not in token
    if len(token) < _MIN_CHARS or not is_plain:
        limit = f"a token of {_MIN_CHARS} printable ASCII characters or more, without spaces"
        raise InvalidValueError(field, shown, limit)
    return token
