"""Base class of `LLM` and `AsyncLLM`."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from specdec.llm.llm_engine import LLMEngine
from specdec.llm.metrics import Metric, metrics_of
from specdec.types.control import SpeculationControl, SpeculationMode
from specdec.types.errors import InvalidValueError
from specdec.types.sampling.sampling_params import SamplingParams

_TEXT_ONLY = "not available: the models generate text; see docs/python.md"
_NOT_AVAILABLE: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("encode", "embed", "classify", "reward", "score"), _TEXT_ONLY),
        "beam_search": "not available: use generate with n and a temperature",
        **dict.fromkeys(("apply_model", "collective_rpc"), "not available: ranks run no code"),
        "reset_prefix_cache": "not available: give the prompts another cache_salt",
        "set_tokenizer": "not available: the tokenizer comes with the model",
        "sleep": "not available: shutdown() frees the model",
        "wake_up": "not available: shutdown() frees the model",
        "start_profile": "not available here: a service records profiles (docs/profiling.md)",
        "stop_profile": "not available here: a service records profiles (docs/profiling.md)",
    }
)
"""Methods of vLLM's LLM without a counterpart, with what to write."""


class BaseLLM:
    """A loaded model. Ends with `shutdown`, as a context manager, or with its last reference.

    renamed: methods that other engines or older guides have, with what to write.
    """

    renamed: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError, with what to write for a method of another engine."""
            hint = self.renamed.get(name) or _NOT_AVAILABLE.get(name)
            suffix = f": {hint}" if hint else ""
            message = f"{type(self).__name__!r} object has no attribute {name!r}{suffix}"
            raise AttributeError(message)

    def __init__(self, engine: LLMEngine, end: Callable[[], None]) -> None:
        """end: frees engine and threads; called once."""
        self._llm_engine = engine
        self._ids = itertools.count()
        self._end = weakref.finalize(self, end)

    @property
    def speculation(self) -> SpeculationControl | None:
        """The speculation settings in force; None where nothing can draft."""
        return self._llm_engine.setup.settings.control

    @property
    def max_model_len(self) -> int:
        """The maximum length of a prompt with its answer, in tokens."""
        return self._llm_engine.setup.plan.engine.max_model_len

    def set_speculation(
        self,
        *,
        mode: SpeculationMode | None = None,
        threshold: int | None = None,
        num_speculative_tokens: int | None = None,
        method: str | None = None,
    ) -> SpeculationControl:
        """Change settings from the next step on, also for running requests, and return them.

        mode: auto, on or off. threshold: the most decoding requests for which auto drafts.
        num_speculative_tokens: draft length, 0 for none. method: one of those loaded.
        None leaves a setting unchanged. Raises InvalidValueError, and NotReadyError after the end.
        """
        self._llm_engine.require_open()
        changes = {
            "mode": mode,
            "threshold": threshold,
            "num_speculative_tokens": num_speculative_tokens,
            "method": method,
        }
        given: dict[str, Any] = {key: value for key, value in changes.items() if value is not None}
        control, config = self.speculation, self._llm_engine.config.speculative_config
        if control is None or config is None:
            name, value = next(iter(given.items()), ("mode", "auto"))
            limit = "left out: without speculative_config nothing drafts"
            raise InvalidValueError(name, value, limit)
        if method is not None and method not in config.methods:
            limit = f"what is loaded: {' or '.join(config.methods)}"
            raise InvalidValueError("method", method, limit)
        control = replace(control, **given)
        self._llm_engine.engine.set_control(control)
        return control

    def get_metrics(self) -> list[Metric]:
        """Return the metrics since the model was loaded, up to the last request that ended."""
        engine = self._llm_engine
        config, arguments = engine.config.speculative_config, engine.arguments
        num_positions = config.num_speculative_tokens if config else 0
        return metrics_of(
            engine.engine.stats(), arguments.metric_prefix, arguments.model_name, num_positions
        )

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer, a transformers PreTrainedTokenizerFast."""
        return self._llm_engine.tokenizer.transformers

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the defaults of sampling parameters, from the model's generation_config.json."""
        defaults = self._llm_engine.model.sampling_defaults
        return SamplingParams(**vars(defaults))

    def shutdown(self) -> None:
        """End the engine and the models after the step in flight. May be called repeatedly."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
