# Modules: specdec.types.errors
import errno
import logging
import pickle
from pathlib import PurePosixPath

import pytest
from grpc import StatusCode
from starlette.requests import ClientDisconnect

from cluster.api.base.errors import _RULES, INTERNAL_MESSAGE, ErrorStatus, status_of
from specdec.engine.metrics.metrics import FAILURE_CODES
from specdec.types import errors
from specdec.types.errors import (
    AbortedError,
    BadLogitsError,
    CrashingRequestError,
    DeadlineExceededError,
    InvalidValueError,
    ModelNotFoundError,
    NoTokenLeftError,
    NotReadyError,
    OutOfMemoryError,
    OverloadedError,
    SpecdecError,
    StorageError,
    TargetFailedError,
    UnknownModelError,
    UnsupportedModelError,
    VersionConflictError,
)


@pytest.mark.parametrize("value", ["x" * 129, PurePosixPath("x" * 129)])
def test_a_long_text_is_counted_without_its_quotes(value):
    message = str(InvalidValueError("request_id", value, "at most 128 characters"))
    assert message.endswith("... (129 characters); it must be at most 128 characters")


def test_a_value_is_shortened_only_to_a_shorter_text():
    shown = [str(InvalidValueError("stop", "x" * count, "shorter")) for count in (79, 97, 99)]
    assert shown[:2] == [f"stop is '{'x' * count}'; it must be shorter" for count in (79, 97)]
    assert shown[2] == f"stop is '{'x' * 79}... (99 characters); it must be shorter"


@pytest.mark.parametrize(
    ("error", "grpc_code", "http_code"),
    [
        (InvalidValueError("top_p", 2, "at most 1"), StatusCode.INVALID_ARGUMENT, 400),
        (UnknownModelError("gpt", "tiny"), StatusCode.NOT_FOUND, 404),
        (VersionConflictError(expected=3, present=4), StatusCode.ABORTED, 409),
        (NotReadyError("the model is loading"), StatusCode.UNAVAILABLE, 503),
        (StorageError("control.sqlite3", "disk full"), StatusCode.FAILED_PRECONDITION, 507),
        (OutOfMemoryError("2 GiB needed"), StatusCode.FAILED_PRECONDITION, 400),
        (ModelNotFoundError("no such model"), StatusCode.FAILED_PRECONDITION, 400),
        (UnsupportedModelError("no such layer"), StatusCode.FAILED_PRECONDITION, 400),
        (BadLogitsError(num_output_tokens=7), StatusCode.INTERNAL, 500),
        (NoTokenLeftError(num_output_tokens=7), StatusCode.FAILED_PRECONDITION, 400),
        (AbortedError("my-id"), StatusCode.CANCELLED, 499),
        (ClientDisconnect(), StatusCode.CANCELLED, 499),
    ],
)
def test_errors_for_clients_keep_their_text(error, grpc_code, http_code, caplog):
    assert status_of(error) == ErrorStatus(grpc_code, http_code, str(error))
    assert caplog.records == []


def test_an_overload_has_a_retry_hint():
    status = status_of(OverloadedError("too many waiting requests (limit 4)"))
    assert (status.grpc_code, status.http_code) == (StatusCode.RESOURCE_EXHAUSTED, 429)
    assert status.retry_after_s == 1
    assert status.trailing_metadata == (("retry-after-s", "1"),)
    assert status.headers == {"Retry-After": "1"}


def test_no_retry_hint_for_other_errors():
    status = status_of(UnknownModelError("other", "known"))
    assert status.retry_after_s is None
    assert status.trailing_metadata == ()
    assert status.headers == {}


def test_a_request_whose_time_is_over_is_not_sent_again():
    assert status_of(DeadlineExceededError("late")).headers == {"x-should-retry": "false"}


@pytest.mark.parametrize("error", [NotReadyError("the service is draining"), TargetFailedError()])
def test_a_connection_to_a_replica_that_is_not_ready_is_closed(error):
    """A client would send its next attempts to this replica, too, while it keeps it open."""
    assert status_of(error).headers == {"Connection": "close"}


def test_a_request_that_ends_the_model_is_not_to_be_sent_again():
    status = status_of(CrashingRequestError(num_output_tokens=7))
    assert (status.grpc_code, status.http_code) == (StatusCode.INTERNAL, 500)
    assert "after 7 output tokens: the model process was lost" in status.message
    assert status.retry_after_s is None
    assert status.headers == {"x-should-retry": "false"}


@pytest.mark.parametrize(
    ("error", "grpc_code", "http_code"),
    [
        (RuntimeError("secret"), StatusCode.INTERNAL, 500),
        (ValueError("secret"), StatusCode.INTERNAL, 500),
        (SpecdecError("secret"), StatusCode.INTERNAL, 500),
        (FileNotFoundError(errno.ENOENT, "secret"), StatusCode.INTERNAL, 500),
        (OSError(errno.EMFILE, "secret"), StatusCode.UNAVAILABLE, 503),
        (OSError(errno.ENFILE, "secret"), StatusCode.UNAVAILABLE, 503),
        (TargetFailedError("rank 1 failed: TypeError: secret"), StatusCode.UNAVAILABLE, 503),
    ],
)
def test_internal_texts_are_logged_and_never_sent(error, grpc_code, http_code, caplog):
    status = status_of(error)
    assert (status.grpc_code, status.http_code) == (grpc_code, http_code)
    assert "secret" not in status.message
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info[1] is error


def test_a_subclass_is_reported_as_its_base():
    class StricterError(InvalidValueError):
        pass

    status = status_of(StricterError("top_p", 2, "at most 1"))
    assert status.grpc_code is StatusCode.INVALID_ARGUMENT


def test_an_exceeded_context_length_crosses_processes():
    error = errors.ContextLengthError(9, 4, 6)
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), copied.max_tokens) == (str(error), 6)
    assert str(error).startswith("max_tokens is 6; it must be at most 5 (max_model_len less")


def test_every_error_of_ours_has_its_own_rule():
    ours = {
        kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and not name.startswith("_")  # private ones are bases
    } - {SpecdecError}
    assert InvalidValueError in ours
    for kind in ours:
        num_fields = {
            InvalidValueError: 3,
            errors.UnknownNameError: 3,
            errors.UnknownFieldError: 3,
            errors.UnknownModelError: 2,
            errors.VersionConflictError: 2,
            errors.StorageError: 2,
        }.get(kind, 1)
        numbers = {errors.SlowBodyError: [1.0], errors.ContextLengthError: [9, 12]}
        arguments = numbers.get(kind, ["x"] * num_fields)
        status = status_of(kind(*arguments))
        assert status.message != INTERNAL_MESSAGE, kind


def test_unknown_model_names_both():
    message = str(UnknownModelError("x" * 500, "tiny"))
    assert "tiny" in message
    assert len(message) < 200


def test_the_counter_of_each_code_begins_with_the_process():
    """Else a rate omits the failures of the first scrape that has any."""
    assert {each.grpc_code.name for each in _RULES.values()} == {*FAILURE_CODES}
