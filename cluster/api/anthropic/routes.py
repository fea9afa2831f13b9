"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from cluster.api.anthropic.conversion import to_chat
from cluster.api.anthropic.messages import prepare_messages
from cluster.api.anthropic.schema import CountTokensRequest, MessagesRequest
from cluster.api.base.authentication import ApiKeys
from cluster.api.http.bodies import ApiRequest
from cluster.api.openai.generation import generate_response
from cluster.api.openai.request_handler import RequestHandler
from cluster.api.openai.routes import count_prompt
from cluster.control.peers import Applications
from cluster.replica.limits import check_model
from cluster.replica.router import Router


class MessagesHandler(RequestHandler):
    """Wrapper of the routes, with Anthropic's header of the request id."""

    id_headers = (*RequestHandler.id_headers, b"request-id")


def messages_routes(
    get_router: Callable[[], Router],
    get_keys: Callable[[], ApiKeys],
    get_applications: Callable[[], Applications | None] | None = None,
) -> APIRouter:
    """Return the routes; the arguments are called for each request."""
    handler = MessagesHandler(get_router, get_keys, get_applications)
    routes = APIRouter(route_class=handler.route_class())

    @routes.post("/v1/messages")
    async def messages(body: MessagesRequest, request: ApiRequest) -> Response:
        """Generate the next message of a conversation, streamed with `stream`."""
        return await generate_response(handler, prepare_messages, body, request)

    @routes.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest, request: ApiRequest) -> Response:
        """Count the tokens of a conversation, exactly as for a message."""
        router = handler.get_router()
        router.check_admission(check_model(body.model or ""), 1)
        chat = to_chat(body, router.text.chat_template)
        return JSONResponse({"input_tokens": await count_prompt(handler, chat, request)})

    return routes
