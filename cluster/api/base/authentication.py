"""The operators' token, and API keys, each with a rate and a concurrency limit."""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from cluster.api.base.counters import KeyCounters
from cluster.config.config_file import read_yaml
from cluster.config.secrets import KEYS_VARIABLE, TOKEN_VARIABLE
from cluster.config.serve_config import ServeConfig
from cluster.observability.request_context import current_address, current_caller
from cluster.replica.limits import MAX_PRIORITY
from specdec.types.control import is_number
from specdec.types.errors import InvalidValueError, OverloadedError, UnauthenticatedError
from specdec.types.request import Caller

_SCHEME = "bearer "
_MIN_KEY_CHARS = 8
_MIN_TOKEN_CHARS = 16
_BURST_S = 1.0
"""Seconds of a key's rate that may arrive as one burst."""


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
        field, shown, text = TOKEN_VARIABLE, "set", os.environ.get(TOKEN_VARIABLE, "")
        if not text:
            return None
    else:
        shown = str(path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidValueError(field, shown, "a readable file with a token") from error
    token = text.strip()
    _require_plain(field, shown, token, _MIN_TOKEN_CHARS, "a token of ")
    return token


@dataclass(frozen=True)
class ApiKey:
    """An API key with its limits for each replica; None is no limit.

    name: identifies the key in logs and errors. key: never shown. min_priority: the most urgent
    priority that requests with this key may have.
    """

    name: str
    key: str = field(repr=False)
    requests_per_s: float | None = None
    max_concurrent_requests: int | None = None
    min_priority: int = 0

    def __post_init__(self) -> None:
        _require_plain(f"key of {self.name}", "not shown", self.key, _MIN_KEY_CHARS)
        rate, max_concurrent = self.requests_per_s, self.max_concurrent_requests
        if rate is not None and not (is_number(rate) and rate > 0):
            raise InvalidValueError(f"requests_per_s of {self.name}", rate, "a number above 0")
        if max_concurrent is not None and not (type(max_concurrent) is int and max_concurrent > 0):
            name = f"max_concurrent_requests of {self.name}"
            raise InvalidValueError(name, max_concurrent, "a whole number above 0")
        if not (type(self.min_priority) is int and -MAX_PRIORITY <= self.min_priority <= 0):
            limit = f"a whole number from {-MAX_PRIORITY} to 0, the priority of most requests"
            raise InvalidValueError(f"min_priority of {self.name}", self.min_priority, limit)


class NoApiKeyError(UnauthenticatedError):
    """A call presented no API key, or an unknown one."""

    def __str__(self) -> str:
        return "the API key is missing or unknown; send one as Authorization: Bearer KEY"


class Lease(AbstractContextManager["Lease"]):
    """A concurrency slot of an API key, held by one request and released once."""

    def __init__(self, limiter: _KeyLimiter | None = None) -> None:
        """limiter: of the key; None without a key."""
        self._limiter = limiter

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the slot; a second call does nothing."""
        limiter, self._limiter = self._limiter, None
        if limiter is not None:
            limiter.release()

    def undo(self) -> None:
        """Release the slot and refund the rate: another application counts the request."""
        if self._limiter is not None:
            self._limiter.refund()
        self.release()


class _KeyLimiter:
    """Token bucket and limits of one key, whose text it does not keep."""

    def __init__(self, key: ApiKey, clock: Callable[[], float], counters: KeyCounters) -> None:
        self.name = key.name
        self.min_priority = key.min_priority
        self._requests_per_s = key.requests_per_s
        self._max_concurrent = key.max_concurrent_requests
        self._clock = clock
        self._capacity = max(1.0, (key.requests_per_s or 1.0) * _BURST_S)
        self._running, self._bucket, self._lock = counters.running, counters.bucket, counters.lock
        with self._lock:
            if not self._bucket.filled_at_s:  # no other process has
                self._bucket.remaining, self._bucket.filled_at_s = self._capacity, clock()
        self._has_limit = not (key.requests_per_s is None and key.max_concurrent_requests is None)

    def take(self) -> Lease:
        if not self._has_limit:
            return Lease()
        with self._lock:
            limit = self._max_concurrent
            if limit is not None and self._running.total >= limit:
                message = f"too many concurrent requests of this API key (limit {limit})"
                raise OverloadedError(message)
            self._take_from_bucket()
            self._running.add(1)
        return Lease(self)

    def _take_from_bucket(self) -> None:
        rate = self._requests_per_s
        if rate is None:
            return
        bucket, now_s = self._bucket, self._clock()
        refill = (now_s - bucket.filled_at_s) * rate
        bucket.remaining = min(self._capacity, bucket.remaining + refill)
        bucket.filled_at_s = now_s
        if bucket.remaining < 1:
            wait_s = math.ceil((1 - bucket.remaining) / rate)
            message = f"this API key is limited to {rate:g} requests per second"
            raise OverloadedError(message, retry_after_s=wait_s)
        bucket.remaining -= 1

    def release(self) -> None:
        self._running.add(-1)

    def refund(self) -> None:
        with self._lock:
            bucket = self._bucket
            bucket.remaining = min(self._capacity, bucket.remaining + 1)


class ApiKeys:
    """The known API keys; compares in constant time and enforces the limits of each key.

    Limits hold for each replica separately. Used on the event loop's thread only.
    """

    def __init__(
        self,
        keys: Sequence[ApiKey] = (),
        clock: Callable[[], float] = time.monotonic,
        *,
        min_priority: int = ServeConfig.min_priority,
        counters: Callable[[int], KeyCounters] = lambda number: KeyCounters(),
    ) -> None:
        """Keep the keys; without any, every call is accepted.

        min_priority: the most urgent priority of requests where there are no keys. counters: of a
            key by its number, from 0.
        """
        self._min_priority = min_priority
        self._known = [
            (_digest(key.key), _KeyLimiter(key, clock, counters(number)))
            for number, key in enumerate(keys)
        ]

    def __repr__(self) -> str:
        return f"ApiKeys({[limiter.name for _, limiter in self._known]})"

    @property
    def is_open(self) -> bool:
        """Return whether calls need no key."""
        return not self._known

    def admit(self, authorization: str | None) -> Lease:
        """Take a slot for a request with this `authorization` header or metadata.

        The key, or the address of a client without one, is the `current_caller` of what the
        request runs.
        Raise NoApiKeyError, or OverloadedError if the key is over one of its limits.
        """
        if not self._known:
            current_caller.set(Caller(current_address.get()(), is_stranger=True))
            return Lease()
        limiter = self._find(authorization)
        current_caller.set(Caller(limiter.name))
        return limiter.take()

    def check(self, authorization: str | None) -> None:
        """Raise NoApiKeyError without a known key; for requests that are not limited."""
        if self._known:
            self._find(authorization)

    def check_priority(self, authorization: str | None, priority: int) -> None:
        """Raise InvalidValueError for a priority that the caller may not use.

        Scheduling is by priority before age: a client that may choose any priority can delay all
        others. Raise NoApiKeyError without a known key.
        """
        if self._known:
            low, source = self._find(authorization).min_priority, "with this API key"
        else:
            low, source = self._min_priority, "without an API key"
        if not low <= priority <= MAX_PRIORITY:
            limit = f"from {low} to {MAX_PRIORITY} {source} (min_priority)"
            raise InvalidValueError("priority", priority, limit)

    def _find(self, authorization: str | None) -> _KeyLimiter:
        digest, found = _digest(bearer_credentials(authorization)), None
        for known, limiter in self._known:  # no early exit: constant time
            if hmac.compare_digest(known, digest):
                found = limiter
        if found is None:
            raise NoApiKeyError
        return found


class AdminAccess:
    """Access to administration: by the operators' token, else by API key, else open.

    Where calls need an API key, nothing changes or generates without a credential: without a token
    of the operators, every API key is one.
    """

    def __init__(self, token: str | None = None, keys: ApiKeys | None = None) -> None:
        """Keep the token and the keys; without both, every call is accepted."""
        self._token = None if token is None else token.encode()
        self._keys = keys or ApiKeys()

    def __repr__(self) -> str:
        return f"AdminAccess({access_summary(self.has_token, not self._keys.is_open)!r})"

    @property
    def has_token(self) -> bool:
        """Return whether the operators have a token of their own."""
        return self._token is not None

    @property
    def is_open(self) -> bool:
        """Return whether calls need no credential."""
        return self._token is None and self._keys.is_open

    def check(self, authorization: str | None) -> None:
        """Raise UnauthenticatedError unless the header `authorization` holds the credential.

        Compares in constant time.
        """
        if self._token is None:
            self._keys.check(authorization)
        elif not hmac.compare_digest(bearer_credentials(authorization).encode(), self._token):
            raise UnauthenticatedError

    def admit(self, authorization: str | None) -> Lease:
        """Check a call that runs the model; an API key has its limits here too."""
        if self._token is None:
            return self._keys.admit(authorization)
        self.check(authorization)
        return Lease()


def access_summary(has_token: bool, has_keys: bool) -> str:
    """Return in one line what is open to which clients."""
    match has_keys, has_token:
        case False, False:
            return "every client may generate and change settings"
        case False, True:
            return "every client may generate; dashboard and changes need the admin token"
        case True, False:
            return "generation, dashboard and changes need an API key"
        case _:
            return "generation needs an API key; dashboard and changes need the admin token"


def samples_warning(config: ServeConfig, has_token: bool, has_keys: bool) -> str | None:
    """Return a warning where any client can take the answers that are kept for training."""
    if has_token or has_keys or not config.training_buffer_tokens or not config.is_reachable:
        return None
    return (
        f"{config.served_model_name}: clients on other machines can take the answers that are kept "
        "for training; set an admin token or API keys"
    )


def read_keys(setting: str, path: Path | None) -> tuple[ApiKey, ...]:
    """Read the keys from a YAML file, else from the environment; return () without either.

    The file holds a list of mappings with the fields of ApiKey; the variable holds bare keys,
    separated by commas or spaces. setting: the name of the option that gave the path, for errors.
    Raise InvalidValueError, which never quotes a key.
    """
    if path is None:
        bare = os.environ.get(KEYS_VARIABLE, "").replace(",", " ").split()
        keys = [ApiKey(f"API key {number}", key) for number, key in enumerate(bare, 1)]
    else:
        keys = [_read_entry(setting, entry) for entry in _entries(setting, path)]
    for name in ("name", "key"):
        if len({getattr(each, name) for each in keys}) < len(keys):
            where = KEYS_VARIABLE if path is None else setting
            raise InvalidValueError(where, f"a list with a repeated {name}", "without duplicates")
    return tuple(keys)


def _entries(setting: str, path: Path) -> list[Any]:
    try:
        content = read_yaml(path)
    except (OSError, ValueError):
        content = None  # a parser's message may quote the file
    if not isinstance(content, list) or not content:
        raise InvalidValueError(setting, str(path), "a YAML file with a list of keys")
    return content


def _read_entry(setting: str, entry: Any) -> ApiKey:
    if not isinstance(entry, Mapping):
        raise InvalidValueError(setting, "an entry", "a mapping with name and key")
    known = [each.name for each in fields(ApiKey)]
    if not set(entry) <= set(known):  # not quoted: it may be a key in the wrong place
        raise InvalidValueError(f"a field of {setting}", "not shown", f"one of {', '.join(known)}")
    for name in ("name", "key"):
        if not isinstance(entry.get(name), str) or not entry[name]:
            raise InvalidValueError(f"{name} in {setting}", "not shown", "a string in every entry")
    return ApiKey(**entry)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _require_plain(field: str, shown: str, secret: str, least: int, what: str = "") -> None:
    """Raise InvalidValueError, which does not quote the secret."""
    is_plain = secret.isascii() and secret.isprintable() and " " not in secret
    if len(secret) < least or not is_plain:
        limit = f"{what}{least} printable ASCII characters or more, without spaces"
        raise InvalidValueError(field, shown, limit)
