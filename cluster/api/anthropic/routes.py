"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from cluster.api.anthropic.conversion import to_chat
from cluster.api.anthropic.messages import prepare_messages
from cluster.api.anthropic.schema import CountTokensRequest, MessagesRequest
from cluster.api.base.anthropic_errors import error_body
from cluster.api.base.authentication import ApiKeys
from cluster.api.base.openai_errors import Failure
from cluster.api.openai.conversation import configured_tool_format, make_conversation, tool_use
from cluster.api.openai.request_handler import RequestHandler
from cluster.api.openai.routes import generate_response
from cluster.api.openai.streams import cancel_on_disconnect
from cluster.control.peers import Applications
from cluster.replica.limits import check_model
from cluster.replica.router import Router
from specdec.types.request import TokenizeRequest


class MessagesHandler(RequestHandler):
    """Wrapper of the routes, with Anthropic's errors."""

    def failure_response(self, failure: Failure) -> Response:
        """Return the response of a request that has sent no status yet."""
        return JSONResponse(error_body(failure), failure.status, dict(failure.headers))


def messages_routes(
    get_router: Callable[[], Router],
    get_keys: Callable[[], ApiKeys],
    get_applications: Callable[[], Applications | None] | None = None,
) -> APIRouter:
    """Return the routes; the arguments are called for each request."""
    handler = MessagesHandler(get_router, get_keys, get_applications)
    routes = APIRouter(route_class=handler.route_class())

    @routes.post("/v1/messages")
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Generate the next message of a conversation, streamed with `stream`."""
        return await generate_response(handler, prepare_messages, body, request)

    @routes.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
        """Count the tokens of a conversation, exactly as for a message."""
        router, context = handler.get_router(), handler.context(request, None)
        model = check_model(body.model or "")
        router.check_admission(model, 1)
        template = router.text.chat_template
        chat = to_chat(body, template)
        form = configured_tool_format(router.config, template)
        tools = tool_use(chat, form, router.text.is_special)
        conversation = make_conversation(chat, tools, template, form)
        call = TokenizeRequest(conversation, model, False)
        async with context.deadline.enforce():
            token_ids = await cancel_on_disconnect(request, router.tokenize(call))
        return JSONResponse({"input_tokens": len(token_ids)})

    return routes
