"""What `LLM` and `AsyncLLM` have in common: a model, and what can be asked of it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, Self

from specdec.llm.host import EngineHost
from specdec.llm.metrics import Metric
from specdec.types.control import SpeculationControl, SpeculationMode
from specdec.types.sampling_params import SamplingParams


class HostedModel:
    """Ends with `shutdown`, as a context manager, or with the last reference to it."""

    def __init__(self, host: EngineHost, end: Callable[[], None]) -> None:
        """end: ends the host, and whatever else there is; called once."""
        self._host = host
        self._ids = itertools.count()
        self._end = weakref.finalize(self, end)

    @property
    def speculation(self) -> SpeculationControl | None:
        """What is in force; None where nothing can draft."""
        return self._host.control

    def set_speculation(
        self,
        *,
        mode: SpeculationMode | None = None,
        threshold: int | None = None,
        num_speculative_tokens: int | None = None,
        method: str | None = None,
    ) -> SpeculationControl:
        """Steers speculation from the next step on, also of requests that run; returns all of it.

        mode: auto, on or off. threshold: most decoding requests that auto drafts for.
        num_speculative_tokens: draft tokens a step, 0 for none. method: what drafts, of those
        loaded. What is None stays as it is. Raises InvalidValueError.
        """
        control = self._host.changed_control(
            mode=mode,
            threshold=threshold,
            num_speculative_tokens=num_speculative_tokens,
            method=method,
        )
        self._host.set_control(control)
        return control

    def get_metrics(self) -> list[Metric]:
        """What has been counted since the model was loaded, with every answer that has ended."""
        return self._host.get_metrics()

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, of transformers' PreTrainedTokenizerFast."""
        return self._host.tokenizer.transformers

    def get_default_sampling_params(self) -> SamplingParams:
        """What holds where nothing is said: the model's own generation_config.json."""
        defaults = self._host.model.sampling_defaults
        return SamplingParams(**vars(defaults))

    def shutdown(self) -> None:
        """Ends the engine and the models after the step in flight. More than once is no error."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
