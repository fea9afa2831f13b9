"""Refuses what another site's page sends through a visitor's browser.

A page anywhere can have a browser send a form to this service. Here only JSON is taken, which a
browser does not send elsewhere without asking first; and where a browser says which page it sends
for, as all of today's do, that has to be one of ours. Programs other than browsers say neither.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from fastapi import HTTPException, Request

_OURS = ("same-origin", "none")  # none: typed into the address bar


def require_own_page(request: Request) -> None:
    """A dependency of routes that change something. Raises HTTPException: 403 or 415."""
    if not _is_own(request):
        raise HTTPException(403, "the request comes from another site's page")
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise HTTPException(415, f"content-type is {content_type!r}; it must be application/json")


def _is_own(request: Request) -> bool:
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site in _OURS
    origin = request.headers.get("origin")
    return origin is None or urlsplit(origin).netloc == request.headers.get("host")
