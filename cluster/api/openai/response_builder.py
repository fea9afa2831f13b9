"""The base class of the builders that turn outputs into a response, complete or streamed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from cluster.api.openai.errors import Failure
from cluster.api.openai.logprobs import TokenNames
from cluster.api.openai.offload import has_many_logprobs
from cluster.api.openai.schema import ResponseModel
from cluster.api.openai.streams import DONE, PromptOutput
from cluster.api.openai.usage import UsageMeter
from cluster.api.sse import event
from specdec.types.outputs import EngineOutput
from specdec.types.request import GenerateRequest


class ResponseBuilder(ABC):
    """Builder of one response: `add` and `body`; or `opening`, `events`, `closing` for a stream."""

    def __init__(self, calls: Sequence[GenerateRequest], names: TokenNames | None) -> None:
        """Make a builder for the outputs of `calls`; `names` is None without log-probabilities."""
        self.calls = calls
        self.names = names
        self.meter = UsageMeter()

    def is_large(self, output: EngineOutput) -> bool:
        """Return whether an output is worth converting on a thread."""
        return has_many_logprobs(output, self.names)

    @abstractmethod
    def add(self, each: PromptOutput) -> None:
        """Add an output to the complete response."""

    @abstractmethod
    def body(self) -> ResponseModel:
        """Build the complete response."""

    def opening(self) -> list[bytes]:
        """Encode the events before the first output."""
        return []

    @abstractmethod
    def events(self, each: PromptOutput) -> list[bytes]:
        """Encode an output; return [] if it adds nothing visible."""

    @abstractmethod
    def closing(self) -> list[bytes]:
        """Encode the events after the last output."""

    def failed(self, failure: Failure) -> list[bytes]:
        """Encode an error: the status has been sent, and the openai client expects an event."""
        return [event(failure.body.model_dump_json()), DONE]
