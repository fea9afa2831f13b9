"""A real Router, its ControlClient and a real ControlPlane, with a target without a model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx

from cluster.api.base.authentication import ApiKeys
from cluster.api.grpc.servicers import InferenceServicer
from cluster.api.http_app import make_app
from cluster.config.serve_config import ServeConfig
from cluster.control.client import ControlClient
from cluster.control.plane import ControlPlane
from cluster.control.store import ControlStore
from cluster.replica.replica_router import ReplicaRouter
from cluster.workers.ray.resources import ReplicaMemory
from protos.specdec.v1 import inference_pb2 as pb
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.engine import Engine
from specdec.engine.models.model_resolution import ModelDirectories
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.types.control import SpeculationControl
from specdec.types.request import GenerateRequest
from specdec.types.responses import EngineOutput
from specdec.types.sampling.sampling_params import SamplingParams
from tests.cluster.admin_service import LocalHandle, operator_service
from tests.cluster.serving import serve
from tests.specdec.engines import HashTarget, ScriptedProposer, engine_config, make_engine

CONTROL = SpeculationControl("on", threshold=32, num_speculative_tokens=3)
PROMPT = (11, 12, 13, 14, 11, 12)
MODEL, REPLICA = "tiny", "r1"


class Replica:
    """Replica whose drafts have 3 tokens, of which the first `num_right` are accepted."""

    def __init__(self, model: Path, state_dir: Path) -> None:
        """Must be made on the event loop. Needs `close`."""
        self.num_right = 2
        self.target = HashTarget(block_size=4, vocab_size=383)
        config = ServeConfig(
            model=str(model),
            served_model_name=MODEL,
            max_model_len=128,
            speculative_config=SpeculativeConfig.of("ngram", num_speculative_tokens=3),
        )
        directories = ModelDirectories(model, None)
        self.router = ReplicaRouter(config, directories, ReplicaMemory(2**32), replica=REPLICA)
        self.loop = serve(self.router, self._make_engine(model))
        self.plane = LocalHandle(ControlPlane(CONTROL, ControlStore(state_dir, MODEL)))
        self.link = ControlClient(self.plane, self.router.apply_speculation, self.router.report)
        self.servicer = InferenceServicer(self.router, ApiKeys())
        operators = operator_service(self.link)
        app = make_app(lambda: self.router, lambda: operators)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://replica")

    async def generate(self, **params: Any) -> list[EngineOutput]:
        """All outputs of one greedy request."""
        values = {"temperature": 0.0, "max_tokens": 10, "ignore_eos": True, **params}
        call = GenerateRequest(PROMPT, SamplingParams(**values), stream_interval=1)
        generation = await self.router.generate(call)
        return [output async for output in generation.outputs]

    async def refuse(self) -> None:
        """One call that is refused for what it asks."""
        context = SimpleNamespace(
            invocation_metadata=lambda: (),
            peer=lambda: "",
            set_code=lambda _: None,
            set_details=lambda _: None,
            set_trailing_metadata=lambda _: None,
        )
        await self.servicer.Generate(pb.GenerateRequest(), context)

    async def close(self) -> None:
        await self.http.aclose()
        await self.loop.close()
        self.router.text.close()

    def _make_engine(self, model: Path) -> Engine:
        policy = SpeculationPolicy(CONTROL, clock=lambda: 0.0, dwell_s=0.0)
        return make_engine(
            model,
            engine_config(3),
            self.target,
            ScriptedProposer(self._draft),
            policy,
            self.router.metrics,
        )

    def _draft(self, tokens: list[int], count: int) -> list[int]:
        truth = self.target.continuation(tokens, count)
        return [token if i < self.num_right else token + 1 for i, token in enumerate(truth)]


@asynccontextmanager
async def running_replica(model: Path, state_dir: Path) -> AsyncIterator[Replica]:
    """Closed at the end of the block."""
    replica = Replica(model, state_dir)
    try:
        yield replica
    finally:
        await replica.close()
