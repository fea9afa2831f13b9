"""A client that blocks, for scripts and the command line."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import Unpack

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
from specdec.client.connection import BlockingConnection
from specdec.client.errors import ClientError
from specdec.client.resumption import Resumption
from specdec.types.request import ChatMessage
from specdec.types.responses import Completion, ModelInfo, Prompt, StreamChunk, TokenizedInput
from specdec.types.sampling.sampling_params import SamplingParams


class Client(InferenceConnection, BlockingConnection):
    """Blocking client of InferenceService. A context manager; thread-safe.

    Every call raises ClientError when it fails, and InvalidValueError for arguments that cannot
    be sent. A call that finds the service unavailable is retried a few times within its timeout.
    """

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """Complete a prompt and return the whole answer. No `params`: the defaults."""
        request = generate_message(prompt, params, options)
        return decode_completion(self._call(self._stub.Generate, request))

    def generate_stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        resume: bool = True,
        **options: Unpack[StreamOptions],
    ) -> Iterator[StreamChunk]:
        """Complete a prompt and yield what each decoding step adds to each choice.

        The call begins with the first `next`; closing the iterator early aborts the generation.
        resume: whether a stream that is interrupted because its replica was lost or stopped
        continues on another one, with the tokens that would have followed; no chunk is yielded
        twice. A request for several choices (`params.n`) is never resumed, and raises.
        """
        request = generate_message(prompt, params, options)
        return self._resumed(request, is_resumable=resume and (params is None or params.n == 1))

    def tokenize(
        self,
        prompt: str | Sequence[ChatMessage],
        *,
        model: str = "",
        add_special_tokens: bool = True,
    ) -> TokenizedInput:
        """Encode a text or a chat as `generate` does; `add_special_tokens` applies to texts."""
        request = tokenize_message(prompt, model, add_special_tokens=add_special_tokens)
        return TOKENS.decode(self._call(self._stub.Tokenize, request))

    def detokenize(self, token_ids: Sequence[int], *, model: str = "") -> str:
        """Return the text of tokens without special tokens."""
        request = detokenize_message(token_ids, model)
        text: str = self._call(self._stub.Detokenize, request).text
        return text

    def model_info(self, model: str = "") -> ModelInfo:
        """Return the description of the model that is loaded."""
        request = pb.GetModelInfoRequest(model=model)
        return MODEL_INFO.decode(self._call(self._stub.GetModelInfo, request))

    def _resumed(
        self, request: pb.GenerateRequest, *, is_resumable: bool
    ) -> Generator[StreamChunk, None, None]:
        attempts = Resumption(request, self.timeout_s, is_resumable=is_resumable)
        method = self._stub.GenerateStream
        while True:
            try:
                with closing(self._messages(method, request, attempts)) as messages:
                    for chunk in map(decode_chunk, messages):
                        attempts.record(chunk)
                        yield chunk
                        if attempts.is_complete:
                            return  # a later error does not matter: the answer is complete
                return
            except ClientError as error:
                delay_s = attempts.delay_s(error)
            time.sleep(delay_s)
