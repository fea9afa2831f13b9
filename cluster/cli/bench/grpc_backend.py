"""Asks over our own gRPC API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cluster.cli.bench.backend import Heard, RequestFailedError, TokenUsage
from cluster.cli.bench.questions import HowToAsk, Question
from specdec.client import Client, ClientError
from specdec.types.chat import ChatMessage
from specdec.types.responses import StreamChunk, Usage
from specdec.types.sampling_params import SamplingParams, SpeculationOptions


class GrpcBackend:
    """Prompts are a user's messages. A stream that breaks has failed: it is not resumed."""

    def __init__(
        self,
        address: str,
        how: HowToAsk,
        *,
        timeout_s: float,
        api_key: str | None = None,
        tls_ca_file: Path | None = None,
    ) -> None:
        """Asks the service for its model's name. Raises ClientError."""
        self._client = Client(
            address, timeout_s=timeout_s, tls_ca_file=tls_ca_file, api_key=api_key
        )
        self._how = how
        self.model = self._client.model_info().model

    def ask(self, question: Question) -> Iterator[Heard]:
        """As Backend has it."""
        chat = [ChatMessage("user", question.prompt)]
        try:
            for chunk in self._client.generate_stream(
                chat, self._params(question), cache_salt=question.cache_salt, resume=False
            ):
                yield _heard(chunk)
        except ClientError as error:
            raise RequestFailedError(error.code.name) from error

    def close(self) -> None:
        """As Backend has it."""
        self._client.close()

    def _params(self, question: Question) -> SamplingParams:
        return SamplingParams(
            temperature=self._how.temperature,
            seed=self._how.seed,
            ignore_eos=self._how.ignore_eos,
            max_tokens=question.max_tokens,
            speculation=self._how.speculation or SpeculationOptions(),
        )


def _heard(chunk: StreamChunk) -> Heard:
    return Heard(bool(chunk.token_ids), None if chunk.usage is None else _usage(chunk.usage))


def _usage(usage: Usage) -> TokenUsage:
    return TokenUsage(usage.prompt_tokens, usage.completion_tokens, usage.speculation)
