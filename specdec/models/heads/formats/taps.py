"""The layers of the target that a head reads, in the two numberings of published files.

*Input-of* ids name the residual stream that enters a layer: 0 is the embedding, n the output of the
last of n layers. *Output-of* ids name the layer whose output is taken: one less for the same
tensor. `DraftHead.taps` are input-of ids.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.models.config.model_config import ModelConfig
from specdec.models.heads.formats.source import Fields


@dataclass(frozen=True)
class Taps:
    """The inputs of a head's first projection, in its order.

    layer_ids: input-of ids, in the order of concatenation.
    """

    layer_ids: tuple[int, ...]

    @property
    def ascending(self) -> tuple[int, ...]:
        """Each layer once, as in `DraftHead.taps`."""
        return tuple(sorted(set(self.layer_ids)))

    @property
    def order(self) -> tuple[int, ...]:
        """The index in `ascending` of each part of the concatenation."""
        return tuple(self.ascending.index(each) for each in self.layer_ids)

    def describe(self) -> str:
        """Return the ids in both numberings."""
        entering = ", ".join(map(str, self.layer_ids))
        behind = ", ".join(str(each - 1) for each in self.layer_ids)
        return f"layers enter {entering} (output-of {behind})"


def input_of(fields: Fields, name: str, target: ModelConfig) -> Taps:
    """Read a list of input-of ids."""
    return _checked(fields, name, 0, target)


def output_of(fields: Fields, name: str, target: ModelConfig) -> Taps:
    """Read a list of output-of ids; -1 is the embedding."""
    return _checked(fields, name, 1, target)


def default_taps(count: int, target: ModelConfig) -> Taps | None:
    """Return the default of EAGLE-3 for `count` layers of a target; None if there is none.

    Low, middle and high: input-of 2, n // 2 and n - 3. ModelOpt drops those that coincide.
    """
    num_layers = target.num_layers
    if count == 3 and num_layers >= 4:
        return Taps((2, num_layers // 2, num_layers - 3))
    distinct = {2, max(1, num_layers // 2), max(1, num_layers - 3)}
    return Taps(tuple(sorted(distinct))) if len(distinct) == count else None


def default_note(taps: Taps | None, *, is_given: bool) -> tuple[str, ...]:
    """Return a note if a head reads layers that its config.json does not name."""
    if taps is None or is_given:
        return ()
    return (
        f"config.json names no layers of the target: the default is assumed ({taps.describe()})",
    )


def _checked(fields: Fields, name: str, offset: int, target: ModelConfig) -> Taps:
    ids = tuple(each + offset for each in fields.counts(name))
    if any(not 0 <= each <= target.num_layers for each in ids):
        limit = f"layers of the target, from {-offset} to {target.num_layers - offset}"
        raise fields.error(name, limit)
    return Taps(ids)
