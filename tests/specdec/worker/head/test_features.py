"""Features of passes whose states wait before they are written to their slots."""

import pytest
import torch

from specdec.kernels.reference.forward_batch import Chunk, ForwardBatch, SlotMove
from specdec.worker.head.features import MAX_WAITING_TOKENS, HeadFeatures

BLOCK_SIZE = 4
TABLE = (3, 0, 2, 1)


class Head:
    """A head whose feature is the sum of a token's states; it counts its projections."""

    device = torch.device("cpu")
    feature_size = 1

    def __init__(self, factor=1.0):
        self.factor, self.num_calls = factor, 0

    def features(self, states, runs=()):
        self.num_calls += 1
        return self.factor * states.flatten(1).sum(1, keepdim=True)


def add(features, start, values):
    """Add a pass whose tokens have the states [value, 0]."""
    batch = ForwardBatch([Chunk([0] * len(values), start, TABLE)], BLOCK_SIZE)
    features.add(batch, torch.tensor([[value, 0.0] for value in values]))


def slot(place):
    return TABLE[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE


def read(features, places):
    return features.read([slot(place) for place in places]).flatten().tolist()


@pytest.fixture(params=[True, False], ids=["features", "states"])
def stores_features(request):
    return request.param


def make(stores_features, num_slots=16, head=None):
    head = head or Head()
    return head, HeadFeatures(head, num_slots, torch.float32, stores_features=stores_features)


def test_the_last_pass_over_a_slot_counts(stores_features):
    _, features = make(stores_features)
    add(features, 0, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    add(features, 4, [7.0, 8.0, 9.0])
    add(features, 5, [10.0])
    assert read(features, range(7)) == [1, 2, 3, 4, 7, 10, 9]
    add(features, 0, [11.0])
    assert read(features, [6, 0, 5]) == [9, 11, 10]


def test_the_newest_pass_is_read_in_any_order(stores_features):
    _, features = make(stores_features)
    add(features, 0, [1.0, 2.0, 3.0, 4.0])
    add(features, 2, [5.0, 6.0, 7.0, 8.0])
    assert read(features, [3, 4, 5]) == [6, 7, 8]
    assert read(features, [5, 2]) == [8, 5]
    assert read(features, [1, 2]) == [2, 5]


def test_tokens_move_with_the_kv(stores_features):
    _, features = make(stores_features)
    add(features, 2, [1.0, 2.0, 3.0])
    features.move([SlotMove(slot(3), slot(2)), SlotMove(slot(4), slot(3))])
    assert read(features, [2, 3, 4]) == [2, 3, 3]


def test_a_projection_is_shared_by_the_tokens_of_many_passes(stores_features):
    """On a CPU nothing is projected until a draft needs it."""
    head, features = make(stores_features, 4 * BLOCK_SIZE)
    for index in range(2 * MAX_WAITING_TOKENS):
        add(features, index % 16, [float(index)])
    assert head.num_calls == (2 if stores_features else 0)
    first = 2 * MAX_WAITING_TOKENS - 16
    assert read(features, range(16)) == [first + place for place in range(16)]


def test_another_head_projects_the_states_that_come_later(stores_features):
    _, features = make(stores_features)
    add(features, 0, [1.0])
    features.use(Head(factor=10.0))
    add(features, 1, [2.0])
    assert read(features, [0, 1]) == [1 if stores_features else 10, 20]
