"""The interface of a drafter in training, and its class by method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar

from torch import Tensor, nn

from specdec.config.speculation.methods import trained_drafters
from specdec.kernels.reference.forward_batch import HiddenStates
from specdec.models.drafters.packed_info import Base
from specdec.sampling.draft_temperature import HEAD_DRAFT_TEMPERATURE
from specdec.training.data.batches import Batch
from specdec.training.data.config import TrainingConfig
from specdec.training.data.target import Target
from specdec.training.drafters.layers import rows_product
from specdec.types.errors import InvalidValueError


@dataclass(frozen=True)
class SharedParts:
    """Tensors and files of a published layout that are the target's. directory: the target's."""

    base: Base
    directory: Path


class Drafter(nn.Module, ABC):
    """A drafter that is trained for all bases of a batch at once.

    depth: draft tokens after each base. taps: as in `models.heads.networks.base.DraftHead`.
    token_ids: the target's id of each draft token, ascending, [V] int64. lm_head: reads `states`,
        unless the drafter has other `logits`.

    has_reduced_vocabulary: whether its layout may have fewer tokens than the target.
    trained_depth: draft tokens of a base that have a loss; the others are trained as the first ones
        of later bases. None for all.
    draft_temperature: at which it drafts where it is served, as a share of the request's.
    """

    has_reduced_vocabulary: ClassVar[bool] = True
    trained_depth: ClassVar[int | None] = None
    draft_temperature: ClassVar[float] = HEAD_DRAFT_TEMPERATURE
    depth: int
    taps: tuple[int, ...]
    token_ids: Tensor
    lm_head: nn.Linear

    @abstractmethod
    def __init__(self, target: Target, token_ids: Tensor, config: TrainingConfig) -> None:
        """Draw the initial weights from torch's default generator, or take the target's."""
        super().__init__()
        self.depth, self.token_ids = config.depth, token_ids

    @abstractmethod
    def states(self, batch: Batch, target: HiddenStates) -> Tensor:
        """Return what the output head reads, [depth, R, state_size].

        Draft token i of a base is conditioned on the sample's own tokens up to the one before it:
        the drafts before it are taken to be right, otherwise it will not be used.
        """

    def logits(self, states: Tensor, columns: Tensor | None = None) -> Tensor:
        """Return the logits [depth, c, V] of some bases; states: [depth, c, state_size].

        columns: of the logits, [n] int64, for [depth, c, n]; None for all.
        """
        return rows_product(states, self.lm_head.weight, columns)

    def confidence(self, states: Tensor) -> Tensor | None:
        """Return the log-odds [depth, c] that draft tokens are accepted, as the drafter predicts.

        None for a layout without a confidence head. states: as for `logits`.
        """
        return None

    @abstractmethod
    def config(self) -> Mapping[str, Any]:
        """Return the config.json of the published layout."""

    @abstractmethod
    def tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors of the published layout, without those of `shared`."""

    def shared(self) -> SharedParts | None:
        """Return what the published layout has of the target; None for nothing."""
        return None

    def files(self) -> Mapping[str, Any]:
        """Return further files by name, as JSON."""
        return {}


TRAINED_METHODS = tuple(trained_drafters())
"""The methods whose drafters can be trained."""


def drafter_class(method: str) -> type[Drafter]:
    """Return the class of a method. Raises InvalidValueError for an unknown one."""
    trained = trained_drafters()
    if method not in trained:
        raise InvalidValueError("method", method, f"one of {', '.join(sorted(trained))}")
    drafter: type[Drafter] = resolve_name(trained[method].module)
    return drafter
