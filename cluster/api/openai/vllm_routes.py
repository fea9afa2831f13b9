"""vLLM's routes beside those of the OpenAI API: version, load, and on request the tokenizer."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from cluster.api.openai.request_handler import RequestHandler
from specdec.text.tokenizer import Tokenizer


def add_vllm_routes(routes: APIRouter, handler: RequestHandler) -> None:
    """Add the routes, which describe this replica and are not in /openapi.json."""

    @routes.get("/version", include_in_schema=False)
    async def service_version() -> Response:
        """Report the version of the service."""
        return JSONResponse({"version": version("specdec")})

    @routes.get("/load", include_in_schema=False)
    async def load() -> Response:
        """Report the number of requests that have not ended."""
        thread = handler.get_router().running_engine().thread
        return JSONResponse({"server_load": thread.num_streams})

    @routes.get("/tokenizer_info", include_in_schema=False)
    async def tokenizer_info() -> Response:
        """Describe the tokenizer; 404 unless the service enables it."""
        router = handler.get_router()
        if not router.config.enable_tokenizer_info_endpoint:
            message = "not enabled; start the service with --enable-tokenizer-info-endpoint"
            raise HTTPException(404, message)
        return JSONResponse(await asyncio.to_thread(lambda: _info(router.text.tokenizer)))


def _info(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the settings of tokenizer_config.json, with the template in force, without paths."""
    given = tokenizer.transformers.init_kwargs.items()
    kept = {name: _plain(value) for name, value in given if not name.endswith(("path", "_file"))}
    return {
        **kept,
        "tokenizer_class": type(tokenizer.transformers).__name__,
        "chat_template": tokenizer.chat_template.text,
    }


def _plain(value: Any) -> Any:
    """Return a value as JSON has it; an added token is its text."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case dict():
            return {str(name): _plain(each) for name, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
        case _:
            return str(value)
