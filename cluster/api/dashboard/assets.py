"""The static files of the dashboard, read once from the package, and their HTTP headers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from types import MappingProxyType

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

SECURITY_HEADERS: Mapping[str, str] = MappingProxyType(
    {
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
)


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


def load_assets() -> Mapping[str, Asset]:
    """Read every file, by its path below static/."""
    root = resources.files("cluster.api.dashboard").joinpath("static")
    return MappingProxyType(dict(_files_below(root, "")))


def _files_below(directory: Traversable, prefix: str) -> list[tuple[str, Asset]]:
    found: list[tuple[str, Asset]] = []
    for entry in directory.iterdir():
        path = prefix + entry.name
        if entry.is_dir():
            found.extend(_files_below(entry, f"{path}/"))
        else:
            found.append((path, _asset(path, entry.read_bytes())))
    return found


def _asset(path: str, body: bytes) -> Asset:
    name = path.rpartition("/")[2]
    stem, dot, suffix = name.rpartition(".")
    content_type = _CONTENT_TYPES[dot + suffix if stem else ""]
    return Asset(body, content_type, f'"{hashlib.sha256(body).hexdigest()[:32]}"')
