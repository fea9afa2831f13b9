"""The gRPC services. One class mounts on Ray Serve's ingress and on our own `grpc.aio` server.

Serve hands the context to a parameter named `grpc_context`; grpc passes it by position. A call that
names another application's model is answered there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from grpc_health.v1 import health_pb2

from cluster.api.admin_token import AdminAccess
from cluster.api.api_keys import ApiKeys, Lease
from cluster.api.grpc import admin_codec, codec
from cluster.api.grpc.forwarding import Guard, by_model, streamed_by_model
from cluster.api.grpc.malformed_requests import ReadableOnly
from cluster.api.grpc.output_codec import encode_completion, encode_stream_chunk
from cluster.api.grpc.status import reporting_to
from cluster.control.client import ControlClient
from cluster.control.peers import Applications
from cluster.control.stats_stream import StatsStreams
from cluster.observability.request_context import current_headers
from cluster.replica.limits import check_model
from cluster.replica.router import Router
from protos.specdec.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from protos.specdec.v1 import inference_pb2 as pb
from specdec.config.engine import MAX_STREAM_INTERVAL
from specdec.engine.input_processor import check_answer_in_one_message
from specdec.engine.outputs import RequestOutput
from specdec.types.profile import ProfileOrder, ProfileReport

SERVICE_NAMES = tuple(
    service.full_name
    for file in (pb.DESCRIPTOR, admin_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
)


def add_inference_service(servicer: Any, server: Any) -> None:
    """Mounts InferenceService on a server of ours or of Ray Serve's proxy."""
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, ReadableOnly(server))


def add_admin_service(servicer: Any, server: Any) -> None:
    """Mounts AdminService likewise."""
    admin_pb2_grpc.add_AdminServiceServicer_to_server(servicer, ReadableOnly(server))


TakeProfile = Callable[[ProfileOrder], Awaitable[ProfileReport]]


def _authorization(grpc_context: Any) -> str | None:
    value: str | None = dict(grpc_context.invocation_metadata() or ()).get("authorization")
    return value


def _check_key(servicer: InferenceServicer, grpc_context: Any) -> None:
    servicer.keys.check(_authorization(grpc_context))


def _check_token(servicer: AdminServicer, grpc_context: Any) -> None:
    servicer.access.check(_authorization(grpc_context))


_BY_KEY = Guard(_check_key, lambda servicer, code: servicer.router.metrics.count_failure(code))
_BY_TOKEN = Guard(_check_token, lambda servicer, code: None)  # metrics tell of requests


class InferenceServicer:
    """InferenceService over a Router. The errors that a caller reads are written for callers."""

    def __init__(
        self, router: Router, keys: ApiKeys, applications: Applications | None = None
    ) -> None:
        """applications: who has other models; None where nobody can have."""
        self.router = router
        self.keys = keys
        self.applications = applications

    @streamed_by_model(_BY_KEY)
    async def GenerateStream(
        self, request: pb.GenerateRequest, grpc_context: Any
    ) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
        """One message a step and choice. Cancelling the call aborts the request."""
        _keep_metadata(grpc_context)
        with self._reporting_to(grpc_context), self._admit(grpc_context):
            generation = await self.router.generate(codec.decode_generate(request))
            is_first = True
            async with aclosing(generation.outputs) as outputs:
                async for output in outputs:
                    yield await self._encode_chunk(generation.seed, output, is_first=is_first)
                    is_first = False

    @by_model(pb.GenerateResponse, _BY_KEY)
    async def Generate(self, request: pb.GenerateRequest, grpc_context: Any) -> pb.GenerateResponse:
        """The whole completion as one message. Cancelling the call aborts the request."""
        _keep_metadata(grpc_context)
        with self._reporting_to(grpc_context), self._admit(grpc_context):
            # One message, so nothing of it is wanted before its end.
            call = replace(codec.decode_generate(request), stream_interval=MAX_STREAM_INTERVAL)
            check_answer_in_one_message(call.params, self.router.max_tokens(call.params))
            generation = await self.router.generate(call)
            async with aclosing(generation.outputs) as outputs:
                said = [output async for output in outputs]
            # Off the event loop, as all log-probabilities of a prompt are below: spelling a hundred
            # thousand tokens takes a while.
            return await asyncio.to_thread(
                encode_completion, generation.seed, said, self.router.text.spell
            )
        return pb.GenerateResponse()

    @by_model(pb.TokenizeResponse, _BY_KEY)
    async def Tokenize(self, request: pb.TokenizeRequest, grpc_context: Any) -> pb.TokenizeResponse:
        """The token ids of a text or a chat."""
        with self._reporting_to(grpc_context), self._admit(grpc_context):
            token_ids = await self.router.tokenize(codec.decode_tokenize(request))
            tokens = await asyncio.to_thread(self.router.text.spell, token_ids)
            return codec.encode_tokens(token_ids, tokens, self.router.max_model_len)
        return pb.TokenizeResponse()

    @by_model(pb.DetokenizeResponse, _BY_KEY)
    async def Detokenize(
        self, request: pb.DetokenizeRequest, grpc_context: Any
    ) -> pb.DetokenizeResponse:
        """The text of token ids."""
        with self._reporting_to(grpc_context), self._admit(grpc_context):
            text = await self.router.detokenize(codec.decode_detokenize(request))
            return pb.DetokenizeResponse(text=text)
        return pb.DetokenizeResponse()

    @by_model(pb.GetModelInfoResponse, _BY_KEY)
    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, grpc_context: Any
    ) -> pb.GetModelInfoResponse:
        """The model and how it is served."""
        with self._reporting_to(grpc_context):
            _check_key(self, grpc_context)
            info = self.router.model_info(check_model(request.model))
            return codec.encode_model_info(info)
        return pb.GetModelInfoResponse()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, grpc_context: Any
    ) -> health_pb2.HealthCheckResponse:
        """grpc.health.v1 on Serve's ingress; our own server mounts grpc's servicer instead."""
        status = health_pb2.HealthCheckResponse.ServingStatus
        is_ready = self.router.is_ready
        return health_pb2.HealthCheckResponse(
            status=status.SERVING if is_ready else status.NOT_SERVING
        )

    async def _encode_chunk(
        self, seed: int, output: RequestOutput, *, is_first: bool
    ) -> pb.GenerateStreamResponse:
        spell = self.router.text.spell
        encode = partial(encode_stream_chunk, seed, output, spell, is_first=is_first)
        return encode() if output.prompt_logprobs is None else await asyncio.to_thread(encode)

    def _admit(self, grpc_context: Any) -> Lease:
        """A place of the caller's key, for what the model runs for."""
        return self.keys.admit(_authorization(grpc_context))

    def _reporting_to(self, grpc_context: Any) -> AbstractContextManager[None]:
        return reporting_to(grpc_context, self.router.metrics.count_failure)


class AdminServicer:
    """AdminService on any Router: it passes on to the ControlPlane what is not its own affair."""

    def __init__(
        self,
        control: ControlClient,
        access: AdminAccess,
        watches: StatsStreams,
        profile: TakeProfile,
        applications: Applications | None = None,
    ) -> None:
        """profile: takes one, of this replica or of the one that is meant.

        applications: who has other models; None where nobody can have.
        """
        self.applications = applications
        self.control = control
        self.access = access
        self.watches = watches
        self.take_profile = profile

    @by_model(admin_pb2.GetSpeculationResponse, _BY_TOKEN)
    async def GetSpeculation(
        self, request: admin_pb2.GetSpeculationRequest, grpc_context: Any
    ) -> admin_pb2.GetSpeculationResponse:
        """What is wanted of speculation, and who wanted it."""
        with reporting_to(grpc_context):
            _check_token(self, grpc_context)
            state = await self.control.speculation()
            return admin_pb2.GetSpeculationResponse(state=admin_codec.encode_state(state))
        return admin_pb2.GetSpeculationResponse()

    @by_model(admin_pb2.SetSpeculationResponse, _BY_TOKEN)
    async def SetSpeculation(
        self, request: admin_pb2.SetSpeculationRequest, grpc_context: Any
    ) -> admin_pb2.SetSpeculationResponse:
        """Changes it for every replica."""
        with reporting_to(grpc_context):
            _check_token(self, grpc_context)
            state = await self.control.set_speculation(admin_codec.decode_change(request))
            return admin_pb2.SetSpeculationResponse(state=admin_codec.encode_state(state))
        return admin_pb2.SetSpeculationResponse()

    @by_model(admin_pb2.GetStatusResponse, _BY_TOKEN)
    async def GetStatus(
        self, request: admin_pb2.GetStatusRequest, grpc_context: Any
    ) -> admin_pb2.GetStatusResponse:
        """Every replica with its load, and what is in force."""
        with reporting_to(grpc_context):
            _check_token(self, grpc_context)
            return admin_codec.encode_status(await self.control.status())
        return admin_pb2.GetStatusResponse()

    @by_model(admin_pb2.ListReplicasResponse, _BY_TOKEN)
    async def ListReplicas(
        self, request: admin_pb2.ListReplicasRequest, grpc_context: Any
    ) -> admin_pb2.ListReplicasResponse:
        """Every replica with its load."""
        with reporting_to(grpc_context):
            _check_token(self, grpc_context)
            replicas = (await self.control.status()).replicas
            encoded = map(admin_codec.encode_replica, replicas)
            return admin_pb2.ListReplicasResponse(replicas=encoded)
        return admin_pb2.ListReplicasResponse()

    @by_model(admin_pb2.ListAuditLogResponse, _BY_TOKEN)
    async def ListAuditLog(
        self, request: admin_pb2.ListAuditLogRequest, grpc_context: Any
    ) -> admin_pb2.ListAuditLogResponse:
        """A page of changes, the newest first."""
        with reporting_to(grpc_context):
            _check_token(self, grpc_context)
            page = await self.control.audit_log(request.page_size, request.page_token)
            return admin_codec.encode_audit_page(page)
        return admin_pb2.ListAuditLogResponse()

    @streamed_by_model(_BY_TOKEN)
    async def WatchStats(
        self, request: admin_pb2.WatchStatsRequest, grpc_context: Any
    ) -> AsyncGenerator[admin_pb2.WatchStatsResponse, None]:
        """The fleet's statistics at each interval; ends when the replica drains."""
        with reporting_to(grpc_context):
            _check_token(self, grpc_context)
            async with aclosing(self.watches.watch(request.interval_s)) as moments:
                async for fleet in moments:
                    yield admin_codec.encode_fleet(fleet)

    @by_model(admin_pb2.ProfileResponse, _BY_TOKEN)
    async def Profile(
        self, request: admin_pb2.ProfileRequest, grpc_context: Any
    ) -> admin_pb2.ProfileResponse:
        """Profiles the models of a replica."""
        with reporting_to(grpc_context):
            _check_token(self, grpc_context)
            order = admin_codec.decode_profile_order(request)
            return admin_codec.encode_profile(await self.take_profile(order))
        return admin_pb2.ProfileResponse()


def _keep_metadata(grpc_context: Any) -> None:
    current_headers.set(lambda: grpc_context.invocation_metadata() or ())
