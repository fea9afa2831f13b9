"""Orders for draft heads and adapters of several replicas."""

import asyncio
import pickle

import pytest

from cluster.replica.orders import (
    INTERNAL_FAULT,
    AbortOrder,
    OrderResult,
    answers_of,
    reports_of,
    result_of,
)
from specdec.types.drafters import DrafterOrder, DrafterReport
from specdec.types.errors import InvalidValueError, NotReadyError
from specdec.types.request import Caller

ORDER = DrafterOrder(version=2)
REFUSED = InvalidValueError("version", 2, "one of 1")


async def executed(replica_id="r1"):
    return DrafterReport(replica_id, num_rollbacks=3)


async def refused():
    raise REFUSED


async def broken():
    raise RuntimeError("a fault of ours")


def test_the_error_of_a_caller_becomes_a_fault_and_others_are_raised():
    assert asyncio.run(result_of(executed(), "r1", DrafterReport)) == OrderResult(
        DrafterReport("r1", (), False, 3)
    )
    result = asyncio.run(result_of(refused(), "r2", DrafterReport))
    assert (result.report.replica_id, result.report.fault) == ("r2", str(REFUSED))
    assert str(pickle.loads(pickle.dumps(result)).error) == str(REFUSED), "it crosses processes"


def test_an_error_of_ours_is_logged_and_a_fault_without_details(caplog):
    result = asyncio.run(result_of(broken(), "r3", DrafterReport))
    assert (result.report.replica_id, result.report.fault) == ("r3", INTERNAL_FAULT)
    assert "a fault of ours" in caplog.text
    assert (
        reports_of(ORDER, [OrderResult(DrafterReport("r1")), result], DrafterReport)[1]
        == result.report
    )
    with pytest.raises(RuntimeError, match="internal error"):
        reports_of(ORDER, [result], DrafterReport)


def test_replicas_that_are_lost_are_logged(caplog):
    assert answers_of([None, 3, RuntimeError("r4 is lost")], int) == [3]
    assert "r4 is lost" in caplog.text


def test_reports_are_sorted_and_include_the_faults_of_some_replicas():
    second = OrderResult(DrafterReport("r2", fault=str(REFUSED)), REFUSED)
    first = OrderResult(DrafterReport("r1"))
    results = [None, second, RuntimeError("lost"), first]
    lost = DrafterReport("unknown", fault="did not answer")
    assert reports_of(ORDER, results, DrafterReport) == (first.report, second.report, lost)
    known = (first.report, second.report)
    assert reports_of(DrafterOrder(), results, DrafterReport) == known, "a list"


def test_an_order_that_no_replica_executed_is_an_error():
    result = OrderResult(DrafterReport("r1", fault=str(REFUSED)), REFUSED)
    with pytest.raises(InvalidValueError, match="must be one of 1"):
        reports_of(ORDER, [result, None], DrafterReport)
    with pytest.raises(NotReadyError, match="no replica answered"):
        reports_of(ORDER, [RuntimeError("lost")], DrafterReport)
    with pytest.raises(InvalidValueError, match="replica_id is 'r9'; it must be the id"):
        reports_of(DrafterOrder(version=2, replica_id="r9"), [None], DrafterReport)


@pytest.mark.parametrize(
    ("request_id", "applies"),
    [("x", True), ("x_0", True), ("x_12", True), ("x_a", False), ("x_", False), ("x_1_2", False),
     ("y", False), ("xy_0", False), ("12", False)],
)  # fmt: skip
def test_an_abort_applies_to_a_request_and_to_the_prompts_of_a_batch(request_id, applies):
    assert AbortOrder("x", Caller("ann")).applies_to(request_id, Caller("ann")) == applies


def test_an_abort_applies_to_the_requests_of_its_caller():
    assert AbortOrder("", Caller("root"), is_for_all=True).applies_to("y", Caller("ann"))
    order = AbortOrder("x", Caller("ann"))
    assert not order.applies_to("x", Caller("bob"))
    assert not order.applies_to("x", Caller("ann", is_stranger=True))
    without_keys = AbortOrder("x", Caller("192.0.2.7", is_stranger=True))
    assert without_keys.applies_to("x", Caller("192.0.2.8", is_stranger=True))
