"""The routes of the OpenAI API; their docstrings appear in /openapi.json."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Request, Response

from cluster.api.api_keys import ApiKeys
from cluster.api.openai.chat import configured_tool_format, make_conversation
from cluster.api.openai.chat_schema import ChatCompletion, ChatRequest
from cluster.api.openai.completion_schema import Completion, CompletionRequest
from cluster.api.openai.endpoints import CHAT, COMPLETIONS, RESPONSES
from cluster.api.openai.request_handler import RequestHandler
from cluster.api.openai.responses_schema import ResponseBody, ResponsesRequest
from cluster.api.openai.schema import ErrorBody, ResponseModel
from cluster.api.openai.token_schema import (
    DetokenizeAnswer,
    DetokenizeRequest,
    ModelCard,
    ModelList,
    TokenizeAnswer,
    TokenizeRequest,
)
from cluster.api.openai.tool_use import tool_use
from cluster.control.peers import Applications
from cluster.replica.limits import check_model
from cluster.replica.router import Router
from specdec.types import request as service_requests
from specdec.types.chat import Conversation
from specdec.types.errors import InvalidValueError
from specdec.types.responses import ModelInfo

_OWNER = "specdec"
_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "a field is invalid; the message names it"},
    401: {"model": ErrorBody, "description": "the API key is missing or unknown"},
    403: {"model": ErrorBody, "description": "a cross-site request of a browser"},
    404: {"model": ErrorBody, "description": "no such model"},
    413: {"model": ErrorBody, "description": "the body is too large"},
    429: {"model": ErrorBody, "description": "too many requests; Retry-After has a hint"},
    500: {"model": ErrorBody, "description": "an internal error; the log has the details"},
    503: {"model": ErrorBody, "description": "the model is starting, stopping or lost"},
    504: {"model": ErrorBody, "description": "the deadline of the request has passed"},
}


async def _headers(
    x_request_id: Annotated[
        str | None,
        Header(description="id of the request in answers and logs; at most 128 ASCII characters"),
    ] = None,
    x_request_timeout_s: Annotated[
        str | None, Header(description="timeout in seconds; at most the configured one")
    ] = None,
) -> None:
    """Declare the headers for /openapi.json; RequestHandler reads them.

    Async, because FastAPI runs other dependencies on a thread.
    """


def openai_routes(
    get_router: Callable[[], Router],
    get_keys: Callable[[], ApiKeys],
    get_applications: Callable[[], Applications | None] | None = None,
) -> APIRouter:
    """Return the routes; the arguments are called for each request."""
    handler = RequestHandler(get_router, get_keys, get_applications)
    routes = APIRouter(
        route_class=handler.route_class(), tags=["OpenAI API"], dependencies=[Depends(_headers)]
    )
    _add_generation(routes, handler)
    _add_tokens(routes, handler)
    _add_models(routes, handler)
    return routes


def _add_generation(routes: APIRouter, handler: RequestHandler) -> None:
    @routes.post("/v1/chat/completions", responses=_answers(ChatCompletion, "chunks"))
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Generate the next message of a chat, streamed with `stream`."""
        return await CHAT.answer(handler, body, request, handler.context(request, body.request_id))

    @routes.post("/v1/completions", responses=_answers(Completion, "completions"))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Complete a text, streamed with `stream`."""
        context = handler.context(request, body.request_id)
        return await COMPLETIONS.answer(handler, body, request, context)

    @routes.post("/v1/responses", responses=_answers(ResponseBody, "response events"))
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Generate a response: text only, without stored state."""
        return await RESPONSES.answer(handler, body, request, handler.context(request, None))


def _add_tokens(routes: APIRouter, handler: RequestHandler) -> None:
    @routes.post("/tokenize", responses=_answers(TokenizeAnswer))
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Tokenize a text or a chat, exactly as a prompt."""
        router, context = handler.get_router(), handler.context(request, None)
        router.check_admission(check_model(body.model or ""), 1)
        call = service_requests.TokenizeRequest(
            _prompt(router, body), check_model(body.model or ""), body.add_special_tokens
        )
        async with context.deadline.enforce():
            token_ids = await router.tokenize(call)
            return await asyncio.to_thread(_tokens, router, token_ids, body.return_token_strs)

    @routes.post("/detokenize", responses=_answers(DetokenizeAnswer))
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """Decode tokens to a text."""
        router, context = handler.get_router(), handler.context(request, None)
        router.check_admission(check_model(body.model or ""), 1)
        call = service_requests.DetokenizeRequest(tuple(body.tokens), body.model or "")
        async with context.deadline.enforce():
            text = await router.detokenize(call)
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
            owned_by=_OWNER,
            max_model_len=info.max_model_len,
            speculation_methods=list(info.speculation_methods),
        )

    async def others() -> list[ModelInfo]:
        applications = handler.get_applications() if handler.get_applications else None
        if applications is None:
            return []
        peers = await applications.peers()
        infos = await asyncio.gather(*(each.model_info() for each in peers))
        return [each for each in infos if each is not None]

    @routes.get("/v1/models", responses=_answers(ModelList))
    async def models() -> Response:
        """List the served models, first that of the application that receives the request."""
        own = handler.get_router().model_info("")
        return _json(ModelList(object="list", data=list(map(card, [own, *await others()]))))

    @routes.get("/v1/models/{model:path}", responses=_answers(ModelCard))
    async def model(model: Annotated[str, Path(description="name of the model")]) -> Response:
        """Describe one model."""
        return _json(card(handler.get_router().model_info(model)))


def _prompt(router: Router, body: TokenizeRequest) -> str | Conversation:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidValueError("prompt", body.prompt, "given, or left out with messages")
    if body.messages is None:
        return body.prompt or ""
    chat = ChatRequest(
        messages=body.messages,
        tools=body.tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    form = configured_tool_format(router.config, router.text.chat_template)
    tools = tool_use(chat, form, router.text.is_special)
    return make_conversation(chat, tools, router.text.chat_template, form)


def _answers(model: type[ResponseModel], events: str | None = None) -> dict[int | str, Any]:
    """Describe the responses of a route for /openapi.json. events: what the route can stream."""
    answer: dict[str, Any] = {"model": model, "description": "the answer"}
    if events is not None:
        answer["content"] = {"text/event-stream": {"schema": _event_schema(events)}}
    return {200: answer, **_ERRORS}


def _event_schema(events: str) -> dict[str, Any]:
    """Return the schema of one server-sent event, for OpenAPI 3.1."""
    data = {"type": "string", "contentMediaType": "application/json", "description": events}
    properties = {"data": data, "event": {"type": "string"}}
    return {"type": "object", "properties": properties, "required": ["data"]}


def _json(answer: ResponseModel) -> Response:
    return Response(answer.to_json(), media_type="application/json")
