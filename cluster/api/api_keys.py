"""Who may have the model generate, over HTTP or gRPC, and how much of it."""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

import yaml

from specdec.types.errors import InvalidValueError, OverloadedError, UnauthenticatedError

KEYS_VARIABLE = "SPECDEC_API_KEYS"

_SCHEME = "bearer "
_MIN_CHARS = 8
_BURST_S = 1.0
"""A key's requests of so many seconds may come at once."""


@dataclass(frozen=True)
class ApiKey:
    """A key and what its holder may take of one replica; None is no limit of its own.

    name: what logs and errors call it. key: never shown.
    """

    name: str
    key: str = field(repr=False)
    requests_per_s: float | None = None
    max_concurrent_requests: int | None = None

    def __post_init__(self) -> None:
        is_plain = self.key.isascii() and self.key.isprintable() and " " not in self.key
        if len(self.key) < _MIN_CHARS or not is_plain:
            limit = f"{_MIN_CHARS} printable ASCII characters or more, without spaces"
            raise InvalidValueError(f"key of {self.name}", "not shown", limit)
        rate, most = self.requests_per_s, self.max_concurrent_requests
        if rate is not None and not (_is_number(rate) and 0 < rate < math.inf):
            raise InvalidValueError(f"requests_per_s of {self.name}", rate, "a number above 0")
        if most is not None and not (type(most) is int and most > 0):
            name = f"max_concurrent_requests of {self.name}"
            raise InvalidValueError(name, most, "a whole number above 0")


class NoApiKeyError(UnauthenticatedError):
    """A call presented no API key, or one that nobody has."""

    def __str__(self) -> str:
        return "an API key is needed, as Authorization: Bearer KEY; this is none"


class Lease:
    """A request's place among those that its key may have at once; to be given back once."""

    def __init__(
        self,
        give_back: Callable[[], None] = lambda: None,
        uncount: Callable[[], None] = lambda: None,
    ) -> None:
        """uncount: has the request not count towards the rate of its key."""
        self._give_back: Callable[[], None] | None = give_back
        self._uncount = uncount

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Gives the place back; a second time does nothing."""
        if self._give_back is not None:
            self._give_back()
        self._give_back = None

    def undo(self) -> None:
        """Gives it back as if it had not been taken: somebody else is to count the request."""
        if self._give_back is not None:
            self._uncount()
        self.release()


class _Allowance:
    """What is left of a key's limits: a bucket of requests that fills with time."""

    def __init__(self, key: ApiKey, clock: Callable[[], float]) -> None:
        self._key = key
        self._clock = clock
        self._capacity = max(1.0, (key.requests_per_s or 1.0) * _BURST_S)
        self._left = self._capacity
        self._filled_at_s = clock()
        self.num_open = 0

    def take(self) -> Lease:
        most = self._key.max_concurrent_requests
        if most is not None and self.num_open >= most:
            message = f"{self.num_open} requests of this key run; at most {most} may at once"
            raise OverloadedError(message)
        self._take_from_bucket()
        self.num_open += 1
        return Lease(self._give_back, self._refill)

    def _take_from_bucket(self) -> None:
        rate = self._key.requests_per_s
        if rate is None:
            return
        now_s = self._clock()
        self._left = min(self._capacity, self._left + (now_s - self._filled_at_s) * rate)
        self._filled_at_s = now_s
        if self._left < 1:
            wait_s = math.ceil((1 - self._left) / rate)
            message = f"this key may send {rate:g} requests a second"
            raise OverloadedError(message, retry_after_s=wait_s)
        self._left -= 1

    def _give_back(self) -> None:
        self.num_open -= 1

    def _refill(self) -> None:
        self._left = min(self._capacity, self._left + 1)


class ApiKeys:
    """Compares what callers present with every key, in a time that tells nothing of them.

    Limits hold for each replica by itself, and are kept by the event loop's thread alone.
    """

    def __init__(
        self, keys: Sequence[ApiKey] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        """No keys: everyone may call, without limits."""
        self._known = [(_digest(key.key), key, _Allowance(key, clock)) for key in keys]

    def __repr__(self) -> str:
        return f"ApiKeys({[key.name for _, key, _ in self._known]})"

    def admit(self, authorization: str | None) -> Lease:
        """A place for a request with this header or metadata.

        Raises NoApiKeyError, and OverloadedError where the key is over a limit of its own.
        """
        return self._find(authorization).take() if self._known else Lease()

    def check(self, authorization: str | None) -> None:
        """The same for what takes nothing of the model."""
        if self._known:
            self._find(authorization)

    def _find(self, authorization: str | None) -> _Allowance:
        given = authorization or ""
        presented = given[len(_SCHEME) :] if given.lower().startswith(_SCHEME) else ""
        digest, found = _digest(presented.strip()), None
        for known, _, allowance in self._known:  # to the end, whichever it is
            if hmac.compare_digest(known, digest):
                found = allowance
        if found is None:
            raise NoApiKeyError
        return found


def read_keys(setting: str, path: Path | None) -> tuple[ApiKey, ...]:
    """The keys in a YAML file, else those in the environment; none for none.

    The file has a list of mappings with the fields of ApiKey; the variable has bare keys with
    commas or spaces between them. `setting`: what the file is called where it was given. Raises
    InvalidValueError, which never quotes a key.
    """
    if path is None:
        bare = os.environ.get(KEYS_VARIABLE, "").replace(",", " ").split()
        keys = [ApiKey(f"key {number}", key) for number, key in enumerate(bare, 1)]
    else:
        keys = [_read_entry(setting, entry) for entry in _entries(setting, path)]
    for what in ("name", "key"):
        if len({getattr(each, what) for each in keys}) < len(keys):
            where = KEYS_VARIABLE if path is None else setting
            raise InvalidValueError(where, f"a list with one {what} twice", "without repetitions")
    return tuple(keys)


def _entries(setting: str, path: Path) -> list[Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        content = None  # what a parser says may quote the file
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
            raise InvalidValueError(f"{name} in {setting}", "not shown", "a text in every entry")
    return ApiKey(**entry)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
