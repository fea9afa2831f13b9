"""The gRPC services, for Ray Serve's ingress and for our own `grpc.aio` server.

Serve passes the context to a parameter named `grpc_context`; grpc passes it by position.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from math import inf
from typing import Any

from grpc_health.v1 import health_pb2

from cluster.api.base.authentication import ApiKeys
from cluster.api.base.byte_budget import ByteBudget
from cluster.api.base.operator_service import OperatorService
from cluster.api.grpc.rpc_access import (
    ADMITTED,
    BY_KEY,
    BY_TOKEN,
    admit,
    authorization,
    check_token,
    forward,
    keep_metadata,
    unary,
)
from cluster.api.grpc.status import DecodingServer, raise_on_serve, reporting_to
from cluster.control.peers import Applications
from cluster.replica.limits import check_detokenize, check_model, check_request, check_tokenize
from cluster.replica.router import Router
from protos.specdec.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from protos.specdec.v1 import inference_pb2 as pb
from specdec.client.codec import admin as codec
from specdec.client.codec.inference import DETOKENIZE, MODEL_INFO, TOKENIZE, TOKENS, decode_request
from specdec.client.codec.outputs import encode_chunk, encode_completion
from specdec.config.engine import MAX_STREAM_INTERVAL
from specdec.engine.requests.input_processor import check_answer_in_one_message
from specdec.types.adapters import AdapterOrder
from specdec.types.drafters import DrafterOrder
from specdec.types.request import GenerateRequest
from specdec.types.responses import TokenizedInput
from specdec.types.sampling.sampling_params import SamplingParams

_MANY_TOKENS = 256
"""The message of more tokens takes over a tenth of a millisecond."""


def add_inference_service(servicer: Any, server: Any) -> None:
    """Mount InferenceService on a server of ours or of Ray Serve's proxy."""
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, DecodingServer(server))


def add_admin_service(servicer: Any, server: Any) -> None:
    """Mount AdminService on such a server."""
    admin_pb2_grpc.add_AdminServiceServicer_to_server(servicer, DecodingServer(server))


def expose_rpcs(servicer: InferenceServicer | AdminServicer, deployment: object) -> None:
    """Set the RPCs of a servicer on a deployment, where Serve's proxies call them by name."""
    for name in dir(servicer):
        if name[0].isupper():
            setattr(deployment, name, getattr(servicer, name))


class InferenceServicer:
    """InferenceService over a Router."""

    def __init__(
        self,
        router: Router,
        keys: ApiKeys,
        applications: Applications | None = None,
        budget: ByteBudget | None = None,
    ) -> None:
        """applications: those that serve other models; None where there can be none.

        budget: shared with the other interfaces of the process.
        """
        self.budget = budget or ByteBudget(inf)
        self.router = router
        self.keys = keys
        forward(self, applications, BY_KEY, pb.DESCRIPTOR)

    async def GenerateStream(
        self, request: pb.GenerateRequest, grpc_context: Any
    ) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
        """Yield one message per step and choice. Cancelling the call aborts the request."""
        keep_metadata(grpc_context)
        count = self.router.metrics.count_failure
        with (
            reporting_to(grpc_context, count),
            admit(self, grpc_context),
            self.budget.hold(request.ByteSize()),
        ):
            generation = await self.router.generate(self._decode(request, grpc_context))
            encode = partial(
                encode_chunk, generation.request_id, generation.seed, spell=self.router.text.spell
            )
            is_first = True
            async with aclosing(generation.outputs) as outputs:
                async for output in outputs:
                    if output.prompt_logprobs is None:
                        yield encode(output, is_first=is_first)
                    else:  # off the event loop, since it may be long
                        yield await asyncio.to_thread(encode, output, is_first=is_first)
                    is_first = False
        raise_on_serve(grpc_context)

    @unary(ADMITTED)
    async def Generate(self, request: pb.GenerateRequest, grpc_context: Any) -> pb.GenerateResponse:
        """Return the whole completion. Cancelling the call aborts the request."""
        request.stream_interval = MAX_STREAM_INTERVAL  # nothing is needed before the end
        call = self._decode(request, grpc_context)
        check_answer_in_one_message(call.params, self.router.max_tokens(call.params))
        generation = await self.router.generate(call)
        async with aclosing(generation.outputs) as outputs:
            parts = [output async for output in outputs]
        encode = partial(
            encode_completion, generation.request_id, generation.seed, parts, self.router.text.spell
        )
        # Off the event loop: spelling a hundred thousand tokens takes a while.
        is_long = _is_long(call.params, parts[-1].num_output_tokens)
        return await asyncio.to_thread(encode) if is_long else encode()

    @unary(ADMITTED)
    async def Tokenize(self, request: pb.TokenizeRequest, grpc_context: Any) -> pb.TokenizeResponse:
        """Return the token ids of a text or a chat."""
        token_ids = await self.router.tokenize(check_tokenize(TOKENIZE.decode(request)))
        tokens = await asyncio.to_thread(self.router.text.spell, token_ids)
        spelled = TokenizedInput(tuple(token_ids), tuple(tokens), self.router.max_model_len)
        return TOKENS.encode(spelled)

    @unary(ADMITTED)
    async def Detokenize(
        self, request: pb.DetokenizeRequest, grpc_context: Any
    ) -> pb.DetokenizeResponse:
        """Return the text of token ids."""
        text = await self.router.detokenize(check_detokenize(DETOKENIZE.decode(request)))
        return pb.DetokenizeResponse(text=text)

    @unary(BY_KEY)
    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, grpc_context: Any
    ) -> pb.GetModelInfoResponse:
        """Return the description of the model."""
        return MODEL_INFO.encode(self.router.model_info(check_model(request.model)))

    def _decode(self, request: pb.GenerateRequest, grpc_context: Any) -> GenerateRequest:
        call = decode_generate(request)
        self.keys.check_priority(authorization(grpc_context), call.priority)
        return call

    async def Check(
        self, request: health_pb2.HealthCheckRequest, grpc_context: Any
    ) -> health_pb2.HealthCheckResponse:
        """Serve grpc.health.v1 on Serve's ingress; our own server mounts grpc's servicer."""
        status = health_pb2.HealthCheckResponse.ServingStatus
        is_ready = self.router.is_ready
        return health_pb2.HealthCheckResponse(
            status=status.SERVING if is_ready else status.NOT_SERVING
        )


class AdminServicer:
    """AdminService over an OperatorService."""

    def __init__(self, operators: OperatorService, budget: ByteBudget | None = None) -> None:
        """budget: shared with the other interfaces of the process."""
        self.budget = budget or ByteBudget(inf)
        self.operators = operators
        forward(self, operators.applications, BY_TOKEN, admin_pb2.DESCRIPTOR)

    @unary(BY_TOKEN)
    async def GetSpeculation(
        self, request: admin_pb2.GetSpeculationRequest, grpc_context: Any
    ) -> admin_pb2.GetSpeculationResponse:
        """Return the speculation settings, and who made them."""
        state = await self.operators.control.speculation()
        return admin_pb2.GetSpeculationResponse(state=codec.STATE.encode(state))

    @unary(BY_TOKEN)
    async def SetSpeculation(
        self, request: admin_pb2.SetSpeculationRequest, grpc_context: Any
    ) -> admin_pb2.SetSpeculationResponse:
        """Change the speculation settings of every replica."""
        state = await self.operators.control.set_speculation(codec.CHANGE.decode(request))
        return admin_pb2.SetSpeculationResponse(state=codec.STATE.encode(state))

    @unary(BY_TOKEN)
    async def GetStatus(
        self, request: admin_pb2.GetStatusRequest, grpc_context: Any
    ) -> admin_pb2.GetStatusResponse:
        """Return every replica with its load, and the speculation settings."""
        return codec.STATUS.encode(await self.operators.control.status())

    @unary(BY_TOKEN)
    async def ListReplicas(
        self, request: admin_pb2.ListReplicasRequest, grpc_context: Any
    ) -> admin_pb2.ListReplicasResponse:
        """Return every replica with its load."""
        replicas = (await self.operators.control.status()).replicas
        return admin_pb2.ListReplicasResponse(replicas=map(codec.REPLICA.encode, replicas))

    @unary(BY_TOKEN)
    async def ListAuditLog(
        self, request: admin_pb2.ListAuditLogRequest, grpc_context: Any
    ) -> admin_pb2.ListAuditLogResponse:
        """Return a page of changes, the newest first."""
        page = await self.operators.control.audit_log(request.page_size, request.page_token)
        return codec.AUDIT_PAGE.encode(page)

    async def WatchStats(
        self, request: admin_pb2.WatchStatsRequest, grpc_context: Any
    ) -> AsyncGenerator[admin_pb2.WatchStatsResponse, None]:
        """Yield the statistics of the service at each interval, until the replica drains."""
        with reporting_to(grpc_context), check_token(self, grpc_context):
            async with aclosing(self.operators.stats_streams.watch(request.interval_s)) as moments:
                async for fleet in moments:
                    yield self.operators.stats_streams.encoded(fleet, codec.FLEET.encode)
        raise_on_serve(grpc_context)

    @unary(BY_TOKEN)
    async def Profile(
        self, request: admin_pb2.ProfileRequest, grpc_context: Any
    ) -> admin_pb2.ProfileResponse:
        """Profile the models of a replica."""
        order = codec.PROFILE_ORDER.decode(request)
        return codec.PROFILE.encode(await self.operators.orders.profile(order))

    @unary(BY_TOKEN)
    async def ListDrafters(
        self, request: admin_pb2.ListDraftersRequest, grpc_context: Any
    ) -> admin_pb2.ListDraftersResponse:
        """Return the versions of the draft head of every replica."""
        reports = await self.operators.orders.drafter(DrafterOrder())
        return admin_pb2.ListDraftersResponse(replicas=map(codec.DRAFTERS.encode, reports))

    @unary(BY_TOKEN)
    async def SetDrafter(
        self, request: admin_pb2.SetDrafterRequest, grpc_context: Any
    ) -> admin_pb2.SetDrafterResponse:
        """Change the version of the draft head in use."""
        order = codec.DRAFTER_ORDER.decode(request).with_change()
        reports = await self.operators.orders.drafter(order)
        return admin_pb2.SetDrafterResponse(replicas=map(codec.DRAFTERS.encode, reports))

    @unary(BY_TOKEN)
    async def ListAdapters(
        self, request: admin_pb2.ListAdaptersRequest, grpc_context: Any
    ) -> admin_pb2.ListAdaptersResponse:
        """Return the adapters of every replica."""
        reports = await self.operators.orders.adapter(AdapterOrder())
        return admin_pb2.ListAdaptersResponse(replicas=map(codec.ADAPTERS.encode, reports))

    @unary(BY_TOKEN)
    async def LoadAdapter(
        self, request: admin_pb2.LoadAdapterRequest, grpc_context: Any
    ) -> admin_pb2.LoadAdapterResponse:
        """Load an adapter."""
        order = AdapterOrder.load(
            request.name,
            request.path,
            replaces=request.replaces,
            replica_id=request.replica_id,
            draft_path=request.draft_path,
        )
        reports = await self.operators.orders.adapter(order)
        return admin_pb2.LoadAdapterResponse(replicas=map(codec.ADAPTERS.encode, reports))

    @unary(BY_TOKEN)
    async def UnloadAdapter(
        self, request: admin_pb2.UnloadAdapterRequest, grpc_context: Any
    ) -> admin_pb2.UnloadAdapterResponse:
        """Unload an adapter."""
        order = AdapterOrder.unload(request.name, replica_id=request.replica_id)
        reports = await self.operators.orders.adapter(order)
        return admin_pb2.UnloadAdapterResponse(replicas=map(codec.ADAPTERS.encode, reports))

    @unary(BY_TOKEN)
    async def TakeSamples(
        self, request: admin_pb2.TakeSamplesRequest, grpc_context: Any
    ) -> admin_pb2.TakeSamplesResponse:
        """Return answers of requests that allow training, and forget them."""
        batches = await self.operators.orders.take_samples(codec.SAMPLE_ORDER.decode(request))
        return admin_pb2.TakeSamplesResponse(replicas=map(codec.SAMPLES.encode, batches))


def _is_long(params: SamplingParams, num_tokens: int) -> bool:
    """Return whether an answer with this number of tokens is worth the switch to a thread."""
    has_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
    return has_logprobs or num_tokens > _MANY_TOKENS


def decode_generate(message: pb.GenerateRequest) -> GenerateRequest:
    """Return the request in a message. Raises InvalidValueError for what exceeds a limit."""
    return check_request(decode_request(message), is_chat=message.HasField("chat"))
