"""Orders for the versions of draft heads that several replicas execute."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from dataclasses import dataclass

from specdec.types.drafters import DrafterOrder, DrafterReport
from specdec.types.errors import InvalidValueError, NotReadyError, SpecdecError


@dataclass(frozen=True)
class OrderResult:
    """What became of an order on one replica. error: None where it was executed."""

    report: DrafterReport
    error: SpecdecError | None = None


async def result_of(execution: Awaitable[DrafterReport], replica_id: str) -> OrderResult:
    """Wait for an execution, and return its report or the error that its caller should see."""
    try:
        return OrderResult(await execution)
    except SpecdecError as error:
        return OrderResult(DrafterReport(replica_id, fault=str(error)), error)


def reports_of(order: DrafterOrder, results: Iterable[object]) -> tuple[DrafterReport, ...]:
    """Return the reports of the replicas that executed an order, by id, with the others' faults.

    results: of a broadcast; those that are no OrderResult come from replicas that were not
    addressed or are lost. Raises the error of a replica where none executed the order.
    """
    found = [each for each in results if isinstance(each, OrderResult)]
    if not found and order.replica_id:
        limit = "the id of a replica, as shown by `specdec status`, or left out"
        raise InvalidValueError("replica_id", order.replica_id, limit)
    if not found:
        raise NotReadyError("no replica answered; send the order again")
    errors = [each.error for each in found if each.error is not None]
    if len(errors) == len(found):
        raise errors[0]
    return tuple(sorted((each.report for each in found), key=lambda each: each.replica_id))
