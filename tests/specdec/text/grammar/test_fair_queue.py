"""Turns of callers, on a simulated clock with a compiler that takes known seconds."""

import heapq
import random

import pytest

from specdec.text.grammar.fair_queue import FairQueue
from specdec.types.errors import OverloadedError

BOMB_S, ORDINARY_S = 1.0, 0.01


class SimulatedCompiler:
    """Threads that compile the items of a queue; `ended_at_s` by item."""

    def __init__(self, num_threads):
        self.queue = FairQueue()
        self.now_s = 0.0
        self.ended_at_s = {}
        self._num_free = num_threads
        self._seconds = {}
        self._running = []  # (end, item)

    def put(self, caller, item, seconds):
        self._seconds[item] = seconds
        self.queue.put(item, caller, 16)
        self._begin()

    def run_until(self, now_s):
        while self._running and self._running[0][0] <= now_s:
            self.now_s, item = heapq.heappop(self._running)
            self.ended_at_s[item] = self.now_s
            self.queue.finish(item)
            self._num_free += 1
            self._begin()
        self.now_s = now_s

    def _begin(self):
        while self._num_free and len(self.queue):
            item = self.queue.take()
            self._num_free -= 1
            heapq.heappush(self._running, (self.now_s + self._seconds[item], item))


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("at_s", [0.0, 0.3, 0.99, 2.5, 5.7])
def test_bombs_delay_another_caller_by_at_most_one_compilation(num_threads, at_s):
    compiler = SimulatedCompiler(num_threads)
    for number in range(16):
        compiler.put("bomber", f"bomb {number}", BOMB_S)
    compiler.run_until(at_s)
    compiler.put("user", "ordinary", ORDINARY_S)
    compiler.run_until(100.0)
    assert compiler.ended_at_s["ordinary"] - at_s <= BOMB_S + ORDINARY_S + 1e-9


def test_two_callers_share_the_threads():
    compiler = SimulatedCompiler(num_threads=2)
    for caller in ("bomber", "user"):
        for number in range(3):
            compiler.put(caller, f"{caller} {number}", BOMB_S)
    compiler.run_until(100.0)
    ended = sorted(compiler.ended_at_s.items(), key=lambda each: each[1])
    assert {item for item, _ in ended[:2]} == {"bomber 0", "bomber 1"}  # before the user came
    assert {item for item, _ in ended[2:4]} == {"bomber 2", "user 0"}
    assert {item for item, _ in ended[4:]} == {"user 1", "user 2"}


def test_callers_are_served_in_turn():
    queue = FairQueue()
    for number in range(2):
        for caller in "abc":
            queue.put(caller + str(number), caller, 8)
    taken = []
    while len(queue):
        taken.append(queue.take())
        queue.finish(taken[-1])
    assert taken == ["a0", "b0", "c0", "a1", "b1", "c1"]


@pytest.mark.parametrize("is_never_idle", [False, True])
def test_callers_without_items_are_forgotten(is_never_idle):
    queue, running = FairQueue(), []
    for caller in range(9):
        queue.put(caller, caller, 8)
        running.append(queue.take())
        if len(running) > is_never_idle:
            queue.finish(running.pop(0))
    assert len(queue._callers) == len(running) == is_never_idle


def test_an_item_of_two_callers_runs_at_the_turn_of_either():
    queue = FairQueue()
    for item in ("bomb 0", "bomb 1", "shared"):
        assert queue.put(item, "bomber", 8)
    assert queue.take() == "bomb 0"
    assert not queue.put("shared", "user", 8)
    assert not queue.put("shared", "user", 8)
    assert queue.take() == "shared"
    assert not queue.put("shared", "late", 8), "it runs already"
    assert queue.take() == "bomb 1"
    assert len(queue) == 0


def test_the_limit_is_for_each_caller_and_includes_running_items():
    queue = FairQueue()
    queue.put(1, "a", 2)
    queue.put(2, "a", 2)
    queue.take()
    with pytest.raises(OverloadedError, match=r"2 grammars of this client .* \(limit 2\)"):
        queue.put(3, "a", 2)
    assert queue.put(3, "b", 2)
    queue.finish(1)
    assert queue.put(4, "a", 2)


def test_a_caller_with_many_items_is_not_starved_by_callers_with_one_at_a_time():
    queue, taken = FairQueue(), []
    for number in range(8):
        queue.put(("many", number), "many", 16)
    for number in range(100):
        for caller in ("one", "other"):
            queue.put((caller, number), caller, 16)
        for _ in range(2):
            taken.append(queue.take())
            queue.finish(taken[-1])
        if len(queue) == 0:
            break
    assert [caller for caller, _ in taken[:12]].count("many") == 4


def test_a_caller_with_two_items_is_not_starved_by_new_callers():
    queue, taken = FairQueue(), []
    for item in ("first", "second"):
        queue.put(item, "waiting", 2)
    for new in range(5):
        queue.put(new, new, 2)
        taken.append(queue.take())
        queue.finish(taken[-1])
    assert taken == ["first", 0, "second", 1, 2]


def test_random_operations_lose_no_item_and_repeat_none():
    rng, queue = random.Random(0), FairQueue()
    waiting, running, num_taken = set(), [], 0
    for number in range(5000):
        operation = rng.choice(("put", "put", "put again", "take", "finish"))
        if operation.startswith("put"):
            again = operation == "put again" and waiting
            item = rng.choice(sorted(waiting)) if again else number
            try:
                is_new = queue.put(item, rng.choice("abcde"), 4)
            except OverloadedError:
                continue
            assert is_new == (item not in waiting)
            waiting.add(item)
        elif operation == "take" and waiting:
            running.append(queue.take())
            waiting.remove(running[-1])
            num_taken += 1
        elif operation == "finish" and running:
            queue.finish(running.pop(rng.randrange(len(running))))
        assert len(queue) == len(waiting) <= 5 * 4
    assert num_taken > 500


def test_a_discarded_item_is_taken_for_no_caller():
    queue = FairQueue()
    for caller in ("ann", "bob"):
        queue.put("shared", caller, 2)
    queue.put("own", "bob", 2)
    assert queue.discard("shared")
    assert (queue.num_open("ann"), queue.num_open("bob"), queue.num_open("eve")) == (0, 1, 0)
    assert queue.take() == "own"
    assert not queue.discard("own"), "it runs"
    assert not queue
