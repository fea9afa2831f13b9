"""Errors in OpenAI's format: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin

from fastapi import Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from grpc import StatusCode
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from cluster.api.base.errors import FINAL_HEADERS, status_of
from cluster.api.base.openai_schema import ErrorBody, ErrorDetails, RequestModel
from specdec.types.errors import (
    ContextLengthError,
    InvalidValueError,
    SpecdecError,
    UnknownFieldError,
)

INVALID_REQUEST = "invalid_request_error"
RETRY_AFTER_S = 1
"""Retry hint of a service that is starting, stopping or full."""

_TYPES_AND_CODES: Mapping[int, tuple[str, str | None]] = {
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", None),
    404: (INVALID_REQUEST, "model_not_found"),
    408: ("timeout_error", "body_timeout"),
    413: (INVALID_REQUEST, "request_too_large"),
    415: (INVALID_REQUEST, "encoding_not_supported"),
    421: (INVALID_REQUEST, "host_not_allowed"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    431: (INVALID_REQUEST, "headers_too_large"),
    499: (INVALID_REQUEST, "request_aborted"),
    500: ("server_error", None),
    503: ("service_unavailable_error", "service_unavailable"),
    504: ("timeout_error", "deadline_exceeded"),
}
"""OpenAI's types and codes of errors by the status."""
_DEFAULT = (INVALID_REQUEST, None)

_SHOULD = re.compile(r"(\w+) should (be|have|match) (.*)", re.DOTALL)
_THIRD_PERSON = {"have": "has", "match": "matches"}
_OBJECT_EXPECTED = {"dict_type", "model_type", "model_attributes_type"}
_ASIDE = re.compile(r" after validation, not .*")
_MAX_NAME_CHARS = 100
"""Limit for the name of an unknown field, which is compared with all known names."""


class ApiError(SpecdecError):
    """An error of this API itself, not of the engine."""

    def __init__(self, status: int, message: str, code: str) -> None:
        """Make an error; `status` is the HTTP status, `code` OpenAI's error code."""
        self.status = status
        self.code = code
        super().__init__(message)


@dataclass(frozen=True)
class Failure:
    """An error as it is reported to a client. grpc_code: its label in the metrics.

    overflow: the lengths, where the context length is exceeded.
    """

    status: int
    details: ErrorDetails
    grpc_code: StatusCode
    headers: Mapping[str, str] = field(default_factory=dict)
    overflow: ContextLengthError | None = None

    @property
    def body(self) -> ErrorBody:
        """The JSON that is sent."""
        return ErrorBody(error=self.details)

    def respond(self) -> Response:
        """Return the response of a request that has sent no status yet."""
        return JSONResponse(self.body.model_dump(), self.status, dict(self.headers))


def failure_of(
    error: Exception,
    model: type[RequestModel] | None = None,
    names: Mapping[str, str] = {},
) -> Failure:
    """Convert an error to what the client sees; log a text that it must not see.

    model: of the request's body. names: names of fields in the API, by the engine's names.
    """
    match error:
        case ApiError():
            details = _details(error.status, str(error), None, error.code)
            return Failure(error.status, details, StatusCode.INVALID_ARGUMENT, FINAL_HEADERS)
        case RequestValidationError():
            error = _validation_error(error, model)
        case HTTPException():
            details = _details(error.status_code, str(error.detail), None, None)
            headers = error.headers or {}
            return Failure(error.status_code, details, StatusCode.INVALID_ARGUMENT, headers)
    return _engine_failure(error, names)


def _engine_failure(error: Exception, names: Mapping[str, str]) -> Failure:
    status = status_of(error)
    headers = status.headers
    if status.http_code == 503:
        headers.setdefault("Retry-After", str(RETRY_AFTER_S))
    message, param, code = status.message, None, _TYPES_AND_CODES.get(status.http_code, _DEFAULT)[1]
    if isinstance(error, InvalidValueError):
        name = _renamed(error.field, names)
        kind = UnknownFieldError if isinstance(error, UnknownFieldError) else InvalidValueError
        message = str(kind(name, error.value, error.limit))
        param = name.removesuffix(" length")
    overflow = error if isinstance(error, ContextLengthError) else None
    if overflow is not None:
        code = "context_length_exceeded"
        message = f"{_overflow_text(overflow)} {message} ({code})"  # LangChain reads no code
    details = _details(status.http_code, message, param, code)
    return Failure(status.http_code, details, status.grpc_code, headers, overflow)


def _overflow_text(error: ContextLengthError) -> str:
    """Return the sentences by which clients recognize that a context length is exceeded."""
    limit, length = error.max_model_len, error.num_prompt_tokens
    known = f"This model's maximum context length is {limit} tokens. However, you requested"
    if error.max_tokens is None:
        return f"{known} {length} tokens in the prompt."
    total = length + error.max_tokens
    return f"{known} {total} tokens ({length} in the prompt, {error.max_tokens} in the completion)."


def _details(status: int, message: str, param: str | None, code: str | None) -> ErrorDetails:
    kind, _ = _TYPES_AND_CODES.get(status, _DEFAULT)
    return ErrorDetails(message=message, type=kind, param=param, code=code)


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """Replace the longest known prefix of a field's name by its name in the API."""
    known = [each for each in names if name == each or name.startswith((f"{each}[", f"{each}."))]
    if not known:
        return name
    longest = max(known, key=len)
    return names[longest] + name[len(longest) :]


def invalid_value(
    error: ValidationError, body: Any, model: type[RequestModel] | None = None
) -> InvalidValueError:
    """Convert an error of a request that was made from `body`.

    model: of the request, if a client sent it; fields of one that was made here have no hints.
    """
    findings = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
    return _validation_error(RequestValidationError(findings, body=body), model)


def _validation_error(
    error: RequestValidationError, model: type[RequestModel] | None
) -> InvalidValueError:
    """Convert one of pydantic's errors: for the members of a union, the most deeply nested."""
    body = error.body
    path, findings = _deepest(error)
    finding, name = findings[0], _field_path(path)
    match finding["type"]:
        case "missing" if not path:
            return InvalidValueError("body", None, "a JSON object")
        case "missing":
            return InvalidValueError(name, None, "given")
        case "json_invalid":
            where = f"{finding['ctx']['error']} at character {finding['loc'][-1]}"
            return InvalidValueError("body", body, f"JSON: {where}")
        case "extra_forbidden":
            return _unknown_field(name, finding["input"], path, model)
        case _:
            limits = dict.fromkeys(map(_limit, findings))
            value = _abbreviated(finding["input"])
            return InvalidValueError(name or "body", value, " or ".join(limits))


def _deepest(
    error: RequestValidationError,
) -> tuple[tuple[Any, ...], Sequence[Mapping[str, Any]]]:
    """Return the most deeply nested place, and its errors: all of the type, or one of the value.

    A list that is too long fits one member of a union, and is of the wrong type for the others. A
    text that is none of the literals of one member may be one of another's, or a number.
    """
    paths = [_path(each["loc"][1:], error.body, each["type"]) for each in error.errors()]
    deepest = max(paths, key=len)
    found = [each for path, each in zip(paths, error.errors(), strict=True) if path == deepest]
    of_value = [each for each in found if not each["type"].endswith("_type")]
    if of_value and all(each["type"] == "literal_error" for each in of_value):
        return deepest, [each for each in found if each["type"] not in _OBJECT_EXPECTED]
    return deepest, of_value[:1] or found


def _abbreviated(value: Any) -> Any:
    """Replace a long list or mapping by its length."""
    is_long = isinstance(value, list | dict) and len(value) > _MAX_NAME_CHARS
    return f"{len(value)} entries" if is_long else value


def _limit(finding: Mapping[str, Any]) -> str:
    """Convert pydantic's "Input should be ..." to the end of "it must be ..."."""
    if finding["type"] in _OBJECT_EXPECTED:
        return "a JSON object"
    match = _SHOULD.fullmatch(_ASIDE.sub("", finding["msg"]))
    if match is None:
        return str(finding["msg"])
    subject, verb, rest = match.groups()
    return rest if verb == "be" else f"a {subject.lower()} that {_THIRD_PERSON[verb]} {rest}"


def _path(loc: Sequence[Any], body: Any, kind: str) -> tuple[Any, ...]:
    """Return the place of an error in the body: pydantic's path without union member names."""
    path: list[Any] = []
    for index, step in enumerate(loc):
        if _has(body, step):
            body = body[step]
            path.append(step)
        elif kind == "missing" and index == len(loc) - 1:
            path.append(step)
    return tuple(path)


def _has(body: Any, step: Any) -> bool:
    if isinstance(body, dict):
        return step in body
    return isinstance(body, list) and isinstance(step, int) and step < len(body)


def _field_path(path: Iterable[Any]) -> str:
    """Format a path: `messages[0].content` for ("messages", 0, "content")."""
    text = ""
    for step in path:
        name = str(step)[:_MAX_NAME_CHARS]
        text += f"[{step}]" if isinstance(step, int) else f".{name}" if text else name
    return text


def _unknown_field(
    field: str, value: object, path: Sequence[Any], model: type[RequestModel] | None
) -> InvalidValueError:
    """Return the error of a field that a request does not have; path: that of `field`."""
    if model is None:
        return UnknownFieldError(field, value, "")
    name, models = str(path[-1])[:_MAX_NAME_CHARS], _models_at(path[:-1], model)
    for each in models:
        if name in each.refused:
            return InvalidValueError(field, value, each.refused[name])
    parent = _parent_of(name, model) if len(path) == 1 else None
    if parent is not None:
        limit = f'a field of {parent}, as in "{parent}": {{"{name}": ...}}'
        return InvalidValueError(field, value, limit)
    fields = [known for each in models for known in each.model_fields if known != name]
    nearest = difflib.get_close_matches(name, fields, n=1, cutoff=0.6)
    return UnknownFieldError(field, value, f"did you mean {nearest[0]}?" if nearest else "")


def _parent_of(name: str, model: type[RequestModel]) -> str | None:
    """Return the field of a request whose object has the field `name`; None without one.

    A field in a list of objects is not one of the request's options.
    """
    if name in model.parents:
        return model.parents[name]
    for parent, each_field in model.model_fields.items():
        if get_origin(each_field.annotation) is list:
            continue
        kinds = get_args(each_field.annotation) or (each_field.annotation,)
        objects = (each for each in kinds if isinstance(each, type) and issubclass(each, BaseModel))
        if any(name in each.model_fields for each in objects):
            return parent
    return None


def _models_at(path: Iterable[Any], model: type[RequestModel]) -> list[type[RequestModel]]:
    """Return the models that the object at a place of a request may have."""
    models = [model]
    for step in path:
        if isinstance(step, str):
            fields = [item for each in models for item in each.model_fields.items()]
            found = [each for name, each in fields if (each.alias or name) == step]
            kinds = [kind for each in found for kind in _classes_in(each.annotation)]
            models = [kind for kind in kinds if issubclass(kind, RequestModel)]
    return models


def _classes_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [kind for part in get_args(annotation) for kind in _classes_in(part)]
