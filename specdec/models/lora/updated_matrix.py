"""A weight matrix whose products adapters update, whatever keeps their updates."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from specdec.models.layers.matrix import Matrix


class UpdatedMatrix(ABC):
    """A Matrix that adds the updates of the pass in progress to the products of `base`."""

    def __init__(self, base: Matrix) -> None:
        self.base = base

    def multiply(self, x: Tensor) -> Tensor:
        """See Matrix."""
        return self._updated(self.base.multiply(x), x)

    def multiply_add(self, base: Tensor, x: Tensor) -> Tensor:
        """See Matrix."""
        return self._updated(self.base.multiply_add(base, x), x)

    def multiply_to_float32(self, x: Tensor) -> Tensor:
        """See Matrix."""
        return self._updated(self.base.multiply_to_float32(x), x)

    @abstractmethod
    def _updated(self, y: Tensor, x: Tensor) -> Tensor:
        """Add the updates to y [T, out_features] in place; x: [T, in_features]."""
