"""The routes of the OpenAI API, described as /openapi.json shows them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Request, Response

from cluster.api.api_keys import ApiKeys
from cluster.api.openai.chat import make_conversation, tool_form
from cluster.api.openai.chat_schema import ChatCompletion, ChatRequest
from cluster.api.openai.completion_schema import Completion, CompletionRequest
from cluster.api.openai.endpoints import CHAT, COMPLETIONS, RESPONSES
from cluster.api.openai.request_handler import Gate
from cluster.api.openai.responses_schema import ResponseBody, ResponsesRequest
from cluster.api.openai.schema import AnswerModel, ErrorBody
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
    400: {"model": ErrorBody, "description": "a field is wrong; the message says which, and why"},
    401: {"model": ErrorBody, "description": "no API key, or an unknown one"},
    403: {"model": ErrorBody, "description": "sent by another site's page"},
    404: {"model": ErrorBody, "description": "no model of that name is served"},
    413: {"model": ErrorBody, "description": "the body is too large"},
    429: {"model": ErrorBody, "description": "too many requests; Retry-After says when to return"},
    500: {"model": ErrorBody, "description": "a fault of the service; its log has the details"},
    503: {"model": ErrorBody, "description": "the model is starting, stopping or lost"},
    504: {"model": ErrorBody, "description": "the answer was not complete in time"},
}


async def _headers(
    x_request_id: Annotated[
        str | None,
        Header(description="names the request in answers and logs; 128 ASCII characters"),
    ] = None,
    x_request_timeout_s: Annotated[
        str | None, Header(description="seconds that the answer may take; no more than configured")
    ] = None,
) -> None:
    """What the Gate reads; here for the document. Async, or each request would hop threads."""


def openai_routes(
    get_router: Callable[[], Router],
    get_keys: Callable[[], ApiKeys],
    get_applications: Callable[[], Applications | None] = lambda: None,
) -> APIRouter:
    """What it is given is asked at each request, after start-up."""
    gate = Gate(get_router, get_keys, get_applications)
    routes = APIRouter(
        route_class=gate.route_class(), tags=["OpenAI API"], dependencies=[Depends(_headers)]
    )
    _add_generation(routes, gate)
    _add_tokens(routes, gate)
    _add_models(routes, gate)
    return routes


def _add_generation(routes: APIRouter, gate: Gate) -> None:
    @routes.post("/v1/chat/completions", responses=_answers(ChatCompletion, "chunks"))
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answers a conversation, at once or with `stream` as it comes."""
        return await CHAT.answer(gate, body, request, gate.terms(request, body.request_id))

    @routes.post("/v1/completions", responses=_answers(Completion, "completions"))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Goes on with a text as it is, at once or with `stream` as it comes."""
        return await COMPLETIONS.answer(gate, body, request, gate.terms(request, body.request_id))

    @routes.post("/v1/responses", responses=_answers(ResponseBody, "response events"))
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answers a conversation in the newer shape: text only, and nothing is stored."""
        return await RESPONSES.answer(gate, body, request, gate.terms(request, None))


def _add_tokens(routes: APIRouter, gate: Gate) -> None:
    @routes.post("/tokenize", responses=_answers(TokenizeAnswer))
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """The tokens of a text or a chat, exactly as they would be of a prompt."""
        router, terms = gate.get_router(), gate.terms(request, None)
        router.check_admission(check_model(body.model or ""), 1)
        call = service_requests.TokenizeRequest(
            _prompt(router, body), check_model(body.model or ""), body.add_special_tokens
        )
        async with terms.deadline.held():
            token_ids = await router.tokenize(call)
            return await asyncio.to_thread(_tokens, router, token_ids, body.return_token_strs)

    @routes.post("/detokenize", responses=_answers(DetokenizeAnswer))
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """The text of tokens."""
        router, terms = gate.get_router(), gate.terms(request, None)
        router.check_admission(check_model(body.model or ""), 1)
        call = service_requests.DetokenizeRequest(tuple(body.tokens), body.model or "")
        async with terms.deadline.held():
            text = await router.detokenize(call)
        return _json(DetokenizeAnswer(prompt=text))


def _tokens(router: Router, token_ids: list[int], tells_strings: bool) -> Response:
    """For a thread: there may be a million of them."""
    answer = TokenizeAnswer(
        count=len(token_ids),
        max_model_len=router.max_model_len,
        tokens=token_ids,
        token_strs=router.text.spell(token_ids) if tells_strings else None,
    )
    return _json(answer)


def _add_models(routes: APIRouter, gate: Gate) -> None:
    began_at = int(time.time())

    def card(info: ModelInfo) -> ModelCard:
        return ModelCard(
            id=info.model,
            object="model",
            created=began_at,
            owned_by=_OWNER,
            max_model_len=info.max_model_len,
            speculation_methods=list(info.speculation_methods),
        )

    async def others() -> list[ModelInfo]:
        applications = gate.get_applications()
        if applications is None:
            return []
        fellows = await applications.fellows()
        infos = await asyncio.gather(*(each.model_info() for each in fellows))
        return [each for each in infos if each is not None]

    @routes.get("/v1/models", responses=_answers(ModelList))
    async def models() -> Response:
        """The models that are served, that of whoever answers first."""
        own = gate.get_router().model_info("")
        return _json(ModelList(object="list", data=list(map(card, [own, *await others()]))))

    @routes.get("/v1/models/{model:path}", responses=_answers(ModelCard))
    async def model(model: Annotated[str, Path(description="its name")]) -> Response:
        """One of them."""
        return _json(card(gate.get_router().model_info(model)))


def _prompt(router: Router, body: TokenizeRequest) -> str | Conversation:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidValueError("prompt", body.prompt, "given, unless messages are, and not both")
    if body.messages is None:
        return body.prompt or ""
    chat = ChatRequest(
        messages=body.messages,
        tools=body.tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    form = tool_form(router.config, router.text.chat_template)
    tools = tool_use(chat, form, router.text.is_special)
    return make_conversation(chat, tools, router.text.chat_template, form)


def _answers(model: type[AnswerModel], events: str | None = None) -> dict[int | str, Any]:
    """The answers of a route for the document; `events`: what it streams where it can."""
    answer: dict[str, Any] = {"model": model, "description": "the answer"}
    if events is not None:
        answer["content"] = {"text/event-stream": {"schema": _event_schema(events)}}
    return {200: answer, **_ERRORS}


def _event_schema(events: str) -> dict[str, Any]:
    """One server-sent event, as tools for OpenAPI 3.1 read it."""
    data = {"type": "string", "contentMediaType": "application/json", "description": events}
    properties = {"data": data, "event": {"type": "string"}}
    return {"type": "object", "properties": properties, "required": ["data"]}


def _json(answer: AnswerModel) -> Response:
    return Response(answer.to_json(), media_type="application/json")
