"""A tiny checkpoint of each family under the HTTP API: the service of one replica, without Ray."""

import httpx
import pytest

from cluster.api.base.authentication import ApiKeys
from cluster.api.http_app import make_app
from cluster.config.serve_config import ServeConfig
from cluster.replica.replica_router import ReplicaRouter
from cluster.workers.ray.resources import ReplicaMemory
from specdec.engine.models.model_resolution import resolve_models
from tests.cluster.api.openai.conftest import alone, events
from tests.cluster.serving import serve
from tests.specdec.engines import engine_config, local_engine
from tests.specdec.models.families import FAMILIES, save_family
from tests.specdec.models.foreign import FOREIGN, save_foreign
from tests.specdec.tiny import train_tokenizer

PROMPT = "Ask the baker, ask the children: ask the baker, ask"


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAMILIES, *FOREIGN])
async def test_a_tiny_checkpoint_is_served(tmp_path, name):
    (save_family if name in FAMILIES else save_foreign)(tmp_path, name)
    train_tokenizer(383).save_pretrained(tmp_path)
    config = ServeConfig(
        model=str(tmp_path), served_model_name=name, max_model_len=96, device="cpu"
    )
    router = ReplicaRouter(config, resolve_models(config, print), ReplicaMemory(2**32))
    engine = local_engine(tmp_path, engine_config(3, max_model_len=96))
    thread = serve(router, engine)
    router.text.load()
    transport = httpx.ASGITransport(make_app(lambda: router, lambda: alone(router), ApiKeys))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        models = (await http.get("/v1/models")).json()["data"]
        assert [each["id"] for each in models] == [name]
        body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        whole = (await http.post("/v1/completions", json={"model": name, **body})).json()
        assert whole["usage"]["completion_tokens"] == 12
        streamed = await http.post("/v1/completions", json={"model": name, **body, "stream": True})
        text = "".join(each["choices"][0]["text"] for each in events(streamed) if each["choices"])
        assert text == whole["choices"][0]["text"]
    await thread.close()
    router.text.close()
