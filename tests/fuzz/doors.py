"""The front doors: each takes a numbered input and returns how it was answered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from random import Random
from typing import ClassVar

from specdec.types.errors import SpecdecError

ACCEPTED = "accepted"


class ViolationError(Exception):
    """An answer that no input may get."""


class Door(ABC):
    """A front door. share: of all inputs, relative to the other doors."""

    name: ClassVar[str]
    share: ClassVar[int]
    is_concurrent: ClassVar[bool] = False

    def try_number(self, seed: int, number: int) -> str:
        """Send the input that is a function of seed and number; return the kind of its answer.

        Raises ViolationError.
        """
        try:
            return self.enter(Random(f"{seed} {self.name} {number}"))
        except ViolationError:
            raise
        except Exception as error:
            raise ViolationError(f"{type(error).__name__}: {error}") from error

    @abstractmethod
    def enter(self, random: Random) -> str:
        """Send an input; any exception is a violation."""


def typed(error: SpecdecError) -> str:
    """Return the kind of an error that is meant for users: one line, and no internal texts."""
    text = str(error)
    if "Traceback" in text or "/site-packages/" in text:
        raise ViolationError(f"{type(error).__name__} with internal texts: {text[:300]}")
    if "\n" in text:
        raise ViolationError(f"{type(error).__name__} of several lines: {text[:300]!r}")
    return type(error).__name__
