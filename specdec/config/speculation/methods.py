"""Registry of the drafting methods: one frozen dataclass a method, with its keys and its proposer.

A new method is a subclass of `MethodConfig` that is listed in `METHODS`, and the module that it
names. Importing this registry imports no proposer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args

from specdec.config.quantization import QuantizationMethod, require_quantization
from specdec.types.drafts.static_tree import StaticTree
from specdec.types.errors import InvalidValueError
from specdec.types.validation import require_choice, require_range

AsyncDrafting = Literal["off", "continuing", "outcomes", "auto"]


class DraftPlace(Enum):
    """The process that drafts.

    ENGINE: the process of the engine, within the call of the proposer, in microseconds.
    DRAFT_WORKER: a separate worker with a draft model, whose time adds to that of a step.
    TARGET: the target's ranks, which draft for the next step at the end of each.
    """

    ENGINE = "engine"
    DRAFT_WORKER = "draft_worker"
    TARGET = "target"


def _within(default: Any, low: float, high: float) -> Any:
    """Return a field with a range that `MethodConfig` checks."""
    return field(default=default, metadata={"range": (low, high)})


@dataclass(frozen=True)
class MethodConfig:
    """Base of the configurations of drafting methods; each field is a key of speculative_config.

    name: the method in configurations, requests, metrics and protos.
    proposer: the class of the proposer, as "module:class". Its static method `memory` returns the
        memory that a configuration needs. Unless a worker drafts, the configuration is the only
        argument of the class.
    place: the process that drafts.
    """

    name: ClassVar[str]
    proposer: ClassVar[str]
    place: ClassVar[DraftPlace] = DraftPlace.ENGINE
    drafts_trees: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for each in fields(self):
            if "range" in each.metadata:
                key, bounds = f"speculative_config.{each.name}", each.metadata["range"]
                require_range(key, getattr(self, each.name), *bounds)

    @classmethod
    def proposer_class(cls) -> Any:
        """Import the class of the proposer."""
        return resolve_name(cls.proposer)

    @property
    def num_lookahead_tokens(self) -> int:
        """Guesses that the target runs in each step behind a sequence's drafts."""
        return 0


@dataclass(frozen=True)
class NgramConfig(MethodConfig):
    """Prompt lookup in the sequence's own text.

    prompt_lookup_min, prompt_lookup_max: lengths of the n-grams to look up, longest first.
    """

    name = "ngram"
    proposer = "specdec.speculation.proposers.ngram:NgramProposer"
    drafts_trees = True

    prompt_lookup_min: int = _within(2, 1, 16)
    prompt_lookup_max: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        key, value = "speculative_config.prompt_lookup_max", self.prompt_lookup_max
        if not self.prompt_lookup_min <= value <= 16:
            limit = f"from prompt_lookup_min ({self.prompt_lookup_min}) to 16"
            raise InvalidValueError(key, value, limit)


@dataclass(frozen=True)
class DraftModelConfig(MethodConfig):
    """A small model on a draft worker.

    model: the draft model, named as the target is; None runs the target itself, which then should
        be quantized. Its vocabulary may differ from the target's (`specdec.text.vocab_map`).
    quantization: how the draft model's matrices are held; None keeps the model's dtype.
    draft_tensor_parallel_size: ranks that share the draft model.
    max_model_len: longest sequence to draft for, in tokens; None takes the draft model's own limit.
    draft_confidence_threshold: a draft ends where no token has this probability of being the next
        one; 0 disables the check.
    parallel_drafting: whether one forward pass makes a whole draft, behind mask tokens that the
        model was trained on (PARD, An et al. 2025, arXiv 2504.18583).
    draft_window: number of tokens visible to each token of the draft model, itself included, in
        layers without a smaller sliding window; None for all. Models that were trained on short
        texts are accepted more often in long ones with a window.
    speculative_token_map: JSON file with the ids of the tokens that the model may draft, on every
        node; None for those of its directory, if it has a list (`specdec.models.token_map`).
    async_drafting: what the model drafts while the target verifies its last drafts. off: nothing,
        a step waits for its drafts; continuing: behind all of them and the token that it expects
        from the target; outcomes: behind the likeliest tokens of each number of accepted drafts.
        Policy goodput drafts ahead where that is faster; with auto it chooses among all of them.
    share_gpu: whether the draft model runs on the target's GPU, both with one rank; None: where
        there is no other GPU.
    """

    name = "draft_model"
    proposer = "specdec.speculation.proposers.draft_model:DraftModelProposer"
    place = DraftPlace.DRAFT_WORKER

    model: str | None = None
    quantization: QuantizationMethod | None = None
    draft_tensor_parallel_size: int = _within(1, 1, 1024)
    max_model_len: int | None = _within(None, 2, 2**24)
    draft_confidence_threshold: float = _within(0.0, 0, 1)
    parallel_drafting: bool = False
    draft_window: int | None = _within(None, 1, 2**24)
    speculative_token_map: str | None = None
    async_drafting: AsyncDrafting = "off"
    share_gpu: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_quantization(self.quantization, "speculative_config.quantization")
        name, value = "speculative_config.async_drafting", self.async_drafting
        require_choice(name, value, get_args(AsyncDrafting))
        if self.parallel_drafting and value != "off":
            limit = "off with parallel_drafting, which makes a whole draft in one forward pass"
            raise InvalidValueError(name, value, limit)
        if self.share_gpu and self.draft_tensor_parallel_size > 1:
            limit = "left out, or 1 where share_gpu is true"
            field_name = "speculative_config.draft_tensor_parallel_size"
            raise InvalidValueError(field_name, self.draft_tensor_parallel_size, limit)


@dataclass(frozen=True)
class SuffixConfig(MethodConfig):
    """Suffix decoding: lookup in the sequence's own text and in earlier outputs.

    suffix_decoding_max_tree_depth: most tokens of a match and its draft together.
    suffix_decoding_max_cached_requests: number of earlier outputs to keep; the oldest is evicted
        first, 0 keeps none.
    suffix_decoding_max_spec_factor: most tokens to draft for each token of the match.
    suffix_decoding_min_token_prob: least probability of a draft, by token counts, at which it is
        extended.
    lookup_corpus: file of JSON lines with texts to look up, too (`speculation.proposers.corpus`),
        on every node with a Router; None for none.
    """

    name = "suffix"
    proposer = "specdec.speculation.proposers.suffix:SuffixProposer"
    drafts_trees = True

    suffix_decoding_max_tree_depth: int = _within(24, 2, 256)
    suffix_decoding_max_cached_requests: int = _within(10_000, 0, 10_000_000)
    suffix_decoding_max_spec_factor: float = _within(1.0, 0.01, 32)
    suffix_decoding_min_token_prob: float = _within(0.1, 0, 1)
    lookup_corpus: str | None = None


@dataclass(frozen=True)
class LookaheadConfig(MethodConfig):
    """Lookahead decoding: n-grams from guesses that the target runs behind the drafts.

    lookahead_window_size: guesses that the target runs in each step behind a sequence's drafts.
    lookahead_ngram_size: tokens of an n-gram, the drafted one included.
    lookahead_pool_size: n-grams to keep of a sequence; the oldest is evicted first.
    """

    name = "lookahead"
    proposer = "specdec.speculation.proposers.lookahead:LookaheadProposer"

    lookahead_window_size: int = _within(3, 1, 64)
    lookahead_ngram_size: int = _within(4, 2, 16)
    lookahead_pool_size: int = _within(2048, 1, 65_536)

    @property
    def num_lookahead_tokens(self) -> int:
        """The window."""
        return self.lookahead_window_size


@dataclass(frozen=True)
class HeadMethodConfig(MethodConfig):
    """Base of the methods that draft with a head on the target's hidden states.

    writes_kv: whether the head has attention, so that its drafts need KV slots. grows_trees:
        whether it also runs the tokens of a tree level by level, on a GPU as graphs.
    is_in_target: whether the target's own checkpoint may contain the head.
    model: the head's checkpoint, a directory or a Hub id; None for the target's own.
    quantization: how the head's matrices are held; None keeps the model's dtype.
    speculative_token_map: JSON file with the target's ids of the tokens that the head may draft,
        on every node; None for all that it has (`specdec.models.token_map`).
    """

    writes_kv: ClassVar[bool] = False
    grows_trees: ClassVar[bool] = False
    is_in_target: ClassVar[bool] = False
    proposer = "specdec.speculation.proposers.target_head:TargetHeadProposer"
    place = DraftPlace.TARGET
    drafts_trees = True

    model: str | None = None
    quantization: QuantizationMethod | None = None
    speculative_token_map: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model and not self.is_in_target:
            limit = f"the directory or Hub id of the head that method {self.name} drafts with"
            raise InvalidValueError("speculative_config.model", self.model, limit)
        require_quantization(self.quantization, "speculative_config.quantization")

    @property
    def window(self) -> int | None:
        """The attention window of the head's layers; None for that of its files."""
        return None

    @property
    def tree_choices(self) -> tuple[tuple[int, ...], ...]:
        """The shape of its trees, as in `StaticTree.of_choices`; none where each is fitted."""
        return ()


@dataclass(frozen=True)
class AttentionHeadConfig(HeadMethodConfig):
    """Base of the heads with attention, whose KV is one more layer in the target's blocks.

    draft_window: attention window of the head's layers in tokens; None for that of its files.
    """

    writes_kv = True

    draft_window: int | None = _within(None, 1, 2**24)

    @property
    def window(self) -> int | None:
        """`draft_window`."""
        return self.draft_window


@dataclass(frozen=True)
class MedusaConfig(HeadMethodConfig):
    """Medusa heads: each predicts the token at one distance from the target's last hidden state.

    medusa_choices: shape of its trees, as paths of ranks among a head's best tokens: [0, 1] is the
        second best token of the second head, behind the best one of the first. The order is free.
        Without choices each tree has the shape with the most expected accepted tokens.
    """

    name = "medusa"

    medusa_choices: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        StaticTree.of_choices(self.medusa_choices, "speculative_config.medusa_choices")

    @property
    def tree_choices(self) -> tuple[tuple[int, ...], ...]:
        """`medusa_choices`."""
        return self.medusa_choices


@dataclass(frozen=True)
class MlpSpeculatorConfig(HeadMethodConfig):
    """MLP speculator: a small recurrent network over the target's last hidden state."""

    name = "mlp_speculator"


@dataclass(frozen=True)
class HydraConfig(HeadMethodConfig):
    """Hydra heads: as Medusa's, and each also reads the tokens drafted before its own."""

    name = "hydra"


@dataclass(frozen=True)
class EagleConfig(AttentionHeadConfig):
    """EAGLE-1 and EAGLE-2: a decoder layer on tokens and the target's last hidden states."""

    name = "eagle"
    grows_trees = True


@dataclass(frozen=True)
class Eagle3Config(AttentionHeadConfig):
    """EAGLE-3: a decoder layer on tokens and the hidden states of three of the target's layers."""

    name = "eagle3"
    grows_trees = True


@dataclass(frozen=True)
class MtpConfig(AttentionHeadConfig):
    """Multi-token prediction: a layer that was trained with the target, in its checkpoint."""

    name = "mtp"
    grows_trees = True
    is_in_target = True


@dataclass(frozen=True)
class ParallelEagleConfig(AttentionHeadConfig):
    """P-EAGLE: an EAGLE-3 head that drafts all tokens in one pass, behind mask tokens."""

    name = "p_eagle"


@dataclass(frozen=True)
class DFlashConfig(AttentionHeadConfig):
    """DFlash: a block of masked tokens that attends to the target's features."""

    name = "dflash"


@dataclass(frozen=True)
class DSparkConfig(AttentionHeadConfig):
    """DSpark: as DFlash, with a prediction at the block's first token, and links between tokens."""

    name = "dspark"


METHODS: Mapping[str, type[MethodConfig]] = MappingProxyType(
    {
        each.name: each
        for each in (
            NgramConfig,
            DraftModelConfig,
            SuffixConfig,
            LookaheadConfig,
            MedusaConfig,
            MlpSpeculatorConfig,
            HydraConfig,
            EagleConfig,
            Eagle3Config,
            MtpConfig,
            ParallelEagleConfig,
            DFlashConfig,
            DSparkConfig,
        )
    }
)
"""Configuration class by name of the method."""

METHOD_NAMES = tuple(METHODS)


def keys_of(config_class: type[MethodConfig]) -> tuple[str, ...]:
    """Return the keys of speculative_config that belong to a method."""
    return tuple(each.name for each in fields(config_class))
