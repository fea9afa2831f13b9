"""A client that blocks, for scripts and the command line."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from protos.specdec.v1 import inference_pb2 as pb
from protos.specdec.v1.inference_pb2_grpc import InferenceServiceStub
from specdec.client import codec
from specdec.client.connection import Connection, Destination
from specdec.client.output_codec import decode_chunk, decode_completion
from specdec.client.resumption import TimeLeft, resumed
from specdec.types.chat import ChatMessage
from specdec.types.responses import Completion, ModelInfo, Prompt, StreamChunk, TokenizedInput
from specdec.types.sampling_params import SamplingParams

DEFAULT_TIMEOUT_S = 300.0


class Client(Connection):
    """Asks a service for completions. A context manager; thread-safe.

    Every call raises ClientError when it fails, and InvalidValueError for arguments that cannot
    even be sent. A call to which the service is unavailable is tried again a few times, within its
    time. An empty `model` stands for the one that is loaded.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        tls_ca_file: Path | None = None,
        tls_server_name: str | None = None,
        api_key: str | None = None,
    ) -> None:
        """Arguments and errors are those of `Destination`, whose bearer the API key is."""
        super().__init__(Destination(address, timeout_s, tls_ca_file, api_key, tls_server_name))
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
        cache_salt: str = "",
    ) -> Completion:
        """Completes a prompt and returns when all of it is there. No `params`: the defaults.

        priority: lower numbers are served first. resume_token_ids: output that is already here,
        from a stream that broke; only what follows is returned. cache_salt: cached prompts and
        drafts from earlier answers are shared only among requests with the same one.
        """
        request = codec.encode_generate(
            prompt,
            params or SamplingParams(),
            model,
            request_id,
            priority,
            resume_token_ids,
            cache_salt=cache_salt,
        )
        return decode_completion(self._call(self._stub.Generate, request))

    def generate_stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        model: str = "",
        request_id: str = "",
        priority: int = 0,
        resume_token_ids: Sequence[int] = (),
        stream_interval: int | None = None,
        cache_salt: str = "",
        resume: bool = True,
    ) -> Iterator[StreamChunk]:
        """Completes a prompt and yields what each decoding step adds to each choice.

        The call begins with the first `next`; closing the iterator early ends the generation.
        priority, resume_token_ids, cache_salt: as in `generate`. stream_interval: new tokens of a
        choice that a chunk waits for; the first and the last do not, and the second may be shorter;
        None: as the service is configured. resume: whether a stream that broke because its replica
        was lost or stopped goes on with another one, with the tokens that would have come; nothing
        that has been yielded comes again. With several choices (`params.n`) it never does, and
        raises.
        """
        params = params or SamplingParams()
        request = codec.encode_generate(
            prompt,
            params,
            model,
            request_id,
            priority,
            resume_token_ids,
            stream_interval,
            cache_salt,
        )
        return (
            self._resumed(request)
            if resume and params.n == 1
            else self._stream(request, self.timeout_s)
        )

    def tokenize(
        self,
        prompt: str | Sequence[ChatMessage],
        *,
        model: str = "",
        add_special_tokens: bool = True,
    ) -> TokenizedInput:
        """Encodes a text or a chat as `generate` does; `add_special_tokens` concerns texts only."""
        request = codec.encode_tokenize(prompt, model, add_special_tokens=add_special_tokens)
        return codec.decode_tokens(self._call(self._stub.Tokenize, request))

    def detokenize(self, token_ids: Sequence[int], *, model: str = "") -> str:
        """The text of tokens, special ones left out."""
        request = codec.encode_detokenize(token_ids, model)
        text: str = self._call(self._stub.Detokenize, request).text
        return text

    def model_info(self, model: str = "") -> ModelInfo:
        """Describes the model that is loaded."""
        request = pb.GetModelInfoRequest(model=model)
        return codec.decode_model_info(self._call(self._stub.GetModelInfo, request))

    def _call(self, method: Any, request: Any) -> Any:
        with self._destination.reported():
            return method(request, timeout=self.timeout_s, metadata=self._destination.metadata)

    def _resumed(self, request: pb.GenerateRequest) -> Iterator[StreamChunk]:
        """All attempts share the time that a call has."""
        left = TimeLeft(self.timeout_s, time.monotonic)

        def start(request: pb.GenerateRequest) -> Generator[StreamChunk, None, None]:
            return self._stream(request, left.timeout_s)

        def sleep(delay_s: float) -> None:
            time.sleep(left.pause_s(delay_s))

        yield from resumed(start, request, sleep)

    def _stream(
        self, request: pb.GenerateRequest, timeout_s: float | None
    ) -> Generator[StreamChunk, None, None]:
        with self._destination.reported():
            metadata = self._destination.metadata
            call = self._stub.GenerateStream(request, timeout=timeout_s, metadata=metadata)
            try:
                yield from map(decode_chunk, call)
            finally:
                call.cancel()  # no effect on a call that has ended
