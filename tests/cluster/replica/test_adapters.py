"""A replica with LoRA adapters, its models in this process: names, requests and orders."""

import asyncio
import json
from contextlib import aclosing
from types import SimpleNamespace

import httpx
import pytest

from cluster.api.base.authentication import AdminAccess
from cluster.api.http_app import make_app
from cluster.config.serve_config import ServeConfig
from cluster.replica.replica_router import ReplicaRouter
from cluster.workers.ray.resources import ReplicaMemory
from specdec.config.engine import AdapterLimits
from specdec.engine.models.model_resolution import ModelDirectories
from specdec.engine.orders.adapter_control import require_adapters
from specdec.llm.local_executor import LocalExecutor
from specdec.types.adapters import AdapterOrder
from specdec.types.errors import (
    InvalidValueError,
    ModelNotFoundError,
    UnknownModelError,
    UnsupportedModelError,
)
from specdec.types.request import GenerateRequest, ThinkingBudget
from specdec.types.sampling.sampling_params import SamplingParams
from tests.specdec.adapters import adapter_dir
from tests.specdec.engines import engine_config, local_engine, request, tokens_by, with_adapter

PROMPT = (11, 12, 13, 14, 11, 12)
NUM_TOKENS = 24


class LocalModels(LocalExecutor):
    """Models in this process, with what a Router asks about workers."""

    can_draft, is_draft_up = True, None

    def load(self, placement):
        """Do nothing: the constructor has loaded them."""


@pytest.fixture(scope="module")
def adapters(tiny_model_dir, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: adapter_dir(root / name, tiny_model_dir, seed=seed)
        for seed, name in enumerate(("sql", "chat", "code"))
    }


@pytest.fixture(scope="module")
def expected(tiny_model_dir, adapters):
    """Return the greedy tokens after the prompt of the model and of each adapter."""
    config = engine_config(0, adapters=AdapterLimits(3, 16, 3))
    engine = local_engine(tiny_model_dir, config, adapters=adapters)
    found = {}
    for name in ("", *adapters):
        asked = with_adapter(engine, request(name, PROMPT, max_tokens=NUM_TOKENS), name)
        found |= tokens_by(engine, [asked])
    return found


@pytest.fixture
async def router(tiny_model_dir, adapters):
    config = ServeConfig.from_sources(
        {
            "model": str(tiny_model_dir),
            "served_model_name": "tiny",
            "max_model_len": 128,
            "enable_lora": True,
            "max_loras": 2,
            "max_cpu_loras": 2,
            "lora_modules": {"sql": str(adapters["sql"])},
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_min": 1,
                "policy": "threshold",
            },
        }
    )
    directories = ModelDirectories(tiny_model_dir, None)
    router = ReplicaRouter(config, directories, ReplicaMemory(2**33), replica="r1")
    router._models = LocalModels(router.config, directories, router.setup.plan)
    await router.start(None)
    yield router
    await router.running_engine().thread.close()
    router.text.close()


@pytest.fixture
async def http(router):
    async def order_adapter(order):
        return (await router.order_adapter(order),)

    orders = SimpleNamespace(adapter=order_adapter)
    admin = SimpleNamespace(access=AdminAccess(), applications=None, orders=orders)
    transport = httpx.ASGITransport(make_app(lambda: router, lambda: admin, has_peers=False))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


def body(model, **more):
    return {
        "model": model,
        "prompt": list(PROMPT),
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }


async def completed(http, model):
    response = await http.post("/v1/completions", json=body(model))
    assert response.status_code == 200, response.text
    content = response.json()
    assert content["model"] == model
    return content["choices"][0]["token_ids"]


async def generated(router, model, on_output=None):
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    generation = await router.generate(GenerateRequest(PROMPT, params, model=model))
    tokens = []
    async with aclosing(generation.outputs) as outputs:
        async for each in outputs:
            tokens += each.token_ids
            if on_output is not None:
                await on_output(tokens)
    return tokens


async def load(http, name, path, **more):
    return await http.post(
        "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **more}
    )


async def unload(http, name):
    return await http.post("/v1/unload_lora_adapter", json={"lora_name": name})


async def models(http):
    return {each["id"]: each["parent"] for each in (await http.get("/v1/models")).json()["data"]}


async def test_adapters_are_models_of_the_openai_api(http, expected, adapters):
    assert await models(http) == {"tiny": None, "sql": "tiny"}
    assert await completed(http, "tiny") == expected[""]
    assert await completed(http, "sql") == expected["sql"]
    response = await http.post("/v1/completions", json=body("chat"))
    assert response.status_code == 404
    assert "model 'chat' is not served; served: 'tiny', 'sql'" in response.text

    response = await load(http, "chat", adapters["chat"])
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'chat' loaded.")
    assert await models(http) == {"tiny": None, "chat": "tiny", "sql": "tiny"}
    assert (await http.get("/v1/models/chat")).json()["parent"] == "tiny"
    found = await asyncio.gather(*(completed(http, each) for each in ("chat", "tiny", "sql")))
    assert found == [expected[each] for each in ("chat", "", "sql")]

    assert (await unload(http, "sql")).status_code == 200
    assert await models(http) == {"tiny": None, "chat": "tiny"}
    assert (await http.post("/v1/completions", json=body("sql"))).status_code == 404
    assert (await unload(http, "sql")).status_code == 404


async def test_a_chat_and_tokens_of_an_adapter(http):
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 2}
    for model in ("sql", "tiny"):
        response = await http.post("/v1/chat/completions", json={"model": model, **chat})
        assert response.json()["model"] == model
    response = await http.post("/tokenize", json={"model": "sql", "prompt": "Hi"})
    assert response.status_code == 200


async def test_orders_that_cannot_be_executed(http, router, adapters, tiny_model_dir, tmp_path):
    wrong = adapter_dir(tmp_path / "wrong", tiny_model_dir, modules=())
    for name, path, message in (
        ("sql", adapters["chat"], "lora_name is 'sql'; it must be a name that no loaded adapter"),
        ("tiny", adapters["chat"], "different from the model's name"),
        ("x", tmp_path / "nothing", "not found: it must be an existing directory"),
        ("x", wrong, "has no LoRA matrices"),
    ):
        response = await load(http, name, path)
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]
    assert (await load(http, "chat", adapters["chat"])).status_code == 200
    response = await load(http, "code", adapters["code"])
    assert response.status_code == 400
    assert "loaded adapters is 3; it must be at most 2 (max_cpu_loras)" in response.text
    with pytest.raises(UnknownModelError):
        await router.order_adapter(AdapterOrder.unload("other"))
    for path, error in ((tmp_path / "no", ModelNotFoundError), (wrong, UnsupportedModelError)):
        with pytest.raises(error):
            await router.order_adapter(AdapterOrder.load("y", str(path)))


async def test_an_adapter_is_replaced_in_place(http, router, adapters, expected):
    """The running request completes with the adapter that it began with."""
    done = []

    async def replace_once(tokens):
        if not done and len(tokens) > 3:
            done.append(await load(http, "sql", adapters["chat"], load_inplace=True))
            done.append(await completed(http, "sql"))

    assert await generated(router, "sql", replace_once) == expected["sql"]
    assert done[0].status_code == 200
    assert done[1] == expected["chat"]
    report = await router.order_adapter(AdapterOrder())
    assert [(each.name, each.source) for each in report.adapters] == [
        ("sql", str(adapters["chat"]))
    ]


async def test_no_token_is_lost_while_adapters_come_and_go(http, router, adapters, expected):
    async def order_for_long():
        for _ in range(6):
            assert (await load(http, "chat", adapters["chat"])).status_code == 200
            assert await completed(http, "chat") == expected["chat"]
            assert (await unload(http, "chat")).status_code == 200

    async def traffic(model):
        for _ in range(4):
            assert await generated(router, model) == expected["" if model == "tiny" else model]

    await asyncio.gather(order_for_long(), *map(traffic, ["sql", "tiny", "sql", "tiny"]))
    counts = router.running_engine().stats().counts
    assert counts.tokens_by_adapter == {"sql": 8 * NUM_TOKENS, "chat": 6 * NUM_TOKENS}
    assert counts.drafts_by_adapter["sql"].num_draft_tokens > 0


@pytest.mark.parametrize("replaces", [False, True])
async def test_a_request_keeps_its_adapter_beyond_its_thinking_budget(router, adapters, replaces):
    """An order between the first tokens and the budget ends the name, or gives it to another."""
    budget = ThinkingBudget(12, (7, 8, 9), bool)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    call = GenerateRequest(PROMPT, params, model="sql", thinking_budget=budget)

    async def answer(order=None):
        token_ids = []
        async with aclosing((await router.generate(call)).outputs) as outputs:
            async for output in outputs:
                token_ids += output.token_ids
                if order is not None:
                    await router.order_adapter(order)
                    order = None
        return token_ids

    undisturbed = await answer()
    assert undisturbed[12:15] == [7, 8, 9]
    path = str(adapters["chat"])
    order = AdapterOrder("sql", path, replaces=True) if replaces else AdapterOrder.unload("sql")
    assert await answer(order) == undisturbed


async def test_a_request_that_loses_the_race_with_an_unload_is_refused(router, monkeypatch):
    encode = router.text.encode

    async def encode_slowly(prompt, **options):
        if "sql" in router.adapter_ids:
            await router.order_adapter(AdapterOrder.unload("sql"))
        return await encode(prompt, **options)

    monkeypatch.setattr(router.text, "encode", encode_slowly)
    with pytest.raises(UnknownModelError, match="model 'sql' is not served"):
        await generated(router, "sql")


async def test_answers_with_an_adapter_do_not_train_the_head(router, monkeypatch):
    recorded = []
    monkeypatch.setattr(router._samples, "accepts", lambda salt, allow_training: True)
    monkeypatch.setattr(
        router._samples,
        "recording",
        lambda request, temperature, outputs: recorded.append(request.adapter_id) or outputs,
    )
    await generated(router, "sql")
    await generated(router, "tiny")
    assert recorded == [0]


def test_without_enable_lora_orders_and_names_are_refused(tiny_model_dir):
    config = ServeConfig(model=str(tiny_model_dir), served_model_name="tiny", max_model_len=128)
    router = ReplicaRouter(config, ModelDirectories(tiny_model_dir, None), ReplicaMemory(2**33))
    assert [each.model for each in router.model_infos()] == ["tiny"]
    with pytest.raises(UnknownModelError):
        router.model_info("sql")
    with pytest.raises(InvalidValueError, match="--enable-lora"):
        require_adapters(router.setup.adapters)


def test_a_wrong_module_ends_the_start(tiny_model_dir, tmp_path):
    config = ServeConfig.from_sources(
        {
            "model": str(tiny_model_dir),
            "max_model_len": 128,
            "enable_lora": True,
            "lora_modules": f"sql={tmp_path}",
            "speculative_config": None,
        }
    )
    directories = ModelDirectories(tiny_model_dir, None)
    router = ReplicaRouter(config, directories, ReplicaMemory(2**33))
    router._models = LocalModels(router.config, directories, router.setup.plan)
    with pytest.raises(UnsupportedModelError, match=r"adapter_config\.json cannot be read"):
        asyncio.run(router.start(None))


def test_the_plan_reserves_memory_for_adapters(tiny_model_dir):
    def plan(**changes):
        values = {"model": str(tiny_model_dir), "max_model_len": 128, **changes}
        config = ServeConfig.from_sources(values)
        return ReplicaRouter(
            config, ModelDirectories(tiny_model_dir, None), ReplicaMemory(2**30)
        ).setup

    with_one = plan(enable_lora=True, max_cpu_loras=1, max_lora_rank=512).plan.engine
    assert with_one.adapters == AdapterLimits(1, 512, 1)
    without = plan().plan.engine
    assert without.adapters is None
    assert with_one.num_blocks <= without.num_blocks
    assert json.loads(json.dumps(plan(enable_lora=True).config.to_mapping()))["enable_lora"] is True
