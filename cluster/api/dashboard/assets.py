"""The static files of the dashboard, read once from the package, and their HTTP headers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fastapi import Request, Response

_CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
    ".md": "text/plain; charset=utf-8",
    "": "text/plain; charset=utf-8",  # LICENSE
}

SECURITY_HEADERS: Mapping[str, str] = {
    # Same origin only: no other host, no inline script or style.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True)
class Asset:
    """One static file. etag: with the quotes of the header."""

    body: bytes
    content_type: str
    etag: str

    def respond(self, request: Request) -> Response:
        """Return the file, or 304 if the browser has this version; it revalidates each time."""
        headers = {**SECURITY_HEADERS, "cache-control": "no-cache", "etag": self.etag}
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.body, headers={**headers, "content-type": self.content_type})


def load_assets() -> dict[str, Asset]:
    """Read every file, by its path below static/."""
    root = Path(__file__).parent / "static"
    files = (path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): _asset(path) for path in files}


def _asset(path: Path) -> Asset:
    body = path.read_bytes()
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    return Asset(body, _CONTENT_TYPES[path.suffix], etag)
