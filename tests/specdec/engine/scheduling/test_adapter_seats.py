"""Places of adapters in a batch, and the sequences that overtake those which wait for one."""

import itertools
from types import SimpleNamespace

from specdec.engine.scheduling.adapter_seats import AdapterSeats
from specdec.types.messages import BASE_MODEL


def waiting(*adapter_ids):
    """Return sequences by rank."""
    counter = itertools.count()
    return [
        SimpleNamespace(request=SimpleNamespace(adapter_id=each), rank=(float(next(counter)), 0))
        for each in adapter_ids
    ]


def seats(max_loras=1, most_overtaking=2, ready=lambda _: True):
    return AdapterSeats(max_loras, most_overtaking, ready)


def test_sequences_of_running_adapters_and_of_the_model_overtake():
    queue, (running,) = waiting(2, 1, BASE_MODEL), waiting(1)
    assert seats().first(queue, [running]) is queue[1]
    assert seats().first([queue[0], queue[2]], [running]) is queue[2]
    assert seats().first(queue[:1], [running]) is None
    assert seats(max_loras=2).first(queue, [running]) is queue[0]
    assert seats().first(queue, waiting(BASE_MODEL)) is queue[0]


def test_a_sequence_that_waits_for_a_seat_is_not_starved():
    places, (first, *later) = seats(), waiting(2, 1, 1, 1, 1)
    running = waiting(1)
    for _ in range(2):
        seq = places.first([first, *later], running)
        assert seq is later.pop(0)
        places.admitted(seq)
        running.append(seq)
    assert places.first([first, *later], running) is None, "it was overtaken twice"
    (base,) = waiting(BASE_MODEL)
    assert places.first([first, *later, base], running) is base
    assert places.first([first, *later], []) is first
    places.admitted(first)
    assert places.first(later, [first]) is None
    assert places.first(later, []) is later[0]


def test_an_adapter_that_is_loading_takes_no_seat():
    places = seats(ready=lambda adapter_id: adapter_id != 2)
    queue = waiting(2, 1)
    assert places.first(queue, []) is queue[1]


def test_all_sequences_that_may_join_are_listed():
    places, queue = seats(most_overtaking=1), waiting(1, 2, 1, BASE_MODEL)
    (running,) = waiting(1)
    assert list(places.that_may_join(queue, [running])) == [queue[0], queue[2], queue[3]]
    places.admitted(queue[2])
    assert list(places.that_may_join(queue[1:], [running])) == [queue[3]], "overtaken once"
