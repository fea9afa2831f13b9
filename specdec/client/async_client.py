"""A client for asyncio, for applications that have many requests under way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Self, Unpack

import grpc.aio

from protos.specdec.v1 import inference_pb2 as pb
from specdec.client.attempts import RETRY_DELAYS_S, Attempts
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
from specdec.client.errors import ClientError, closed_error
from specdec.client.resumption import Resumption
from specdec.client.watchdog import TaskWatch
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
        self._is_closed = True
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
        return self._resumed(request, is_resumable=resume and (params is None or params.n == 1))

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
        attempts = Attempts(self.timeout_s, RETRY_DELAYS_S)
        while True:
            try:
                with self._reported(attempts.timeout_s):
                    metadata, left_s = self._destination.metadata, attempts.left_s
                    async with asyncio.timeout(attempts.wait_s):
                        return await method(request, timeout=left_s, metadata=metadata)
            except ClientError as error:
                delay_s = attempts.delay_s(error)
            await asyncio.sleep(delay_s)

    async def _resumed(
        self, request: pb.GenerateRequest, *, is_resumable: bool
    ) -> AsyncGenerator[StreamChunk, None]:
        attempts = Resumption(request, self.timeout_s, is_resumable=is_resumable)
        while True:
            try:
                async with aclosing(self._stream(request, attempts)) as chunks:
                    async for chunk in chunks:
                        attempts.record(chunk)
                        yield chunk
                        if attempts.is_complete:
                            return
                return
            except ClientError as error:
                delay_s = attempts.delay_s(error)
            await asyncio.sleep(delay_s)

    async def _stream(
        self, request: pb.GenerateRequest, attempts: Attempts
    ) -> AsyncGenerator[StreamChunk, None]:
        with self._reported(attempts.timeout_s):
            metadata = self._destination.metadata
            call = self._stub.GenerateStream(request, timeout=attempts.left_s, metadata=metadata)
            watch = TaskWatch()
            try:
                with watch.within(attempts.wait_s):
                    watch.begin_wait()
                    async for message in call:
                        watch.end_wait()
                        yield decode_chunk(message)
                        watch.begin_wait()
            finally:
                call.cancel()  # no effect on a call that has ended

    @contextmanager
    def _reported(self, timeout_s: float | None) -> Iterator[None]:
        """Raise ClientError in place of the errors of a call, also if the client was closed."""
        with super()._reported(timeout_s):
            try:
                yield
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if self._is_closed and not (task and task.cancelling()):
                    raise closed_error() from None  # gRPC cancels the calls of a closed channel
                raise
