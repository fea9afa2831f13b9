"""A client for asyncio, for applications that have many requests under way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from protos.specdec.v1 import inference_pb2 as pb
from protos.specdec.v1.inference_pb2_grpc import InferenceServiceStub
from specdec.client import codec
from specdec.client.connection import AsyncConnection, Destination
from specdec.client.output_codec import decode_chunk, decode_completion
from specdec.client.resumption import TimeLeft, resumed_async
from specdec.client.sync_client import DEFAULT_TIMEOUT_S
from specdec.types.chat import ChatMessage
from specdec.types.responses import Completion, ModelInfo, Prompt, StreamChunk, TokenizedInput
from specdec.types.sampling_params import SamplingParams


class AsyncClient(AsyncConnection):
    """`Client` for asyncio: the same calls, arguments and errors.

    An asynchronous context manager, for one event loop. Cancelling a task that waits for a call
    cancels the call, and so its generation.
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
        """Arguments and errors are those of `Client`."""
        super().__init__(Destination(address, timeout_s, tls_ca_file, api_key, tls_server_name))
        self._stub = InferenceServiceStub(self._channel)

    async def generate(
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
        """Completes a prompt and returns when all of it is there; arguments as of `Client`."""
        request = codec.encode_generate(
            prompt,
            params or SamplingParams(),
            model,
            request_id,
            priority,
            resume_token_ids,
            cache_salt=cache_salt,
        )
        return decode_completion(await self._call(self._stub.Generate, request))

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
    ) -> AsyncGenerator[StreamChunk, None]:
        """Completes a prompt and yields what each decoding step adds; arguments as of `Client`.

        The call begins with the first chunk that is asked for. Leave it early by closing the
        iterator (`contextlib.aclosing`) or by cancelling the task: that ends the generation.
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
            else self._stream(request, self._destination.timeout_s)
        )

    async def tokenize(
        self,
        prompt: str | Sequence[ChatMessage],
        *,
        model: str = "",
        add_special_tokens: bool = True,
    ) -> TokenizedInput:
        """Encodes a text or a chat as `generate` does; `add_special_tokens` concerns texts only."""
        request = codec.encode_tokenize(prompt, model, add_special_tokens=add_special_tokens)
        return codec.decode_tokens(await self._call(self._stub.Tokenize, request))

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "") -> str:
        """The text of tokens, special ones left out."""
        request = codec.encode_detokenize(token_ids, model)
        text: str = (await self._call(self._stub.Detokenize, request)).text
        return text

    async def model_info(self, model: str = "") -> ModelInfo:
        """Describes the model that is loaded."""
        request = pb.GetModelInfoRequest(model=model)
        return codec.decode_model_info(await self._call(self._stub.GetModelInfo, request))

    async def _call(self, method: Any, request: Any) -> Any:
        with self._destination.reported():
            return await method(
                request, timeout=self._destination.timeout_s, metadata=self._destination.metadata
            )

    async def _resumed(self, request: pb.GenerateRequest) -> AsyncGenerator[StreamChunk, None]:
        """All attempts share the time that a call has."""
        left = TimeLeft(self._destination.timeout_s, asyncio.get_running_loop().time)

        def start(request: pb.GenerateRequest) -> AsyncGenerator[StreamChunk, None]:
            return self._stream(request, left.timeout_s)

        async def sleep(delay_s: float) -> None:
            await asyncio.sleep(left.pause_s(delay_s))

        async with aclosing(resumed_async(start, request, sleep)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _stream(
        self, request: pb.GenerateRequest, timeout_s: float | None
    ) -> AsyncGenerator[StreamChunk, None]:
        with self._destination.reported():
            metadata = self._destination.metadata
            call = self._stub.GenerateStream(request, timeout=timeout_s, metadata=metadata)
            try:
                async for message in call:
                    yield decode_chunk(message)
            finally:
                call.cancel()  # no effect on a call that has ended
