"""The routes of the OpenAI API; their docstrings appear in /openapi.json."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Response

from cluster.api.base.authentication import ApiKeys
from cluster.api.base.openai_errors import ApiError
from cluster.api.base.openai_schema import ResponseModel
from cluster.api.http.bodies import ApiRequest
from cluster.api.openai.conversation import configured_tool_format, make_conversation, tool_use
from cluster.api.openai.generation import add_generation
from cluster.api.openai.request_handler import RequestHandler, answers, declare_headers
from cluster.api.openai.request_warnings import template_warnings, warning_headers
from cluster.api.openai.responses.builder import response_chat
from cluster.api.openai.schemas.chat_schema import ChatRequest
from cluster.api.openai.schemas.completion_schema import (
    DetokenizeAnswer,
    DetokenizeRequest,
    ModelCard,
    ModelList,
    TokenizeAnswer,
    TokenizeRequest,
)
from cluster.api.openai.schemas.responses_schema import (
    InputTokens,
    ResponsesRequest,
)
from cluster.api.openai.streams import cancel_on_disconnect
from cluster.api.openai.vllm_routes import add_vllm_routes
from cluster.control.peers import Applications
from cluster.replica.limits import check_model
from cluster.replica.router import Router
from specdec.types import request as service_requests
from specdec.types.errors import InvalidValueError
from specdec.types.request import Conversation
from specdec.types.responses import ModelInfo


def openai_routes(
    get_router: Callable[[], Router],
    get_keys: Callable[[], ApiKeys],
    get_applications: Callable[[], Applications | None] | None = None,
) -> APIRouter:
    """Return the routes; the arguments are called for each request."""
    handler = RequestHandler(get_router, get_keys, get_applications)
    headers = [Depends(declare_headers)]
    routes = APIRouter(route_class=handler.route_class(), tags=["OpenAI API"], dependencies=headers)
    add_generation(routes, handler)
    _add_tokens(routes, handler)
    _add_models(routes, handler)
    add_vllm_routes(routes, handler)
    _add_refused(routes)
    return routes


_REFUSED = {
    "embeddings": (
        "embeddings are not supported: the models generate text, and their hidden states were "
        "not trained as embeddings; serve an embedding model with another engine"
    ),
    "scores": (
        "scores are not supported: the models generate text, and were not trained to compare "
        "texts; for the log-probabilities of a text use /v1/completions with echo, logprobs and "
        "max_tokens 0, or serve a cross-encoder with another engine"
    ),
}
_REFUSED_PATHS = {
    "/v1/embeddings": "embeddings",
    **dict.fromkeys(("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"), "scores"),
}


def _add_refused(routes: APIRouter) -> None:
    """Add the paths of models that this service does not serve, which answer with the reason."""
    for path, subject in _REFUSED_PATHS.items():
        routes.post(path, include_in_schema=False)(_refusal(_REFUSED[subject]))


def _refusal(message: str) -> Callable[[], Awaitable[Response]]:
    async def refuse() -> Response:
        raise ApiError(501, message, "not_supported")

    return refuse


async def count_prompt(handler: RequestHandler, chat: ChatRequest, request: ApiRequest) -> int:
    """Return the number of tokens of a chat's prompt. Raise the errors of its fields."""
    router, context = handler.get_router(), handler.context(request, None)
    call = service_requests.TokenizeRequest(_conversation(router, chat), chat.model or "", False)
    with context.deadline.enforce():
        return len(await cancel_on_disconnect(request, router.tokenize(call)))


def _add_tokens(routes: APIRouter, handler: RequestHandler) -> None:
    @routes.post("/v1/responses/input_tokens", responses=answers(InputTokens))
    async def input_tokens(body: ResponsesRequest, request: ApiRequest) -> Response:
        """Count the input tokens of a response, without `truncation`."""
        router = handler.get_router()
        count = await count_prompt(handler, response_chat(router, body), request)
        return _json(InputTokens(object="response.input_tokens", input_tokens=count))

    @routes.post("/tokenize", responses=answers(TokenizeAnswer))
    async def tokenize(body: TokenizeRequest, request: ApiRequest) -> Response:
        """Tokenize a text or a chat, exactly as a prompt."""
        router, context = handler.get_router(), handler.context(request, None)
        router.check_admission(check_model(body.model or ""), 1)
        prompt = _prompt(router, body)
        call = service_requests.TokenizeRequest(
            prompt, check_model(body.model or ""), body.add_special_tokens
        )
        if isinstance(prompt, Conversation):
            context.warnings.extend(template_warnings(prompt, router.text.chat_template))
        with context.deadline.enforce():
            token_ids = await cancel_on_disconnect(request, router.tokenize(call))
            answer = await asyncio.to_thread(_tokens, router, token_ids, body.return_token_strs)
        answer.headers.update(warning_headers(context.warnings, dict))
        return answer

    @routes.post("/detokenize", responses=answers(DetokenizeAnswer))
    async def detokenize(body: DetokenizeRequest, request: ApiRequest) -> Response:
        """Decode tokens to a text."""
        router, context = handler.get_router(), handler.context(request, None)
        router.check_admission(check_model(body.model or ""), 1)
        call = service_requests.DetokenizeRequest(tuple(body.tokens), body.model or "")
        with context.deadline.enforce():
            text = await cancel_on_disconnect(request, router.detokenize(call))
        return _json(DetokenizeAnswer(prompt=text))


def _tokens(router: Router, token_ids: list[int], returns_strings: bool) -> Response:
    """Build the response; run it on a thread, as there may be a million tokens."""
    answer = TokenizeAnswer(
        count=len(token_ids),
        max_model_len=router.max_model_len,
        tokens=token_ids,
        token_strs=router.text.spell(token_ids) if returns_strings else None,
    )
    return _json(answer)


def _add_models(routes: APIRouter, handler: RequestHandler) -> None:
    created = int(time.time())

    def card(info: ModelInfo) -> ModelCard:
        return ModelCard(
            id=info.model,
            object="model",
            created=created,
            owned_by="specdec",
            root=info.model,
            parent=info.parent or None,
            max_model_len=info.max_model_len,
            speculation_methods=list(info.speculation_methods),
        )

    async def others() -> list[ModelInfo]:
        applications = handler.get_applications() if handler.get_applications else None
        if applications is None:
            return []
        peers = await applications.peers()
        infos = await asyncio.gather(*(each.model_infos() for each in peers))
        return [info for of_peer in infos for info in of_peer]

    @routes.get("/v1/models", responses=answers(ModelList))
    async def models() -> Response:
        """List the served models and their adapters, first those of this application."""
        own = handler.get_router().model_infos()
        return _json(ModelList(object="list", data=list(map(card, [*own, *await others()]))))

    @routes.get("/v1/models/{model:path}", responses=answers(ModelCard))
    async def model(model: Annotated[str, Path(description="name of the model")]) -> Response:
        """Describe one model."""
        return _json(card(handler.get_router().model_info(model)))


def _prompt(router: Router, body: TokenizeRequest) -> str | Conversation:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidValueError("prompt", body.prompt, "given, or left out with messages")
    if body.messages is None:
        return body.prompt or ""
    return _conversation(router, ChatRequest(**body.fields_of(ChatRequest)))


def _conversation(router: Router, chat: ChatRequest) -> Conversation:
    form = configured_tool_format(router.config, router.text.chat_template)
    tools = tool_use(chat, form, router.text.is_special)
    return make_conversation(chat, tools, router.text.chat_template, form)


def _json(answer: ResponseModel) -> Response:
    return Response(answer.to_json(), media_type="application/json")
