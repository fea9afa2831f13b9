"""Backend for the gRPC API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cluster.cli.bench.backend import RequestFailedError, StreamEvent, TokenUsage
from cluster.cli.bench.dataset import RequestOptions, SampleRequest
from specdec.client import Client, ClientError
from specdec.types.chat import ChatMessage
from specdec.types.responses import StreamChunk, Usage
from specdec.types.sampling_params import SamplingParams, SpeculationOptions


class GrpcBackend:
    """Sends prompts as chat messages over gRPC. Failed streams are not resumed."""

    def __init__(
        self,
        address: str,
        options: RequestOptions,
        *,
        timeout_s: float,
        api_key: str | None = None,
        tls_ca_file: Path | None = None,
    ) -> None:
        """Connect and request the name of the served model. Raises ClientError."""
        self._client = Client(
            address, timeout_s=timeout_s, tls_ca_file=tls_ca_file, api_key=api_key
        )
        self._options = options
        self.model = self._client.model_info().model

    def stream(self, request: SampleRequest) -> Iterator[StreamEvent]:
        """Send a chat request and yield its events."""
        chat = [ChatMessage("user", request.prompt)]
        try:
            for chunk in self._client.generate_stream(
                chat, self._params(request), cache_salt=request.cache_salt, resume=False
            ):
                yield _event(chunk)
        except ClientError as error:
            raise RequestFailedError(error.code.name) from error

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _params(self, request: SampleRequest) -> SamplingParams:
        return SamplingParams(
            temperature=self._options.temperature,
            seed=self._options.seed,
            ignore_eos=self._options.ignore_eos,
            max_tokens=request.max_tokens,
            speculation=self._options.speculation or SpeculationOptions(),
        )


def _event(chunk: StreamChunk) -> StreamEvent:
    return StreamEvent(bool(chunk.token_ids), None if chunk.usage is None else _usage(chunk.usage))


def _usage(usage: Usage) -> TokenUsage:
    return TokenUsage(usage.prompt_tokens, usage.completion_tokens, usage.speculation)
