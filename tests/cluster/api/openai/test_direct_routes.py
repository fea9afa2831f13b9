# Modules: cluster.api.openai.request_handler
"""Routes that run without FastAPI."""

import pytest
from fastapi import APIRouter, Depends, Request, Response

from cluster.api.base.authentication import ApiKeys
from cluster.api.openai.request_handler import RequestHandler, direct_routes
from cluster.api.openai.schemas.completion_schema import DetokenizeRequest


async def plain(body: DetokenizeRequest, request: Request):
    return Response()


async def with_query(body: DetokenizeRequest, request: Request, verbose: bool = False):
    return Response()


@pytest.mark.parametrize(
    ("endpoint", "options"),
    [
        (with_query, {}),
        (plain, {"dependencies": [Depends(lambda: None)]}),
        (plain, {"status_code": 201}),
        (plain, {"methods": ["POST", "PUT"]}),
    ],
)
def test_a_route_with_a_body_has_nothing_that_only_fastapi_evaluates(endpoint, options):
    handler = RequestHandler(lambda: None, ApiKeys)
    routes = APIRouter(route_class=handler.route_class())
    routes.add_api_route("/plain", plain, methods=["POST"])
    with pytest.raises(AssertionError):
        routes.add_api_route("/other", endpoint, **{"methods": ["POST"], **options})
    assert [*direct_routes(routes)] == ["/plain"]
