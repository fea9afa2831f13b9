"""Protection against cross-site request forgery (CSRF).

A page of any site can make a browser post a form to this service. Only JSON is accepted: a browser
sends it to another origin only after a CORS preflight. If a browser sends `Sec-Fetch-Site` or
`Origin`, the page must be of this service; programs other than browsers send neither.

The page cannot read the response to a GET, but each of its streams takes a watcher's place.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from fastapi import Request

from specdec.types.errors import ForeignPageError, InvalidValueError

_JSON = "application/json"
_ALLOWED_SITES = ("same-origin", "none")  # none: the user, not a page, made the request


def require_same_origin(request: Request) -> None:
    """Raise ForeignPageError for another site's page, InvalidValueError unless the body is JSON.

    A request without body and content type is not a form.
    """
    _require_own_page(request)
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != _JSON and (content_type or _has_body(request)):
        raise InvalidValueError("content-type", content_type, _JSON)


def require_own_reader(request: Request) -> None:
    """Raise ForeignPageError where another site's page, not a link in it, sends a GET request."""
    if request.headers.get("sec-fetch-dest") != "document":
        _require_own_page(request)


def _has_body(request: Request) -> bool:
    headers = request.headers
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def _require_own_page(request: Request) -> None:
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is not None:
        is_same = site in _ALLOWED_SITES
    else:
        is_same = origin is None or urlsplit(origin).netloc == request.headers.get("host")
    if not is_same:
        raise ForeignPageError
