"""Checks against pages of other sites in a client's browser: DNS rebinding, and forged requests.

DNS rebinding: a page of another site can have its name resolved to this service's address: the
browser then takes service and page for one site. Its requests still carry the name of that site in
`Host`. A name that is an IP address cannot be resolved to another one, so addresses are always
allowed; where API keys are required, such a page has none. gRPC needs no check: browsers do not
send HTTP/2 without TLS, and with TLS the certificate does not have the name of another site.

Cross-site request forgery (CSRF): a page of any site can make a browser post a form to this
service. Only JSON is accepted: a browser sends it to another origin only after a CORS preflight. If
a browser sends `Sec-Fetch-Site` or `Origin`, the page must be of this service; programs other than
browsers send neither. The page cannot read the response to a GET, but each of its streams takes a
watcher's place.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.api.base.anthropic_errors import failure_response
from cluster.api.base.openai_errors import failure_of
from cluster.api.http.forwarding import is_forwarded
from cluster.config.network import ANY_HOST, host_names, is_ip_address
from cluster.config.serve_config import ServeConfig
from specdec.types.errors import ForeignPageError, InvalidValueError, UnknownHostError

_JSON = "application/json"
_NO_FORM = ("", "application/octet-stream")
"""Types of a request without a body that no form can have; aiohttp sends the latter with each."""
_ALLOWED_SITES = ("same-origin", "none")  # none: the user, not a page, made the request
_LOOPBACK_NAMES = ("localhost", "*.localhost")


class AllowedHosts:
    """The names under which a service may be called; IP addresses are always allowed."""

    def __init__(self, names: Iterable[str] = (ANY_HOST,)) -> None:
        """names: in lower case; "*.domain" allows all names below a domain, "*" all names."""
        self._names = frozenset(names)
        self._suffixes = tuple(each[1:] for each in self._names if each.startswith("*."))

    @classmethod
    def of(cls, config: ServeConfig, *, has_keys: bool) -> AllowedHosts:
        """Return the configured names, or the defaults. has_keys: whether calls need an API key."""
        if config.allowed_hosts is None and has_keys:
            return cls()
        own = (*_LOOPBACK_NAMES, config.host.lower(), socket.gethostname().lower())
        return cls((*own, *host_names(config.allowed_hosts or "localhost")))

    def check(self, host: str) -> None:
        """Raise UnknownHostError unless the header `Host` names an allowed host."""
        name = _without_port(host).lower().removesuffix(".")
        is_allowed = ANY_HOST in self._names or name in self._names or is_ip_address(name)
        if not (is_allowed or name.endswith(self._suffixes)):
            raise UnknownHostError(name)


def _without_port(host: str) -> str:
    if host.startswith("["):  # an IPv6 address
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


class CheckHost:
    """ASGI middleware that refuses requests for the hosts of others with 421.

    A request without `Host`, as HTTP/1.0 allows, does not come from a browser.
    """

    def __init__(self, app: ASGIApp, get_hosts: Callable[[], AllowedHosts]) -> None:
        """get_hosts: called for each request."""
        self._app = app
        self._get_hosts = get_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; the Router that forwards a request has checked it."""
        if scope["type"] == "http" and not is_forwarded(scope):
            hosts = self._get_hosts()
            try:
                for name, value in scope["headers"]:
                    if name == b"host":
                        hosts.check(value.decode("latin-1"))
            except UnknownHostError as error:
                await failure_response(failure_of(error), scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)


def require_same_origin(request: Request) -> None:
    """Raise ForeignPageError for another site's page, InvalidValueError unless the body is JSON.

    A request without a body need not be JSON, unless a form can have its content type.
    """
    _require_own_page(request)
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != _JSON and (content_type not in _NO_FORM or _has_body(request)):
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
