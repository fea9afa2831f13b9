"""The interface of a drafter in training, and the registry of methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from specdec.kernels.forward_batch import HiddenStates
from specdec.training.batches import Batch
from specdec.training.target import Target
from specdec.types.errors import InvalidValueError


class Drafter(nn.Module, ABC):
    """A drafter that is trained for all bases of a batch at once.

    depth: draft tokens behind each base. taps: as in `specdec.models.heads.base.DraftHead`.
    token_ids: the target's id of each draft token, ascending, [V] int64.

    A subclass is made from a target, the ids of its draft tokens and the depth. Its weights are
    drawn from torch's default generator.
    """

    depth: int
    taps: tuple[int, ...]
    token_ids: Tensor

    @abstractmethod
    def states(self, batch: Batch, target: HiddenStates) -> Tensor:
        """Return what the output head reads, [depth, R, state_size].

        Draft token i of a base is conditioned on the sample's own tokens up to the one before it:
        the drafts before it are taken to be right, otherwise it will not be used.
        """

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """Return the logits [depth, c, V] of some bases; states: [depth, c, state_size]."""

    @abstractmethod
    def config(self) -> Mapping[str, Any]:
        """Return the config.json of the published layout."""

    @abstractmethod
    def tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors of the published layout."""


DrafterFactory = Callable[[Target, Tensor, int], Drafter]
_Class = TypeVar("_Class", bound=DrafterFactory)
_DRAFTERS: dict[str, DrafterFactory] = {}


def register(method: str) -> Callable[[_Class], _Class]:
    """Return a decorator that makes a class available as `method`."""

    def add(factory: _Class) -> _Class:
        _DRAFTERS[method] = factory
        return factory

    return add


def drafter_factory(method: str) -> DrafterFactory:
    """Return the class of a method. Raises InvalidValueError for an unknown one."""
    if method not in _DRAFTERS:
        raise InvalidValueError("method", method, f"one of {', '.join(sorted(_DRAFTERS))}")
    return _DRAFTERS[method]
