"""The choice of a replica: conversations stay where their prefix is, and loads stay balanced."""

import random

import pytest

from cluster.api.base.prefix_record import PREFIX_WORTH
from cluster.api.base.routing_hint import RoutingHint
from cluster.serve.replica_choice import (
    MAX_LOAD_FACTOR,
    Load,
    ReplicaChooser,
    choose_replica,
    two_of,
)

NUM_CONVERSATIONS, NUM_TURNS, NUM_OPEN = 40, 6, 8
BLOCK_BYTES = 64  # 16 tokens of 4 bytes


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def hint_of(text, session="", max_tokens=64):
    return RoutingHint.of(("model",), text.encode(), max_tokens, session)


def chooser_of(*names, clock=None):
    chooser = ReplicaChooser(clock or Clock())
    chooser.set_replicas(dict.fromkeys(names))
    return chooser


LONG = "What is the shortest path between these towns? " * 100


def test_a_conversation_stays_on_its_replica_while_others_spread():
    chooser = chooser_of("a", "b")
    first = chooser.choose("1", hint_of(LONG))
    other = chooser.choose("2", hint_of("Another question. " + LONG))
    assert {first, other} == {"a", "b"}
    assert chooser.choose("3", hint_of(LONG + " And back?")) == first
    assert chooser.choose("4", hint_of("Another question. " + LONG + " And back?")) == other


def test_a_prefix_is_given_up_for_a_load_that_it_is_not_worth():
    hint = hint_of(LONG)
    matched = {"a": 1000, "b": 0}
    work = hint.prompt_tokens - 1000 + hint.output_tokens
    # With a load of x on a alone, the limit is MAX_LOAD_FACTOR * (x + work) / 2 + the worth.
    most = (MAX_LOAD_FACTOR * work / 2 + PREFIX_WORTH * 1000) / (1 - MAX_LOAD_FACTOR / 2)
    assert choose_replica(hint, {"a": most - 1, "b": 0.0}, matched, b"") == "a"
    assert choose_replica(hint, {"a": most + 1, "b": 0.0}, matched, b"") == "b"


def test_of_replicas_with_the_same_prefix_the_less_loaded_one_is_chosen():
    matched = {"a": 500, "b": 500, "c": 0}
    loads = {"a": 800.0, "b": 700.0, "c": 0.0}
    assert choose_replica(hint_of(LONG), loads, matched, b"anchor") == "b"


def test_without_a_prefix_one_of_two_pseudo_random_replicas_is_chosen():
    names = [f"replica {i}" for i in range(10)]
    loads, matched = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0)
    chosen = {choose_replica(hint_of("short"), loads, matched, bytes([i])) for i in range(100)}
    assert len(chosen) > 5
    pair = two_of(names, b"anchor")
    busy = {**loads, pair[0]: 100.0}
    assert choose_replica(hint_of("short"), busy, matched, b"anchor") == pair[1]


def test_a_session_gives_every_process_the_same_two_candidates():
    names = [f"replica {i}" for i in range(10)]
    first = chooser_of(*names).choose("1", hint_of("one", "session"))
    again = chooser_of(*names).choose("9", hint_of("quite another prompt " * 20, "session"))
    assert {first, again} <= set(two_of(names, hint_of("", "session").session))


def test_a_session_stays_on_its_replica_without_a_common_prefix():
    chooser = chooser_of("a", "b")
    replica = chooser.choose("1", hint_of("x" * 400, "session"))
    for i in range(2, 5):
        chooser.end(str(i - 1))
        assert chooser.choose(str(i), hint_of(f"{i} " * 200, "session")) == replica


def test_a_lost_replica_is_forgotten_and_a_new_one_begins_with_the_mean_load():
    chooser = chooser_of("a", "b")
    replica = chooser.choose("1", hint_of(LONG))
    (other,) = {"a", "b"} - {replica}
    chooser.set_replicas({other: None, "c": None})
    assert chooser.choose("1", hint_of(LONG)) in {other, "c"}
    chosen = [chooser.choose(str(i), hint_of(f"{i} {LONG}")) for i in range(20)]
    assert 8 <= chosen.count("c") <= 12


def test_a_request_that_was_sent_elsewhere_is_counted_there():
    chooser = chooser_of("a", "b")
    chosen = chooser.choose("1", hint_of(LONG))
    (other,) = {"a", "b"} - {chosen}
    chooser.move("1", other)
    chooser.move("unknown", other)
    assert chooser.choose("2", hint_of("Another " + LONG)) == chosen


def test_the_load_of_open_requests_does_not_decay():
    load = Load()
    load.begin(100, 0.0)
    load.begin(50, 0.0)
    assert load.tokens(0.0) == 150
    assert load.tokens(3600.0) == 150
    load.end(100)
    assert load.tokens(0.0) == 150
    assert load.tokens(3600.0) == 50


def test_requests_whose_end_is_never_reported_are_ended():
    clock = Clock()
    chooser = chooser_of("a", "b", clock=clock)
    stuck = chooser.choose("1", hint_of(LONG))
    clock.now_s = 1000.0
    assert chooser.choose("2", hint_of("Another " + LONG)) != stuck
    clock.now_s = 4000.0
    chooser.end("2")
    chosen = [chooser.choose(str(i), hint_of(f"{i} {LONG}")) for i in range(3, 23)]
    assert 9 <= chosen.count(stuck) <= 11


class Replica:
    """A prefix cache of full blocks without a limit, and what was computed."""

    def __init__(self):
        self.blocks, self.computed, self.requests = set(), 0, 0

    def answer(self, prompt, answer):
        """Return the prompt tokens that had to be computed."""
        cached = 0
        while cached + BLOCK_BYTES < len(prompt) and prompt[: cached + BLOCK_BYTES] in self.blocks:
            cached += BLOCK_BYTES
        text = prompt + answer
        self.blocks |= {text[:end] for end in range(BLOCK_BYTES, len(text) + 1, BLOCK_BYTES)}
        computed = (len(prompt) - cached) // 4
        self.computed += computed + len(answer) // 4
        self.requests += 1
        return computed


def computed_and_imbalance(choose, end, seed, shared):
    """Run conversations whose turns interleave; return computed prompt tokens and loads' maximum
    over their mean, by tokens and by requests."""
    source = random.Random(seed)
    replicas = {"a": Replica(), "b": Replica()}
    texts = [shared + f"Conversation {i}. " for i in range(NUM_CONVERSATIONS)]
    waiting = [i for i in range(NUM_CONVERSATIONS) for _ in range(NUM_TURNS)]
    source.shuffle(waiting)
    computed, running = 0, []
    for number, i in enumerate(waiting):
        texts[i] += "".join(source.choices("abcdefgh ", k=source.randint(100, 400)))
        name = choose(str(number), hint_of(texts[i]))
        answer = "".join(source.choices("ijklmnop ", k=256))
        computed += replicas[name].answer(texts[i], answer)
        texts[i] += answer
        running.append(str(number))
        if len(running) == NUM_OPEN:
            end(running.pop(source.randrange(NUM_OPEN)))
    ratios = []
    for figure in ("computed", "requests"):
        loads = [getattr(each, figure) for each in replicas.values()]
        ratios.append(max(loads) / (sum(loads) / len(loads)))
    return computed, max(ratios)


@pytest.mark.parametrize("shared", ["", "You are a helpful assistant. " * 40])
@pytest.mark.parametrize("seed", range(2))
def test_conversations_compute_two_thirds_of_what_random_choice_does(seed, shared):
    """The bar of 1.5 for 40 conversations of 6 turns on two replicas, and of 1.2 for the load."""
    chooser = chooser_of("a", "b")
    ours, imbalance = computed_and_imbalance(chooser.choose, chooser.end, seed, shared)
    source = random.Random(seed)
    random_choice = computed_and_imbalance(
        lambda *_: source.choice("ab"), lambda _: None, seed, shared
    )
    assert random_choice[0] / ours >= 1.5
    assert imbalance <= 1.2
