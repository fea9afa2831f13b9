"""The Router: admission, batching and the engine's step loop of one replica."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from ray.util.placement_group import PlacementGroup

from cluster.calls import DetokenizeCall, GenerateCall, Prompt, TokenizeCall
from cluster.config import ServeConfig
from cluster.engine_loop import EngineLoop
from cluster.resources import available_memory_bytes, engine_config, threads_per_shard
from cluster.target_group import ShardGroup, TargetSpec
from specdec.client import ModelInfo
from specdec.config import ModelConfig
from specdec.engine import Engine, RequestOutput
from specdec.errors import NotReadyError, TargetFailedError, UnknownModelError
from specdec.sequence import Request
from specdec.tokenizer import ChatMessage, Tokenizer, check_token_ids

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Generation:
    """A request under way. The seed is known before the first token."""

    seed: int
    outputs: AsyncGenerator[RequestOutput, None]


class Router:
    """Owns an engine and the shards it drives. Not ready until `start` has returned."""

    def __init__(self, config: ServeConfig, model_directory: Path) -> None:
        self.config = config
        self._directory = model_directory
        self._model = ModelConfig.from_directory(model_directory)
        self._engine_config = engine_config(config, self._model, available_memory_bytes())
        self._tokenizer = Tokenizer(model_directory)
        self._shards: ShardGroup | None = None
        self._loop: EngineLoop | None = None

    async def start(self, placement: PlacementGroup | None) -> None:
        """Starts the shards, warms them up and begins to serve. Raises what loading raises."""
        config = self.config
        spec = TargetSpec(
            model_directory=self._directory,
            dtype=config.dtype,
            quantization=config.quantization_method,
            tensor_parallel_size=config.tensor_parallel_size,
            engine=self._engine_config,
            num_threads=threads_per_shard(config.tensor_parallel_size),
            transport=None if config.transport == "auto" else config.transport,
            step_timeout_s=config.step_timeout_s,
        )
        self._shards = await asyncio.to_thread(ShardGroup, spec, placement)
        self._loop = EngineLoop(
            Engine(self._engine_config, self._model, self._shards, self._tokenizer)
        )
        logger.info("ready: %s with %s", config.served_model_name, self._engine_config)

    @property
    def is_ready(self) -> bool:
        """Whether requests are answered now."""
        return self._loop is not None and self._loop.failure is None

    @property
    def failure(self) -> TargetFailedError | None:
        """Why the engine is lost; None while it is not."""
        return None if self._loop is None else self._loop.failure

    async def check_target(self) -> None:
        """Raises TargetFailedError once the target is lost, whether or not a step noticed."""
        if self.failure is not None:
            raise self.failure
        if self._shards is not None and self._loop is not None:
            await asyncio.to_thread(self._shards.check_alive)

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence."""
        return self._engine_config.max_model_len

    async def close(self) -> None:
        """Ends the engine and the shards; streams still open end with an error."""
        if self._loop is not None:
            await self._loop.close()
        if self._shards is not None:
            await asyncio.to_thread(self._shards.close)

    async def generate(self, call: GenerateCall) -> Generation:
        """Begins a request. Its outputs raise what the engine has against it."""
        self._check_model(call.model)
        if self._loop is None:
            raise NotReadyError("the model is still loading")
        seed = secrets.randbits(63) if call.params.seed is None else call.params.seed
        request = Request(
            request_id=call.request_id or secrets.token_hex(8),
            prompt_token_ids=await self._encode(call.prompt),
            params=call.params,
            seed=seed,
        )
        return Generation(seed, self._loop.generate(request))

    async def tokenize(self, call: TokenizeCall) -> list[int]:
        """The ids of a text or a chat."""
        self._check_model(call.model)
        encoded = await self._encode(call.prompt, add_special_tokens=call.add_special_tokens)
        return list(encoded)

    async def token_strings(self, token_ids: list[int]) -> list[str]:
        """Each token as the vocabulary spells it."""
        return await asyncio.to_thread(self._tokenizer.token_strings, token_ids)

    async def detokenize(self, call: DetokenizeCall) -> str:
        """The text of some ids, special tokens left out."""
        self._check_model(call.model)
        check_token_ids("token_ids", call.token_ids, self._model.vocab_size)
        return await asyncio.to_thread(self._tokenizer.decode, call.token_ids)

    def model_info(self, model: str) -> ModelInfo:
        """What is served, and how."""
        self._check_model(model)
        speculation = self.config.speculative_config
        return ModelInfo(
            model=self.config.served_model_name,
            architecture=self._model.architecture,
            dtype=self.config.dtype,
            vocab_size=self._model.vocab_size,
            max_model_len=self.max_model_len,
            tensor_parallel_size=self.config.tensor_parallel_size,
            speculation_method=speculation.method if speculation else None,
            num_speculative_tokens=speculation.num_speculative_tokens if speculation else 0,
            version=version("specdec"),
        )

    def _check_model(self, model: str) -> None:
        if model and model != self.config.served_model_name:
            raise UnknownModelError(model, self.config.served_model_name)

    async def _encode(self, prompt: Prompt, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Off the event loop: a text of a million characters takes a second."""
        encode = self._tokenizer.encode
        if isinstance(prompt, str):
            return tuple(await asyncio.to_thread(encode, prompt, add_special_tokens))
        if isinstance(prompt[0], ChatMessage):
            return tuple(await asyncio.to_thread(self._tokenizer.encode_chat, prompt))
        return prompt
