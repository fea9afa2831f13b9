# Modules: cluster.replica.router, cluster.replica.replica_router
"""A Router and its servicer before its models run."""

import json
import shutil
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from grpc import StatusCode

from cluster.api.base.authentication import ApiKeys
from cluster.api.grpc.servicers import InferenceServicer
from cluster.api.grpc.status import StreamFailedError
from cluster.config.serve_config import ServeConfig
from cluster.replica.orders import AbortOrder
from cluster.replica.replica_router import ReplicaRouter
from cluster.workers.ray.resources import ReplicaMemory
from protos.specdec.v1 import inference_pb2 as pb
from specdec.engine.models.model_resolution import ModelDirectories
from specdec.types.drafters import DrafterOrder
from specdec.types.errors import (
    InvalidValueError,
    NotReadyError,
    OverloadedError,
    UnknownModelError,
)
from specdec.types.request import Caller, GenerateRequest
from specdec.types.sampling.sampling_params import SamplingDefaults, SamplingParams
from tests.cluster.serving import serve_on
from tests.specdec.engines import engine_config
from tests.specdec.tiny import renamed_dtype_dir

DEFAULTS = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 99}


@pytest.fixture
def model_dir(tiny_model_dir, tmp_path):
    directory = shutil.copytree(tiny_model_dir, tmp_path / "model")
    path = directory / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **DEFAULTS}))
    return directory


@pytest.mark.parametrize(
    ("setting", "defaults"),
    [
        ("auto", SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, max_tokens=99)),
        ("none", SamplingDefaults()),
    ],
)
def test_sampling_defaults_of_the_model_apply_unless_disabled(model_dir, setting, defaults):
    config = ServeConfig(model=str(model_dir), generation_config=setting, max_model_len=128)
    directories = ModelDirectories(model_dir, None, options=config.model_options)
    router = ReplicaRouter(config, directories, ReplicaMemory(2**32))
    assert router.model_info("").sampling_defaults == defaults
    assert router.text.spell([0, 50]) == ["<|endoftext|>", "P"]


def test_auto_is_the_dtype_of_the_checkpoint(tiny_model_dir, tmp_path):
    model_dir = renamed_dtype_dir(tiny_model_dir, tmp_path / "model", dtype="bfloat16")
    config = ServeConfig(model=str(model_dir), dtype="auto", max_model_len=128)
    router = ReplicaRouter(config, ModelDirectories(model_dir, None), ReplicaMemory(2**32))
    assert router.model_info("").dtype == "bfloat16"


def test_a_seed_of_the_service_determines_those_of_its_requests(tiny_model_dir):
    def seeds(seed):
        config = ServeConfig(model=str(tiny_model_dir), max_model_len=128, seed=seed)
        router = ReplicaRouter(config, ModelDirectories(tiny_model_dir, None), ReplicaMemory(2**32))
        return [router.new_seed() for _ in range(3)]

    assert seeds(42) == seeds(42)
    assert len({*seeds(42), *seeds(43), *seeds(None), *seeds(None)}) == 12
    every = [*seeds(42), *seeds(43), *seeds(44), *seeds(45)]
    assert all(each == int(float(each)) < 2**53 - 128 for each in every), "exact in JavaScript"


@pytest.mark.parametrize(
    ("setting", "sampling", "fits"),
    [
        ("auto", {"logprobs": 1}, True),
        ("auto", {"logprobs": 1, "n": 2}, False),
        ("auto", {"logprobs": 1, "n": 2, "max_tokens": 50}, True),
        ("auto", {"logprobs": 2}, False),
        ("auto", {"n": 128, "max_tokens": 100}, True),
        ("none", {"logprobs": 1}, False),
    ],
)
async def test_log_probabilities_of_an_answer_in_one_message_are_limited(
    model_dir, monkeypatch, setting, sampling, fits
):
    """max_tokens is 99 by the model's defaults, else as long as the context of 128 tokens."""
    monkeypatch.setattr("specdec.engine.requests.input_processor.MAX_ANSWER_LOGPROBS", 200)
    config = ServeConfig(model=str(model_dir), generation_config=setting, max_model_len=128)
    directories = ModelDirectories(model_dir, None, options=config.model_options)
    router = ReplicaRouter(config, directories, ReplicaMemory(2**32))
    codes = []
    context = SimpleNamespace(
        invocation_metadata=lambda: (),
        peer=lambda: "",
        set_code=codes.append,
        set_details=lambda _: None,
        set_trailing_metadata=lambda _: None,
    )
    request = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(**sampling))
    servicer = InferenceServicer(router, ApiKeys())
    await servicer.Generate(request, context)
    with suppress(StreamFailedError):
        [_ async for _ in servicer.GenerateStream(request, context)]
    # The model of this router is never loaded: that is as far as a request gets.
    assert codes == [
        StatusCode.UNAVAILABLE if fits else StatusCode.INVALID_ARGUMENT,
        StatusCode.UNAVAILABLE,
    ]


async def test_demand_is_what_is_refused_for_overload_but_not_what_is_invalid(tiny_model_dir):
    config = ServeConfig(model=str(tiny_model_dir), max_model_len=128)
    router = ReplicaRouter(config, ModelDirectories(tiny_model_dir, None), ReplicaMemory(2**32))
    room = engine_config(max_num_seqs=2, max_queue_len=2)

    async def count(error, **changes):
        before = router.metrics.num_refused
        with pytest.raises(error):
            await router.generate(replace(GenerateRequest((1, 2), SamplingParams()), **changes))
        return router.metrics.num_refused - before

    assert await count(NotReadyError) == 0
    serve_on(router, SimpleNamespace(require_room=partial(room.require_room, 3)))
    assert await count(OverloadedError, params=SamplingParams(n=2)) == 2
    assert await count(InvalidValueError, params=SamplingParams(n=5)) == 0
    assert await count(UnknownModelError, model="other") == 0


def test_an_abort_while_the_models_load_ends_nothing(tiny_model_dir):
    config = ServeConfig(model=str(tiny_model_dir), max_model_len=128)
    router = ReplicaRouter(config, ModelDirectories(tiny_model_dir, None), ReplicaMemory(2**32))
    router.abort(AbortOrder("r", Caller()))


async def test_the_head_is_not_changed_while_the_target_restarts(tiny_model_dir):
    config = ServeConfig(model=str(tiny_model_dir), max_model_len=128)
    router = ReplicaRouter(config, ModelDirectories(tiny_model_dir, None), ReplicaMemory(2**32))
    serve_on(router, SimpleNamespace(is_recovering=True))
    for change in (DrafterOrder("head"), DrafterOrder(version=1), DrafterOrder(is_pinned=False)):
        with pytest.raises(NotReadyError, match="the target restarts"):
            await router.order_drafter(change)
    with pytest.raises(InvalidValueError, match="drafter"):  # a question gets an answer
        await router.order_drafter(DrafterOrder())
