"""The routes of SGLang's native HTTP API."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from cluster.api.base.authentication import ApiKeys
from cluster.api.base.operator_service import OperatorService
from cluster.api.http.bodies import ApiRequest
from cluster.api.openai.generation import generate_response
from cluster.api.openai.request_handler import RequestHandler, authorization_of
from cluster.api.openai.streams import cancel_on_disconnect
from cluster.api.sglang.generate import prepare_generate
from cluster.api.sglang.schema import AbortRequest, FlushRequest, GenerateRequest
from cluster.config.serve_config import ServeConfig
from cluster.observability.request_context import current_caller
from cluster.replica.limits import check_model
from cluster.replica.orders import AbortOrder
from cluster.replica.router import Router
from specdec.config.speculation.methods import other_method_names
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.metrics.metrics import TEXT_COMPLETION
from specdec.types.errors import OverloadedError, UnauthenticatedError

_ALGORITHMS = {ours: name for name, ours in other_method_names().items() if name.isupper()}
"""SGLang's name of an algorithm by our method."""


def sglang_routes(
    get_router: Callable[[], Router],
    get_keys: Callable[[], ApiKeys],
    get_admin: Callable[[], OperatorService],
) -> APIRouter:
    """Return the routes; the arguments are called for each request."""
    handler = RequestHandler(get_router, get_keys)
    routes = APIRouter(route_class=handler.route_class())
    _add_generation(routes, handler)
    _add_replica_orders(routes, handler, get_admin)
    _add_infos(routes, handler)
    operators = OperatorHandler(get_router, get_keys, get_admin=get_admin)
    aborts = APIRouter(route_class=operators.route_class())
    _add_abort(aborts, operators, get_admin)
    routes.include_router(aborts)
    return routes


@dataclass(frozen=True)
class OperatorHandler(RequestHandler):
    """Wrapper of routes for clients with an API key, and for operators with their token."""

    get_admin: Callable[[], OperatorService] = field(kw_only=True)

    def is_operator(self, request: ApiRequest) -> bool:
        """Return whether a request has the operators' credential."""
        try:
            self.get_admin().access.check(authorization_of(request))
        except UnauthenticatedError:
            return False
        return True

    def _admit(self, request: ApiRequest) -> None:
        if not (self.get_admin().access.has_token and self.is_operator(request)):
            super()._admit(request)


def _add_generation(routes: APIRouter, handler: RequestHandler) -> None:
    @routes.post("/generate")
    async def generate(body: GenerateRequest, request: ApiRequest) -> Response:
        """Complete one prompt or several, streamed with `stream`."""
        for model in dict.fromkeys(body.of_each("lora_path", "")):
            handler.get_router().require_model(check_model(model))
        return await generate_response(
            handler,
            prepare_generate,
            body,
            request,
            body.rid,
            operation=TEXT_COMPLETION,
            num_choices=body.num_choices,
        )

    @routes.get("/health_generate")
    async def health_generate(request: ApiRequest) -> Response:
        """Generate one token; an error if that is not possible. A full queue is no error."""
        router, context = handler.get_router(), handler.context(request, None)

        async def probe() -> Response:
            with suppress(OverloadedError), context.deadline.enforce():
                await router.probe()
            return Response(status_code=200)

        return await cancel_on_disconnect(request, probe())


def _add_abort(
    routes: APIRouter, handler: OperatorHandler, get_admin: Callable[[], OperatorService]
) -> None:
    @routes.post("/abort_request")
    async def abort_request(body: AbortRequest, request: ApiRequest) -> Response:
        """End the client's requests with this id, or all requests for an operator, everywhere."""
        body.check_together()
        if body.abort_all and not handler.is_operator(request):
            raise UnauthenticatedError
        order = AbortOrder(body.rid, current_caller.get(), is_for_all=body.abort_all)
        with handler.context(request, None).deadline.enforce():
            await get_admin().orders.abort(order)
        return Response(status_code=200)


def _add_replica_orders(
    routes: APIRouter, handler: RequestHandler, get_admin: Callable[[], OperatorService]
) -> None:
    @routes.post("/flush_cache")
    @routes.post("/reset_prefix_cache")  # vLLM's name
    async def flush_cache(request: ApiRequest, body: FlushRequest | None = None) -> Response:
        """Empty the prefix cache of every replica, unless its requests run or wait."""
        with handler.context(request, None).deadline.enforce():
            is_flushed = await get_admin().orders.flush_caches()
        if is_flushed:
            return Response("Cache flushed.\n", media_type="text/plain")
        text = "The cache of a replica is not flushed while its requests run or wait.\n"
        return Response(text, status_code=400, media_type="text/plain")


def _add_infos(routes: APIRouter, handler: RequestHandler) -> None:
    @routes.get("/get_model_info")
    @routes.get("/model_info")
    async def model_info() -> Response:
        """Describe the model."""
        name = _public_name(handler.get_router().config)
        return JSONResponse(
            {
                "model_path": name,
                "tokenizer_path": name,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": "default",
            }
        )

    @routes.get("/get_server_info")
    @routes.get("/server_info")
    async def server_info() -> Response:
        """Report settings and load under SGLang's names."""
        return JSONResponse(_server_info(handler.get_router()))


def _public_name(config: ServeConfig) -> str:
    """Return the name of the model without a path on this machine."""
    return config.served_model_name if Path(config.model).exists() else config.model


def _speculation_info(config: SpeculativeConfig | None) -> dict[str, Any]:
    """Return SGLang's settings, whose number of draft tokens includes the token before them."""
    if config is None:
        names = ("algorithm", "num_steps", "num_draft_tokens")
        return dict.fromkeys(f"speculative_{name}" for name in names)
    num_tokens = config.num_draft_tree_tokens or config.num_speculative_tokens
    return {
        "speculative_algorithm": _ALGORITHMS.get(config.method, config.method.upper()),
        "speculative_num_steps": config.num_speculative_tokens,
        "speculative_num_draft_tokens": num_tokens + 1,
    }


def _server_info(router: Router) -> dict[str, Any]:
    config, stats = router.config, router.running_engine().stats()
    return {
        "model_path": _public_name(config),
        "served_model_name": config.served_model_name,
        "context_length": router.max_model_len,
        "tp_size": config.tensor_parallel_size,
        "dtype": config.resolved_dtype,
        "max_running_requests": config.max_num_seqs,
        "page_size": config.block_size,
        "disable_radix_cache": not config.enable_prefix_caching,
        "max_total_num_tokens": stats.num_blocks * config.block_size,
        **_speculation_info(config.speculative_config),
        "internal_states": [
            {
                "num_running_reqs": stats.num_running,
                "num_waiting_reqs": stats.num_waiting,
                "token_usage": stats.kv_cache_usage,
                "avg_spec_accept_length": stats.counts.speculation.mean_acceptance_length,
            }
        ],
        "version": version("specdec"),
    }
