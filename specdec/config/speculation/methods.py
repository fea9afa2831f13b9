"""Table of the drafting methods: one frozen dataclass a method, with its keys and its proposer.

A new method is a subclass of `MethodConfig` in `METHODS`, and the module that it names; one that
drafts with a head is in `head_methods`. Importing this table imports no proposer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Literal, get_args

from specdec.config.quantization import QuantizationMethod, require_quantization
from specdec.config.speculation.head_methods import HEAD_METHODS, HeadMethodConfig
from specdec.config.speculation.method_config import (
    DraftPlace,
    MethodConfig,
    TrainedDrafter,
    within,
)
from specdec.types.errors import InvalidValueError
from specdec.types.validation import require_choice

AsyncDrafting = Literal["off", "continuing", "outcomes", "auto"]


@dataclass(frozen=True)
class NgramConfig(MethodConfig):
    """Prompt lookup in the sequence's own text.

    prompt_lookup_min, prompt_lookup_max: lengths of the n-grams to look up, longest first.
    """

    name = "ngram"
    proposer = "specdec.speculation.proposers.ngram:NgramProposer"
    drafts_trees = True
    other_names = ("ngram_gpu", "NGRAM")

    prompt_lookup_min: int = within(2, 1, 16)
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
    parallel_drafting: whether one forward pass makes a whole draft, from mask tokens that the
        model was trained on (PARD, An et al. 2025, arXiv 2504.18583).
    draft_window: number of tokens visible to each token of the draft model, itself included, in
        layers without a smaller sliding window; None for all. Models that were trained on short
        texts are accepted more often in long ones with a window.
    speculative_token_map: JSON file with the ids of the tokens that the model may draft, on every
        node; None for those of its directory, if it has a list (`models.drafters.token_map`).
    async_drafting: what the model drafts while the target verifies its last drafts. off: nothing,
        a step waits for its drafts; continuing: after all of them and the token that it expects
        from the target; outcomes: after the likeliest tokens of each number of accepted drafts.
        Policy goodput drafts ahead where that is faster; with auto it chooses among all of them.
    share_gpu: whether the draft model runs on the target's GPU, both with one rank; None: where
        there is no other GPU.
    """

    name = "draft_model"
    proposer = "specdec.speculation.proposers.draft_model:DraftModelProposer"
    place = DraftPlace.DRAFT_WORKER
    other_names = ("STANDALONE",)
    trained = TrainedDrafter(
        "specdec.training.drafters.draft_model:DraftModelDrafter", True, ("num_layers",)
    )

    model: str | None = None
    quantization: QuantizationMethod | None = None
    draft_tensor_parallel_size: int = within(1, 1, 1024)
    max_model_len: int | None = within(None, 2, 2**24)
    draft_confidence_threshold: float = within(0.0, 0, 1)
    parallel_drafting: bool = False
    draft_window: int | None = within(None, 1, 2**24)
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

    suffix_decoding_max_tree_depth: int = within(24, 2, 256)
    suffix_decoding_max_cached_requests: int = within(10_000, 0, 10_000_000)
    suffix_decoding_max_spec_factor: float = within(1.0, 0.01, 32)
    suffix_decoding_min_token_prob: float = within(0.1, 0, 1)
    lookup_corpus: str | None = None


@dataclass(frozen=True)
class LookaheadConfig(MethodConfig):
    """Lookahead decoding: n-grams from guesses that the target runs after the drafts.

    lookahead_window_size: guesses that the target runs in each step after a sequence's drafts.
    lookahead_ngram_size: tokens of an n-gram, the drafted one included.
    lookahead_pool_size: n-grams to keep of a sequence; the oldest is evicted first.
    """

    name = "lookahead"
    proposer = "specdec.speculation.proposers.lookahead:LookaheadProposer"

    lookahead_window_size: int = within(3, 1, 64)
    lookahead_ngram_size: int = within(4, 2, 16)
    lookahead_pool_size: int = within(2048, 1, 65_536)

    @property
    def num_lookahead_tokens(self) -> int:
        """The window."""
        return self.lookahead_window_size


_WITHOUT_HEADS: tuple[type[MethodConfig], ...] = (
    NgramConfig,
    DraftModelConfig,
    SuffixConfig,
    LookaheadConfig,
)
_TABLE = {each.name: each for each in (*_WITHOUT_HEADS, *HEAD_METHODS)}
METHODS: Mapping[str, type[MethodConfig]] = MappingProxyType(_TABLE)
"""Configuration class by name of the method."""

METHOD_NAMES = tuple(METHODS)


def head_methods() -> dict[str, type[HeadMethodConfig]]:
    """Return the methods that draft with a head, by name."""
    return {name: each for name, each in METHODS.items() if issubclass(each, HeadMethodConfig)}


def trained_drafters() -> dict[str, TrainedDrafter]:
    """Return what `specdec train` makes, by method."""
    return {name: each.trained for name, each in METHODS.items() if each.trained is not None}


def other_method_names() -> dict[str, str]:
    """Return our method by other names of it in vLLM, and by SGLang's names of algorithms."""
    return {other: name for name, each in METHODS.items() for other in each.other_names}


def parallel_form(name: str) -> str | None:
    """Return the method that `name` is with `parallel_drafting`; None where it has the key."""
    return next((each.name for each in METHODS.values() if each.parallel_of == name), None)


def keys_of(config_class: type[MethodConfig]) -> tuple[str, ...]:
    """Return the keys of speculative_config that belong to a method."""
    return tuple(each.name for each in fields(config_class))
