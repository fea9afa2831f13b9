"""Fair division of a draft device's time: the loop of a shared worker, with a clocked model."""

import heapq
from dataclasses import dataclass, field
from statistics import mean
from types import SimpleNamespace

import pytest

from cluster.workers.messages import draft_serialization
from cluster.workers.shared_draft.draft_shares import DraftShares, Waiting, share_beside
from cluster.workers.shared_draft.shared_draft_loop import SharedDraftLoop
from specdec.types.draft_messages import AheadOutput, AheadRow, DraftOutput, DraftRow, DraftStep
from tests.clock import Clock

PASS_S = 0.001
"""Seconds of a draft model's pass, after which its drafts ahead can pause or end."""


@dataclass
class Router:
    """A Router with a target whose steps take `target_s`.

    num_drafts: passes of drafts that each step waits for. num_ahead: of drafts ahead, which are
    ordered when a step begins, and end with it.
    """

    target_s: float
    num_drafts: int = 0
    num_ahead: int = 0
    used_s: float = 0.0
    num_steps: int = 0
    num_whole: int = 0
    waits_s: list[float] = field(default_factory=list)
    sent_at_s: float = 0.0

    def message(self, step_id):
        drafts = (DraftRow(0, 0, (1,), self.num_drafts, 1),) if self.num_drafts else ()
        ahead = (AheadRow(0, 0, (1,), 0, (1,), self.num_ahead, 1),) if self.num_ahead else ()
        return draft_serialization.encode_draft_step(
            DraftStep(step_id, (), (), (), (), drafts, () if drafts else ahead)
        )


class ClockedRunner:
    """A draft model whose passes take PASS_S of simulated time, of the Router with the rows."""

    def __init__(self, clock, routers):
        self._clock, self._routers = clock, routers

    def draft(self, step):
        for row in step.drafts:
            for _ in range(row.num_draft_tokens):
                self._run(row)
        return DraftOutput(step.step_id, ())

    def draft_ahead(self, step, is_interrupted):
        [row] = step.ahead
        num_left = row.num_draft_tokens
        while num_left and not is_interrupted():
            self._run(row)
            num_left -= 1
        return AheadOutput(step.step_id, (), is_whole=not num_left)

    def _run(self, row):
        self._clock.now_s += PASS_S
        self._routers[row.seq_id % len(self._routers)].used_s += PASS_S


class ClockedLoop(SharedDraftLoop):
    """The loop, whose messages arrive by the clock instead of sockets."""

    def __init__(self, routers):
        self.clock = Clock()
        super().__init__(ClockedRunner(self.clock, routers), len(routers), 4, self.clock)
        self._routers = routers
        first_s = self.clock.now_s
        self._due = [(first_s + 0.0001 * index, index) for index in range(len(routers))]
        listener = SimpleNamespace(endpoint=None, poll_lost=lambda: False, close=lambda: None)
        for _ in routers:
            self.admit(lambda: listener, len(routers))
        self._seat_admitted()
        for index, router in enumerate(routers):
            self._seats[index].socket = SimpleNamespace(
                send=lambda answer, own=(index, router): self._answer(*own, answer),
                close=lambda: None,
                pollable=-1,
            )

    def run_for(self, seconds):
        self._ends_at_s = self.clock.now_s + seconds
        self.run()

    def _receive(self, timeout_ms):
        if timeout_ms and self._due:
            self.clock.now_s = max(self.clock.now_s, self._due[0][0])
        while self._due and self._due[0][0] <= self.clock.now_s:
            at_s, index = heapq.heappop(self._due)
            router, seat = self._routers[index], self._seats[index]
            router.sent_at_s, seat.received_at_s = at_s, at_s
            router.num_steps += 1
            self._keep(seat, router.message(router.num_steps))
            if not router.num_drafts:
                heapq.heappush(self._due, (at_s + router.target_s, index))
        self._is_stopped = self.clock.now_s >= self._ends_at_s

    def _answer(self, index, router, answer):
        if draft_serialization.is_ahead_output(answer):
            router.num_whole += draft_serialization.decode_ahead_output(answer).is_whole
        else:
            wait_s = self.clock.now_s - router.sent_at_s - router.num_drafts * PASS_S
            router.waits_s.append(wait_s)
            heapq.heappush(self._due, (self.clock.now_s + router.target_s, index))


def run(*routers, seconds=10):
    loop = ClockedLoop(routers)
    loop.run_for(seconds)
    return loop


AHEAD = {"target_s": 0.02, "num_ahead": 18}
"""Drafts that take most of the time of a device, and are ended by the next step."""


@pytest.mark.parametrize(
    "others",
    [
        pytest.param([AHEAD, AHEAD], id="equal"),
        pytest.param([{"target_s": 0.1, "num_ahead": 1000}], id="slow target"),
        pytest.param([{"target_s": 0.0, "num_drafts": 10}], id="steps that wait"),
        pytest.param([{"target_s": 0.004, "num_drafts": 8}], id="steps that wait less"),
    ],
)
def test_routers_that_ask_for_more_than_a_device_gives_have_even_parts_of_it(others):
    routers = [Router(**each) for each in (AHEAD, *others)]
    run(*routers, seconds=30)
    used = [router.used_s for router in routers]
    assert max(used) < 1.05 * min(used)
    assert sum(used) > 0.95 * 30, "the device does not wait"


def test_drafts_ahead_that_fit_complete():
    routers = [Router(0.02, num_ahead=9) for _ in range(2)]
    run(*routers)
    assert all(router.num_whole >= 0.95 * router.num_steps for router in routers)


def test_long_drafts_ahead_pause_for_short_ones_and_both_complete():
    slow, fast = Router(0.5, num_ahead=350), Router(0.02, num_ahead=4)
    run(slow, fast)
    assert slow.num_whole >= 0.9 * slow.num_steps
    assert fast.num_whole >= 0.85 * fast.num_steps


def test_a_greedy_router_gets_what_a_modest_one_leaves():
    greedy, modest = Router(0.5, num_ahead=10**6), Router(0.02, num_ahead=4)
    run(greedy, modest)
    assert modest.used_s > 0.85 * 10 * 0.2
    assert greedy.used_s > 0.75 * 10


def test_a_step_waits_for_one_pass_of_another_routers_drafts_ahead():
    waiting, ahead = Router(0.02, num_drafts=4), Router(0.5, num_ahead=300)
    run(waiting, ahead)
    assert max(waiting.waits_s) <= PASS_S + 1e-9
    assert ahead.num_whole >= 0.9 * ahead.num_steps, "its drafts go on after those of the step"


def test_steps_of_many_routers_are_answered_in_turn():
    routers = [Router(0.005, num_drafts=3) for _ in range(4)]
    run(*routers)
    round_s = len(routers) * routers[0].num_drafts * PASS_S
    steps = [len(router.waits_s) for router in routers]
    assert max(steps) <= 1.02 * min(steps)
    assert all(mean(router.waits_s) < round_s for router in routers)
    assert max(max(router.waits_s) for router in routers) <= 2 * round_s


def test_a_router_that_was_idle_has_no_credit_for_it():
    clock = Clock()
    shares = DraftShares(clock)
    shares.join(0)
    shares.join(1)
    for _ in range(100):
        shares.wait(0)
        shares.first([Waiting(0, False)])
        shares.record(0, 0.1, is_urgent=False)
        clock.now_s += 0.1
    order = []
    shares.wait(0)
    shares.wait(1)
    for _ in range(10):
        order.append(shares.first([Waiting(0, False), Waiting(1, False)]))
        shares.record(order[-1], 0.1, is_urgent=False)
    assert order.count(0) >= 4, "the other one does not catch up on ten seconds"


def test_the_share_of_a_router_is_what_the_others_leave():
    shares = DraftShares(Clock())
    shares.join(0)
    shares.join(1)
    shares.record(0, 0.3, is_urgent=True)
    assert shares.share(0) == 1
    assert shares.share(1) == pytest.approx(0.7)
    shares.record(0, 0.6, is_urgent=True)
    assert shares.share(1) == 0.5, "an even share is left in any case"
    shares.leave(0)
    assert shares.share(1) == 1


def test_the_load_of_a_device_is_known_by_router():
    clock = Clock()
    shares = DraftShares(clock)
    assert shares.uses() == {}
    assert share_beside(()) == 1
    for router in (0, 1):
        shares.join(router)
    for _ in range(400):  # 0.4 s of each second, in messages of 10 ms
        clock.now_s += 0.025
        shares.record(0, 0.01, is_urgent=True)
    uses = shares.uses()
    assert [use.recent for use in uses.values()] == [pytest.approx(0.4, abs=0.02), 0]
    assert [use.step_s for use in uses.values()] == [pytest.approx(0.01), 0]
    assert share_beside(uses.values()) == pytest.approx(0.6, abs=0.02), "of one that would join"
    assert shares.share(0) == 1, "no other one drafts"
    clock.now_s += 10
    assert shares.uses()[0].recent < 0.001
    assert shares.uses()[0].step_s == pytest.approx(0.01), "of the last messages"
