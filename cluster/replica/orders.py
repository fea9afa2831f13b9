"""Orders for draft heads and adapters that several replicas execute."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from specdec.types.adapters import AdapterOrder, AdapterReport
from specdec.types.drafters import DrafterOrder, DrafterReport
from specdec.types.errors import InvalidValueError, NotReadyError, SpecdecError

logger = logging.getLogger(__name__)

T = TypeVar("T")
Report = TypeVar("Report", DrafterReport, AdapterReport)

INTERNAL_FAULT = "internal error; the log of the replica has the details"


@dataclass(frozen=True)
class OrderResult(Generic[Report]):
    """Outcome of an order on one replica. error: None where it was executed."""

    report: Report
    error: Exception | None = None


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
    order: DrafterOrder | AdapterOrder, results: Iterable[object], kind: type[Report]
) -> tuple[Report, ...]:
    """Return the reports of the replicas that executed an order, by id, with the others' faults.

    results: of a broadcast; those that are no OrderResult come from replicas that were not
    addressed or are lost. Raises the error of a replica where none executed the order.
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
    return tuple(sorted((each.report for each in found), key=lambda each: each.replica_id))
