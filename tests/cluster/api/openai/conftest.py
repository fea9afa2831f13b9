"""The API over a real Router whose engine is in this process, on the tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import pytest_asyncio

from cluster.api.base.authentication import AdminAccess, ApiKeys
from cluster.api.http_app import make_app
from cluster.config.serve_config import ServeConfig
from cluster.replica.orders import AbortOrder
from cluster.replica.replica_router import ReplicaRouter
from cluster.workers.ray.resources import ReplicaMemory
from specdec.engine.models.model_resolution import ModelDirectories
from specdec.text.tokenizer import Tokenizer
from tests.cluster.serving import serve
from tests.specdec.engines import engine_config, local_engine


def alone(router: ReplicaRouter) -> SimpleNamespace:
    """Return what stands for the OperatorService of the only replica of the only application."""

    async def abort(order: AbortOrder) -> None:
        router.abort(order)

    orders = SimpleNamespace(abort=abort, flush_caches=router.flush_cache)
    return SimpleNamespace(applications=None, orders=orders, access=AdminAccess())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router(tiny_model_dir: Path):
    """One replica, without Ray: n-gram drafts, a context of 512 tokens, a short queue."""
    config = ServeConfig(
        model=str(tiny_model_dir), served_model_name="tiny", max_model_len=512, device="cpu"
    )
    router = ReplicaRouter(config, ModelDirectories(tiny_model_dir, None), ReplicaMemory(2**32))
    limits = engine_config(3, max_model_len=512, num_blocks=400, max_queue_len=8)
    thread = serve(router, local_engine(tiny_model_dir, limits))
    router.text.load()
    yield router
    await thread.close()
    router.text.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(router: ReplicaRouter):
    """A client without a network: it receives a response when the response is complete."""
    app = make_app(lambda: router, lambda: alone(router), ApiKeys)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.fixture(scope="session")
def tokenizer(tiny_model_dir: Path) -> Tokenizer:
    return Tokenizer(tiny_model_dir)


def events(response: httpx.Response) -> list[dict]:
    """Parse the events of a stream; assert that the last one is [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    data = [each.removeprefix("data: ") for each in response.text.strip().split("\n\n")]
    assert data[-1] == "[DONE]"
    return [json.loads(each) for each in data[:-1]]
