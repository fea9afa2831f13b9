"""Errors that a caller can cause, which every interface reports alike.

`cluster.api.base.errors` maps them to gRPC and HTTP codes. A failed invariant of our own is an
`assert`, never one of these.
"""

from __future__ import annotations

import pathlib
from typing import ClassVar


class SpecdecError(Exception):
    """Base of the errors whose messages are meant for the client."""


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


class ContextLengthError(InvalidValueError):
    """A prompt, or a prompt with the requested tokens, exceeds the context length."""

    def __init__(
        self, max_model_len: int, num_prompt_tokens: int, max_tokens: int | None = None
    ) -> None:
        """Take the lengths in tokens. max_tokens: None where the prompt alone is too long."""
        self.max_model_len = max_model_len
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        if max_tokens is None:
            limit = f"at most {max_model_len - 1} tokens (max_model_len less one)"
            super().__init__("prompt length", num_prompt_tokens, limit)
        else:
            room = max_model_len - num_prompt_tokens
            limit = f"at most {room} (max_model_len less the prompt's {num_prompt_tokens} tokens)"
            super().__init__("max_tokens", max_tokens, limit)
        self.args = (max_model_len, num_prompt_tokens, max_tokens)  # to be pickled


class UnknownNameError(InvalidValueError):
    """A setting, key or argument has a name that does not exist; `limit` lists what does."""

    def __str__(self) -> str:
        return f"unknown {self.field} {_short(self.value)}; {self.limit}"


class UnknownFieldError(InvalidValueError):
    """A request has a field that does not exist; `limit` names a similar one, or is empty."""

    def __str__(self) -> str:
        return f"unknown field {_short(self.field)}{self.limit and f'; {self.limit}'}"


class _ModelFileError(SpecdecError):
    """An error that quotes names and values of model files, which may contain any characters.

    As text it is one line without control characters, so that no file writes to a terminal.
    """

    def __str__(self) -> str:
        text = super().__str__()
        return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


class UnsupportedModelError(_ModelFileError):
    """The checkpoint has an architecture or a feature that is not implemented."""


class ModelNotFoundError(_ModelFileError):
    """No model of that name exists, locally or where it could be fetched from."""


class UnknownModelError(SpecdecError):
    """A request names a model that is not served."""

    def __init__(self, requested: str, *loaded: str) -> None:
        """Take the name in the request and the names of the models that are served."""
        self.requested = requested
        self.loaded = loaded
        super().__init__(requested, *loaded)

    def __str__(self) -> str:
        names = ", ".join(map(repr, self.loaded))
        return f"model {_short(self.requested)} is not served; served: {names}"


class LostAdapterError(SpecdecError):
    """A running request cannot continue, because its adapter could not be loaded again."""

    def __init__(self, name: str) -> None:
        """Take the name of the adapter."""
        self.name = name
        super().__init__(name)

    def __str__(self) -> str:
        return f"adapter {_short(self.name)} could not be loaded again after a restart of the model"


class VersionConflictError(SpecdecError):
    """A change was made for a version that is not the present one; it has no effect."""

    def __init__(self, expected: int, present: int) -> None:
        """Take the version that the change was made for, and the present one."""
        self.expected = expected
        self.present = present
        super().__init__(expected, present)

    def __str__(self) -> str:
        return f"expected_version is {self.expected}; the current version is {self.present}"


class ForeignPageError(SpecdecError):
    """A browser sends a request on behalf of another site's page (CSRF)."""

    def __str__(self) -> str:
        return "the request comes from another site's page; only this service's own may send it"


class UnknownHostError(SpecdecError):
    """A request is addressed to a host name that the service does not have (DNS rebinding)."""

    def __init__(self, host: str) -> None:
        """Take the name in the request."""
        self.host = host
        super().__init__(host)

    def __str__(self) -> str:
        return (
            f"host {_short(self.host)} is not a name of this service; add it to allowed_hosts "
            "(--allowed-hosts) if clients use it"
        )


class StorageError(SpecdecError):
    """A setting could not be stored, so it is not in force; such as on a full disk."""

    def __init__(self, path: str, reason: str) -> None:
        """Take the file, and the error of the database."""
        self.path = path
        self.reason = reason
        super().__init__(path, reason)

    def __str__(self) -> str:
        return f"the settings cannot be stored in {self.path}: {self.reason}"


class BodyTooLargeError(SpecdecError):
    """The body of an HTTP request exceeds the limit."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        super().__init__(limit_bytes)

    def __str__(self) -> str:
        return f"the body is too large (limit {self.limit_bytes} bytes)"


class SlowBodyError(SpecdecError):
    """The body of an HTTP request does not arrive."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        super().__init__(timeout_s)

    def __str__(self) -> str:
        return f"the body arrives too slowly (limit {self.timeout_s:g} s for each part)"


class EncodedBodyError(SpecdecError):
    """The body of an HTTP request is compressed."""

    def __init__(self, encoding: str) -> None:
        """Take the value of the header."""
        self.encoding = encoding
        super().__init__(encoding)

    def __str__(self) -> str:
        return f"content-encoding is {_short(self.encoding)}; it must be identity, or left out"


class HeadersTooLargeError(BodyTooLargeError):
    """The target and the headers of an HTTP request exceed the limit together."""

    def __str__(self) -> str:
        return f"the headers are too large (limit {self.limit_bytes} bytes)"


class UnauthenticatedError(SpecdecError):
    """A call for operators only was made without their token."""

    def __str__(self) -> str:
        return "this call needs the admin token, in the header authorization: Bearer TOKEN"


class OutOfMemoryError(SpecdecError):
    """The machine has too little memory for the configuration."""


class GrammarError(SpecdecError):
    """A request's structured output cannot be continued; other requests are not affected."""


class OverloadedError(SpecdecError):
    """The request was rejected because a limit is reached; it may be sent again later.

    retry_after_s: when there will be room, if known.
    """

    def __init__(self, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotReadyError(SpecdecError):
    """The service is loading its model, or draining; the request did not start."""


GENERATION_STOPPED = "generation stopped after"
"""The beginning of the text of every NoNextTokenError."""


REQUEST_ABORTED = "the request was aborted by its id"
"""The text of every AbortedError; a call that a stopping service cancels has another one."""


class DeadlineExceededError(SpecdecError):
    """The answer was not complete within the time limit of its request."""


class AbortedError(SpecdecError):
    """A request was aborted by its id, not by closing its stream."""

    def __str__(self) -> str:
        return REQUEST_ABORTED


class NoNextTokenError(SpecdecError):
    """Base of the errors of a request that cannot be continued by any token."""

    reason: ClassVar[str] = "there is no next token"

    def __init__(self, num_output_tokens: int) -> None:
        """Take the number of output tokens so far."""
        self.num_output_tokens = num_output_tokens
        super().__init__(num_output_tokens)

    def __str__(self) -> str:
        return f"{GENERATION_STOPPED} {self.num_output_tokens} output tokens: {self.reason}"


class BadLogitsError(NoNextTokenError):
    """The model produced NaN or Inf logits for the next token."""

    reason = "the model produced NaN or Inf logits"


class NoTokenLeftError(NoNextTokenError):
    """The request's parameters together rule out every token."""

    reason = "allowed_token_ids, bad_words, min_tokens and structured_output allow no next token"


class DetokenizeError(NoNextTokenError):
    """The tokenizer failed at the text of the next token, which may contain a stop string."""

    reason = "the tokenizer could not decode the answer"


class CrashingRequestError(NoNextTokenError):
    """The forward pass of the request ends the target, which restarted for the others."""

    reason = (
        "the model process was lost repeatedly while it ran this request, the last time with no "
        "other request; it is not run again"
    )


class TargetFailedError(SpecdecError):
    """The target worker failed; if it cannot be replaced, running requests are lost."""


class DraftFailedError(SpecdecError):
    """The draft worker failed; requests continue without drafts."""


def reason_of(error: BaseException) -> str:
    """Return an error in one line, without its class unless it has no message."""
    text = " ".join(str(error).split())
    return f"no key {text}" if isinstance(error, KeyError) else text or type(error).__name__


def as_exception(error: BaseException) -> Exception:
    """Return an error as one that a future can hold, and that ends no more than a call.

    Not StopIteration, and no panic of the tokenizers' library, which is no Exception.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    fault = RuntimeError(f"{type(error).__name__}: {error}")
    fault.__cause__ = error
    return fault


_MAX_SHOWN_BITS = 1024


def _short(value: object, max_chars: int = 80) -> str:
    if isinstance(value, int) and value.bit_length() > _MAX_SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"
    shown = str(value) if isinstance(value, pathlib.PurePath) else value
    text = repr(shown)
    length = len(shown) if isinstance(shown, str) else len(text)  # without quotes and escapes
    return min(text, f"{text[:max_chars]}... ({length} characters)", key=len)
