"""Messages about profiles, and the inbox of their reports."""

from cluster.workers.profile_messages import (
    END,
    ProfileInbox,
    WorkerProfileOrder,
    is_for_profiles,
    is_report,
    order_in,
)
from cluster.workers.serialization import CAUGHT_UP, STOP, encode_error, encode_output, encode_step
from specdec.types.messages import StepInput, VerifyOutput
from specdec.types.profile import OperationTime, WorkerProfile

ORDER = WorkerProfileOrder("draft model", 3, "/traces/now", 2**20)


def profile(rank):
    return WorkerProfile("target", rank, 3, "/x", 5, (OperationTime("a", 1, 0.5, 1.5, 0.0),))


def test_messages_of_steps_are_distinguished_from_those_of_profiles():
    step, output = StepInput(-1, (), (), (), ()), VerifyOutput(-1, ())
    for frames in (STOP, CAUGHT_UP, encode_step(step), encode_output(output), encode_error("no")):
        assert not is_for_profiles(frames)
        assert not is_report(frames)
    assert is_for_profiles(END)
    assert is_for_profiles(ORDER.encode())
    assert is_report(ORDER.report(profile(0)))


def test_orders_arrive_as_they_were_sent():
    assert order_in(ORDER.encode()) == ORDER
    assert order_in(END) is None


def test_all_reports_are_awaited_and_those_of_earlier_orders_are_dropped():
    inbox = ProfileInbox(ORDER, 2)
    inbox.take(WorkerProfileOrder("target", 3, "/traces/before", 1).report(profile(0)))
    for rank in (1, 0):
        assert inbox.reports is None
        inbox.take(ORDER.report(profile(rank)))
    assert inbox.reports == (profile(0), profile(1))
