"""The interfaces of formats and shapes of heads, and what one reader returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from specdec.models.config.model_config import ModelConfig
from specdec.models.heads.formats.source import HeadSource, Shape, TensorNames
from specdec.types.errors import UnsupportedModelError


@dataclass(frozen=True)
class OutputHeads:
    """Output heads in a checkpoint, of which a list of tokens can select rows.

    names: of the tensors. ids: name of the tensor with the target's id of each draft token, stored
    if has_ids. are_offsets: whether it has differences from the index of the draft token. is_whole:
    whether there is a row for each token of the target, not only for those that can be drafted.
    with_tokens: returns the shape with this number of draft tokens, with ids.
    """

    names: tuple[str, ...]
    ids: str
    has_ids: bool
    with_tokens: Callable[[int], HeadShape]
    are_offsets: bool = False
    is_whole: bool = False


@dataclass(frozen=True, kw_only=True)
class HeadShape(ABC):
    """Sizes of one head. See `DraftHead` for taps and the numbers of draft tokens.

    decoder: the layers with attention, as those of a decoder; None without any. adds_one: norms are
    stored as their difference from 1.
    """

    draft_vocab_size: int
    decoder: ModelConfig | None = None
    adds_one: bool = False

    @property
    @abstractmethod
    def feature_size(self) -> int: ...

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    @property
    def max_draft_tokens(self) -> int | None:
        return None

    @property
    def output_heads(self) -> OutputHeads | None:
        """None where a list of tokens cannot select any."""
        return None

    @property
    def whole_model(self) -> ModelConfig | None:
        """The draft model; None for a head."""
        return None

    def block_len(self, num_draft_tokens: int) -> int:
        """Return the slots that a block of drafts takes, as DeviceBlockHead; 0 without blocks."""
        return 0

    @abstractmethod
    def tensors(self) -> dict[str, Shape]:
        """Return the shape of each tensor that the checkpoint has, by our names."""

    @abstractmethod
    def summary(self) -> str:
        """Return the sizes and switches for a log line."""


@dataclass(frozen=True, kw_only=True)
class KvShape(HeadShape):
    """Base of the shapes of heads with attention.

    has_embedding, has_lm_head: instead of the target's. has_draft_ids: of a smaller vocabulary.
    """

    decoder: ModelConfig
    has_embedding: bool = False
    has_lm_head: bool = False
    has_draft_ids: bool = False

    @property
    def feature_size(self) -> int:
        return self.decoder.hidden_size

    def vocabulary_tensors(self) -> dict[str, Shape]:
        """Return the shapes of the tensors that have an entry for each token."""
        hidden = self.decoder.hidden_size
        shapes: dict[str, tuple[bool, Shape]] = {
            "embed_tokens.weight": (self.has_embedding, (self.decoder.vocab_size, hidden)),
            "lm_head.weight": (self.has_lm_head, (self.draft_vocab_size, hidden)),
            "d2t": (self.has_draft_ids, (self.draft_vocab_size,)),
        }
        return {name: shape for name, (exists, shape) in shapes.items() if exists}


class MappedShape(KvShape):
    """Base of the shapes of heads that may draft a part of the target's tokens, which d2t maps."""

    @property
    def output_heads(self) -> OutputHeads | None:
        """See HeadShape."""
        if not self.has_lm_head:
            return None
        names = self._output_names
        return OutputHeads(names, "d2t", self.has_draft_ids, self._with_tokens, are_offsets=True)

    def require_map(self, source: HeadSource) -> None:
        """Raise UnsupportedModelError if the head has other tokens, and no tensor maps them."""
        if not self.has_draft_ids and self.draft_vocab_size != self.decoder.vocab_size:
            raise UnsupportedModelError(
                f"{source.directory}: lm_head.weight has {self.draft_vocab_size} rows, and the "
                f"target {self.decoder.vocab_size} tokens; tensor d2t, which maps them, is missing"
            )

    @property
    def _output_names(self) -> tuple[str, ...]:
        return ("lm_head.weight",)

    def _with_tokens(self, count: int) -> Self:
        return replace(self, draft_vocab_size=count, has_draft_ids=True)


@dataclass(frozen=True)
class StatelessShape(HeadShape):
    """Base of the shapes of heads without attention, which read the target's last hidden state.

    hidden_size: the target's. num_heads: each drafts one token.
    """

    hidden_size: int
    num_heads: int

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

    format: str
    shape: HeadShape
    names: TensorNames
    target_name: str | None = None
    num_draft_tokens: int | None = None
    notes: tuple[str, ...] = ()
    ignored: Callable[[str], bool] = _uses_all


def _is_only(source: HeadSource) -> bool:
    return True


@dataclass(frozen=True)
class HeadFormat:
    """Published layouts of the heads of a method, and the condition by which they are detected.

    read: raises UnsupportedModelError for content that it does not know, or that does not fit the
    target. recognizes: whether a checkpoint has such a layout, unless the library speculators wrote
    it. speculators_types: the values of `speculators_model_type` for them. is_variant: whether a
    checkpoint with such a layout is for this method, where methods share layouts. keys, tensors:
    that `recognizes` looks at, for messages. order: formats with a smaller one are tried first; 0
    where a key identifies the layout.
    """

    read: Callable[[HeadSource, ModelConfig], Reading]
    recognizes: Callable[[HeadSource], bool]
    is_variant: Callable[[HeadSource], bool] = _is_only
    speculators_types: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    order: int = 0
