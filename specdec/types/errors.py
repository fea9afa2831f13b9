"""Errors a caller can cause, named so that every interface can report them alike.

Each carries the field, the value and the limit that was broken. `cluster.api.errors` maps them to gRPC
and HTTP codes. A failed invariant of our own is an `assert`, never one of these.
"""

from __future__ import annotations

import pathlib


class SpecdecError(Exception):
    """Base of every error that is meant to be read by the person who caused it."""


class InvalidValueError(SpecdecError, ValueError):
    """A field of a request or of the configuration is out of its limits."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        """`limit` completes the sentence "`field` is `value`; it must be ..."."""
        self.field = field
        self.value = value
        self.limit = limit
        super().__init__(field, value, limit)  # as given, so that the error can be pickled

    def __str__(self) -> str:
        return f"{self.field} is {_short(self.value)}; it must be {self.limit}"


class UnknownNameError(InvalidValueError):
    """A setting, key or argument has a name that does not exist; `limit` lists what does."""

    def __str__(self) -> str:
        return f"unknown {self.field} {_short(self.value)}; {self.limit}"


class UnsupportedModelError(SpecdecError):
    """The checkpoint is of an architecture, or has a feature, that is not implemented."""


class ModelNotFoundError(SpecdecError):
    """No model answers to that name, here or where it could be fetched from."""


class UnknownModelError(SpecdecError):
    """A request names a model that is not the one that is served."""

    def __init__(self, requested: str, *loaded: str) -> None:
        """`requested` is the name in the request, `loaded` those that would be answered to."""
        self.requested = requested
        self.loaded = loaded
        super().__init__(requested, *loaded)

    def __str__(self) -> str:
        names = ", ".join(map(repr, self.loaded))
        return f"model {_short(self.requested)} is not served; served: {names}"


class VersionConflictError(SpecdecError):
    """A change was made for a state that is not the present one; nothing was changed."""

    def __init__(self, expected: int, present: int) -> None:
        """`expected` is the version that the change was made for."""
        self.expected = expected
        self.present = present
        super().__init__(expected, present)

    def __str__(self) -> str:
        return f"expected_version is {self.expected}; the current version is {self.present}"


class ForeignPageError(SpecdecError):
    """A browser sends what another site's page has made it send."""

    def __str__(self) -> str:
        return "the request comes from another site's page; only this service's own may send it"


class UnauthenticatedError(SpecdecError):
    """A call that only operators may make did not present their token."""

    def __str__(self) -> str:
        return "this call needs the admin token, in the header authorization: Bearer TOKEN"


class OutOfMemoryError(SpecdecError):
    """The machine has too little memory for the configuration asked for."""


class GrammarError(SpecdecError):
    """A request's structured output cannot be continued; the others are not concerned."""


class OverloadedError(SpecdecError):
    """The request was refused because something is full; it may be sent again later.

    retry_after_s: when there will be room, where that is known.
    """

    def __init__(self, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotReadyError(SpecdecError):
    """The service is loading its model, or draining; the request did not start."""


class BadLogitsError(SpecdecError):
    """No token could follow a request's last one: what the model computed for it is no number."""

    def __init__(self, num_output_tokens: int) -> None:
        """`num_output_tokens` is how many there were before."""
        self.num_output_tokens = num_output_tokens
        super().__init__(num_output_tokens)

    def __str__(self) -> str:
        return (
            f"generation stopped after {self.num_output_tokens} output tokens: the model produced "
            "NaN or Inf logits"
        )


class NoTokenLeftError(SpecdecError):
    """No token could follow a request's last one: together, its parameters rule out every token."""

    def __init__(self, num_output_tokens: int) -> None:
        """`num_output_tokens` is how many there were before."""
        self.num_output_tokens = num_output_tokens
        super().__init__(num_output_tokens)

    def __str__(self) -> str:
        return (
            f"generation stopped after {self.num_output_tokens} output tokens: allowed_token_ids, "
            "bad_words, min_tokens and structured_output together allow no next token"
        )


class TargetFailedError(SpecdecError):
    """The target model stopped answering; where it cannot be replaced, requests are lost."""


class DraftFailedError(SpecdecError):
    """The draft model stopped answering; requests go on without it."""


def _short(value: object, max_chars: int = 80) -> str:
    text = repr(str(value) if isinstance(value, pathlib.PurePath) else value)
    return text if len(text) <= max_chars else f"{text[:max_chars]}... ({len(text)} characters)"
