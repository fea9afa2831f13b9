"""The interface of the shapes of heads, and what one reader returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from specdec.models.config.model_config import ModelConfig
from specdec.models.heads.formats.source import Shape, TensorNames

HeadMethod = Literal[
    "medusa", "mlp_speculator", "hydra", "eagle", "eagle3", "mtp", "p_eagle", "dflash", "dspark"
]
HEAD_METHODS: tuple[HeadMethod, ...] = get_args(HeadMethod)


class HeadShape(Protocol):
    """Sizes of one head. See `DraftHead` for taps and the numbers of draft tokens."""

    @property
    def taps(self) -> tuple[int, ...]: ...

    @property
    def feature_size(self) -> int: ...

    @property
    def max_draft_tokens(self) -> int | None: ...

    @property
    def draft_vocab_size(self) -> int: ...

    @property
    def decoder(self) -> ModelConfig | None:
        """The layers with attention, as those of a decoder; None without any."""
        ...

    def tensors(self) -> dict[str, Shape]:
        """Return the shape of each tensor that the checkpoint has, by our names."""
        ...

    def summary(self) -> str:
        """Return the sizes and switches for a log line."""
        ...


@dataclass(frozen=True)
class StatelessShape:
    """Base of the shapes of heads without attention, which read the target's last hidden state.

    hidden_size: the target's. num_heads: each drafts one token.
    """

    hidden_size: int
    num_heads: int

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    @property
    def decoder(self) -> ModelConfig | None:
        return None

    @property
    def feature_size(self) -> int:
        return self.hidden_size

    @property
    def max_draft_tokens(self) -> int:
        return self.num_heads


def _uses_all(name: str) -> bool:
    return False


@dataclass(frozen=True)
class Reading:
    """Format and sizes that a checkpoint was taken for.

    format: name for people. target_name: of the model that the head was trained for, if the file
    has one. num_draft_tokens: as the file suggests. notes: assumptions, each a clause for the log.
    ignored: whether a tensor, by our name, may be present without a use.
    """

    method: HeadMethod
    format: str
    shape: HeadShape
    names: TensorNames
    target_name: str | None = None
    num_draft_tokens: int | None = None
    notes: tuple[str, ...] = ()
    ignored: Callable[[str], bool] = _uses_all
