"""A scripted InferenceService in this process that records its requests."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from protos.specdec.v1 import inference_pb2 as pb
from protos.specdec.v1 import inference_pb2_grpc

USAGE = pb.Usage(
    prompt_tokens=7,
    completion_tokens=3,
    speculation=pb.SpeculationUsage(
        num_drafts=2,
        num_draft_tokens=6,
        num_accepted_tokens=3,
        verifier=pb.VERIFIER_COUPLED,
        is_lossless=True,
    ),
)
CHUNKS = (
    pb.GenerateStreamResponse(request_id="r1", seed=42, text="Blue", token_ids=[5]),
    pb.GenerateStreamResponse(
        request_id="r1",
        seed=42,
        text=" sky",
        token_ids=[6, 7],
        finish_reason=pb.FINISH_REASON_STOP,
        usage=USAGE,
    ),
)


def logprobs(*entries: tuple[int, str, float], rank: int = 1) -> pb.Logprobs:
    """Return the log probabilities of one position: its token first, then the most likely ones."""
    token_ids, tokens, values = zip(*entries, strict=True)
    return pb.Logprobs(
        num_listed=len(entries), token_ids=token_ids, tokens=tokens, logprobs=values, ranks=[rank]
    )


CHUNKS_OF_TWO_CHOICES = (
    pb.GenerateStreamResponse(
        request_id="r1",
        seed=42,
        text="Blue",
        token_ids=[5],
        logprobs=logprobs((5, "Blue", -0.5), (5, "Blue", -0.5)),
        prompt_logprobs=logprobs((9, "Why", -2.0), (8, "How", -1.0), rank=3),
    ),
    pb.GenerateStreamResponse(
        request_id="r1",
        choice=1,
        text="Red",
        token_ids=[4],
        logprobs=logprobs((4, "Red", -1.5), (5, "Blue", -0.5), rank=2),
        finish_reason=pb.FINISH_REASON_STOP,
        stop_string="END",
    ),
    pb.GenerateStreamResponse(
        request_id="r1",
        seed=42,
        text=" sky",
        token_ids=[6],
        logprobs=logprobs((6, "\u0120sky", -0.25), (6, "\u0120sky", -0.25)),
        finish_reason=pb.FINISH_REASON_STOP,
        stop_token_id=6,
        usage=USAGE,
    ),
)


class FakeService(inference_pb2_grpc.InferenceServiceServicer):
    """A service that responds with `chunks`, or those after the first for a resumed request.

    `error` (code, details) is raised after `num_chunks_before_error`, `num_errors` times.
    """

    def __init__(self):
        self.requests: list[Any] = []
        self.metadata: dict[str, str] = {}
        self.chunks = CHUNKS
        self.error: tuple[grpc.StatusCode, str] | None = None
        self.num_chunks_before_error = 0
        self.num_errors = math.inf
        self.hangs = False
        self.is_hanging = threading.Event()
        self.ended = threading.Event()
        self.address = ""

    def GenerateStream(self, request, context):  # noqa: N802
        self._receive(request, context)
        num_there = 1 if request.resume_token_ids else 0
        for index, chunk in enumerate(self.chunks[num_there:], num_there):
            if index == self.num_chunks_before_error:
                self._fail_or_hang(context)
                if not context.is_active():
                    return
            yield chunk

    def Generate(self, request, context):  # noqa: N802
        self._receive(request, context)
        self._fail_or_hang(context)
        return pb.GenerateResponse(
            request_id="r1",
            seed=42,
            choices=[
                pb.Choice(
                    text="Blue sky", token_ids=[5, 6, 7], finish_reason=pb.FINISH_REASON_LENGTH
                )
            ],
            usage=USAGE,
        )

    def Tokenize(self, request, context):  # noqa: N802
        self._receive(request, context)
        return pb.TokenizeResponse(token_ids=[1, 2], tokens=["a", "b"], max_model_len=64)

    def Detokenize(self, request, context):  # noqa: N802
        self._receive(request, context)
        return pb.DetokenizeResponse(text="Blue")

    def GetModelInfo(self, request, context):  # noqa: N802
        self._receive(request, context)
        return pb.GetModelInfoResponse(
            model="tiny",
            architecture="LlamaForCausalLM",
            dtype="float32",
            vocab_size=100,
            max_model_len=64,
            tensor_parallel_size=2,
            speculation_method=pb.SPECULATION_METHOD_NGRAM,
            num_speculative_tokens=3,
            speculation_methods=[
                pb.SPECULATION_METHOD_NGRAM,
                pb.SPECULATION_METHOD_DRAFT_MODEL,
            ],
            version="0.1.0",
            sampling_defaults=pb.SamplingDefaults(
                temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1, max_tokens=99
            ),
        )

    def _receive(self, request, context):
        self.requests.append(request)
        self.metadata = dict(context.invocation_metadata())
        context.add_callback(self.ended.set)

    def _fail_or_hang(self, context):
        if self.error is not None and self.num_errors > 0:
            self.num_errors -= 1
            context.abort(*self.error)
        if self.hangs:
            self.is_hanging.set()
            self.ended.wait(60)


@contextmanager
def running(service: FakeService, credentials: Any = None) -> Iterator[FakeService]:
    """Run the service on a free port of the loopback interface; set `service.address`."""
    server = grpc.server(ThreadPoolExecutor(2))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    service.address = f"127.0.0.1:{port}"
    server.start()
    try:
        yield service
    finally:
        service.ended.set()
        server.stop(0).wait()
