"""A client that blocks, for scripts and the command line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from protos.specdec.v1 import inference_pb2 as pb
from protos.specdec.v1.inference_pb2_grpc import InferenceServiceStub
from specdec.client import codec
from specdec.client.connection import Connection
from specdec.client.messages import Completion, ModelInfo, Prompt, StreamChunk, TokenizedInput
from specdec.sampling_params import SamplingParams
from specdec.tokenizer import ChatMessage

DEFAULT_TIMEOUT_S = 300.0


class Client(Connection):
    """Asks a service for completions. A context manager; thread-safe.

    Every call raises ClientError when it fails, and InvalidValueError for arguments that cannot
    even be sent. An empty `model` stands for the one that is loaded.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        tls_ca_file: Path | None = None,
    ) -> None:
        """Arguments and errors are those of Connection."""
        super().__init__(address, timeout_s=timeout_s, tls_ca_file=tls_ca_file)
        self._stub = InferenceServiceStub(self._channel)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        model: str = "",
        request_id: str = "",
        priority: int = 0,
        resume_token_ids: Sequence[int] = (),
    ) -> Completion:
        """Completes a prompt and returns when all of it is there. No `params`: the defaults.

        priority: lower numbers are served first. resume_token_ids: output that is already here,
        from a stream that broke; only what follows is returned.
        """
        request = codec.encode_generate(
            prompt, params or SamplingParams(), model, request_id, priority, resume_token_ids
        )
        with self._reported():
            return codec.decode_completion(self._stub.Generate(request, timeout=self.timeout_s))

    def generate_stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        model: str = "",
        request_id: str = "",
        priority: int = 0,
        resume_token_ids: Sequence[int] = (),
    ) -> Iterator[StreamChunk]:
        """Completes a prompt and yields what each decoding step adds.

        The call begins with the first `next`; closing the iterator early ends the generation.
        priority, resume_token_ids: as in `generate`.
        """
        request = codec.encode_generate(
            prompt, params or SamplingParams(), model, request_id, priority, resume_token_ids
        )
        return self._stream(request)

    def tokenize(
        self,
        prompt: str | Sequence[ChatMessage],
        *,
        model: str = "",
        add_special_tokens: bool = True,
    ) -> TokenizedInput:
        """Encodes a text or a chat as `generate` does; `add_special_tokens` concerns texts only."""
        request = codec.encode_tokenize(prompt, model, add_special_tokens=add_special_tokens)
        with self._reported():
            return codec.decode_tokens(self._stub.Tokenize(request, timeout=self.timeout_s))

    def model_info(self, model: str = "") -> ModelInfo:
        """Describes the model that is loaded."""
        request = pb.GetModelInfoRequest(model=model)
        with self._reported():
            response = self._stub.GetModelInfo(request, timeout=self.timeout_s)
            return codec.decode_model_info(response)

    def _stream(self, request: pb.GenerateRequest) -> Iterator[StreamChunk]:
        with self._reported():
            call = self._stub.GenerateStream(request, timeout=self.timeout_s)
            try:
                yield from map(codec.decode_chunk, call)
            finally:
                call.cancel()  # no effect on a call that has ended
