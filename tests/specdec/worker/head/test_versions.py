"""Versions of a draft head in the memory of a rank."""

import weakref

from specdec.types.drafters import MAX_LOADED_VERSIONS, HeadFile
from specdec.worker.head.versions import HeadVersions


class Head:
    """A head without weights."""


class Runner:
    def __init__(self):
        self.head = Head()

    def replace_head(self, head):
        self.head = head


def test_an_unused_version_is_dropped_before_another_is_loaded():
    runner, alive = Runner(), weakref.WeakSet()
    alive.add(runner.head)
    num_alive = []

    def load(directory):
        head = Head()
        alive.add(head)
        num_alive.append(len(alive))
        return head

    versions = HeadVersions(runner, load)
    for number in (2, 3, 4):
        assert versions.load(HeadFile(number, "head", "/heads")) == ""
        if number == 2:
            versions.switch(number)
    assert num_alive == [2, 3, MAX_LOADED_VERSIONS]
    versions.switch(1)  # the version before
    assert len(alive) == 2
