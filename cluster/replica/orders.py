"""Orders that several replicas execute: for draft heads, adapters, requests, prefix caches."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from specdec.types.adapters import AdapterOrder, AdapterReport
from specdec.types.drafters import DrafterOrder, DrafterReport
from specdec.types.errors import InvalidValueError, NotReadyError, SpecdecError
from specdec.types.request import Caller

logger = logging.getLogger(__name__)

T = TypeVar("T")
Report = TypeVar("Report", DrafterReport, AdapterReport)

INTERNAL_FAULT = "internal error; the log of the replica has the details"
_UNKNOWN_REPLICA, _NO_ANSWER = "unknown", "did not answer"


@dataclass(frozen=True)
class OrderResult(Generic[Report]):
    """Outcome of an order on one replica. error: None where it was executed."""

    report: Report
    error: Exception | None = None


@dataclass(frozen=True)
class AbortOrder:
    """Order to end a caller's requests with an id, and the prompts of its batch with that id.

    Clients without an API key are one caller: they exist only where the service has no keys.
    is_for_all: whether an operator ends all requests, with any id and caller.
    """

    request_id: str
    caller: Caller
    is_for_all: bool = False

    def applies_to(self, request_id: str, caller: Caller) -> bool:
        """Return whether a request is to end. Those of a batch `x` are `x_0`, `x_1`, and so on."""
        is_own = caller == self.caller or (caller.is_stranger and self.caller.is_stranger)
        batch, _, index = request_id.rpartition("_")
        is_of_batch = batch == self.request_id and index.isdecimal()
        return self.is_for_all or (is_own and (request_id == self.request_id or is_of_batch))


async def result_of(
    execution: Awaitable[Report], replica_id: str, kind: type[Report]
) -> OrderResult[Report]:
    """Wait for an execution, and return its report or its error. kind: of the report.

    An error of ours is logged here, and is a RuntimeError without details for the caller.
    """
    try:
        return OrderResult(await execution)
    except SpecdecError as error:
        return OrderResult(kind(replica_id, fault=str(error)), error)
    except Exception:
        logger.exception("an order failed")
        return OrderResult(kind(replica_id, fault=INTERNAL_FAULT), RuntimeError(INTERNAL_FAULT))


def answers_of(results: Iterable[object], kind: type[T]) -> list[T]:
    """Return the answers of one kind to a broadcast; log the errors of the other replicas.

    A replica that was not addressed answers None.
    """
    found: list[T] = []
    for each in results:
        if isinstance(each, kind):
            found.append(each)
        elif isinstance(each, BaseException):
            logger.warning("a replica did not answer", exc_info=each)
    return found


def reports_of(
    order: DrafterOrder | AdapterOrder, results: Collection[object], kind: type[Report]
) -> tuple[Report, ...]:
    """Return the reports of the replicas that executed an order, by id, with the others' faults.

    results: of a broadcast; None from a replica that was not addressed. One that did not answer has
    a report with a fault, except in a list. Raises the error of a replica where none executed the
    order.
    """
    found: list[OrderResult[Report]] = answers_of(results, OrderResult)
    if not found and order.replica_id:
        limit = "the id of a replica, as shown by `specdec status`, or left out"
        raise InvalidValueError("replica_id", order.replica_id, limit)
    if not found:
        raise NotReadyError("no replica answered; send the order again")
    errors = [each.error for each in found if each.error is not None]
    if len(errors) == len(found):
        raise errors[0]
    reports = [each.report for each in found]
    if not order.replica_id and order != type(order)():  # it changes all replicas
        num_lost = sum(isinstance(each, BaseException) for each in results)
        reports += [kind(_UNKNOWN_REPLICA, fault=_NO_ANSWER)] * num_lost
    return tuple(sorted(reports, key=lambda each: each.replica_id))


def all_flushed(results: Sequence[object]) -> bool:
    """Return whether every replica has emptied its prefix cache.

    results: of a broadcast. Raises NotReadyError if a replica did not answer.
    """
    found = answers_of(results, bool)
    if len(found) < len(results):
        raise NotReadyError("a replica did not answer; send the request again")
    return all(found)
