"""Refuses what another site's page sends through a visitor's browser.

A page anywhere can have a browser send a form to this service. Here only JSON is taken, which a
browser does not send elsewhere without asking first; and where a browser says which page it sends
for, that has to be one of ours. Programs other than browsers say nothing of it.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from fastapi import Request

from specdec.types.errors import ForeignPageError, InvalidValueError

_JSON = "application/json"
_OURS = ("same-origin", "none")  # none: no page has sent it


def require_own_page(request: Request) -> None:
    """To be called where something changes. Raises ForeignPageError and InvalidValueError."""
    if not _is_own(request):
        raise ForeignPageError
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != _JSON:
        raise InvalidValueError("content-type", content_type, _JSON)


def _is_own(request: Request) -> bool:
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site in _OURS
    origin = request.headers.get("origin")
    return origin is None or urlsplit(origin).netloc == request.headers.get("host")
