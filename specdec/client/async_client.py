"""A client for asyncio, for applications that have many requests under way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Self, Unpack

import grpc.aio

from protos.specdec.v1 import inference_pb2 as pb
from specdec.client.calls import (
    GenerateOptions,
    InferenceConnection,
    StreamOptions,
    detokenize_message,
    generate_message,
    tokenize_message,
)
from specdec.client.codec.inference import MODEL_INFO, TOKENS
from specdec.client.codec.outputs import decode_chunk, decode_completion
from specdec.client.connection import ClientError
from specdec.client.resumption import Resumption
from specdec.types.request import ChatMessage
from specdec.types.responses import Completion, ModelInfo, Prompt, StreamChunk, TokenizedInput
from specdec.types.sampling.sampling_params import SamplingParams


class AsyncClient(InferenceConnection):
    """`Client` for asyncio: the same calls, arguments and errors.

    An asynchronous context manager, for one event loop. Cancelling a task that waits for a call
    cancels the call, and so its generation.
    """

    _library = grpc.aio

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; running calls are cancelled."""
        await self._channel.close()

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """Complete a prompt and return the whole answer, as `Client.generate` does."""
        request = generate_message(prompt, params, options)
        return decode_completion(await self._call(self._stub.Generate, request))

    def generate_stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        resume: bool = True,
        **options: Unpack[StreamOptions],
    ) -> AsyncGenerator[StreamChunk, None]:
        """Complete a prompt and yield what each decoding step adds; see `Client`.

        The call begins with the first chunk that is requested. Closing the iterator early
        (`contextlib.aclosing`) or cancelling the task aborts the generation.
        """
        request = generate_message(prompt, params, options)
        if resume and (params is None or params.n == 1):
            return self._resumed(request)
        return self._stream(request, self.timeout_s)

    async def tokenize(
        self,
        prompt: str | Sequence[ChatMessage],
        *,
        model: str = "",
        add_special_tokens: bool = True,
    ) -> TokenizedInput:
        """Encode a text or a chat as `generate` does; `add_special_tokens` applies to texts."""
        request = tokenize_message(prompt, model, add_special_tokens=add_special_tokens)
        return TOKENS.decode(await self._call(self._stub.Tokenize, request))

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "") -> str:
        """Return the text of tokens without special tokens."""
        request = detokenize_message(token_ids, model)
        text: str = (await self._call(self._stub.Detokenize, request)).text
        return text

    async def model_info(self, model: str = "") -> ModelInfo:
        """Return the description of the model that is loaded."""
        request = pb.GetModelInfoRequest(model=model)
        return MODEL_INFO.decode(await self._call(self._stub.GetModelInfo, request))

    async def _call(self, method: Any, request: Any) -> Any:
        with self._destination.reported():
            return await method(
                request, timeout=self.timeout_s, metadata=self._destination.metadata
            )

    async def _resumed(self, request: pb.GenerateRequest) -> AsyncGenerator[StreamChunk, None]:
        now_s = asyncio.get_running_loop().time
        resumption = Resumption(request, self.timeout_s, now_s)
        while True:
            try:
                async with aclosing(self._stream(request, resumption.timeout_s)) as chunks:
                    async for chunk in chunks:
                        resumption.record(chunk)
                        yield chunk
                        if resumption.is_complete:
                            return
                return
            except ClientError as error:
                delay_s = resumption.delay_s(error)
            await asyncio.sleep(delay_s)

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
