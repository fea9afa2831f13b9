"""The Router: admission, batching and the engine's step loop of one replica."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from ray.util.placement_group import PlacementGroup

from cluster.calls import DetokenizeCall, GenerateCall, Prompt, TokenizeCall
from cluster.config import ServeConfig
from cluster.draft_group import DraftGroup
from cluster.draft_supervisor import DraftSupervisor
from cluster.engine_loop import EngineLoop
from cluster.logs import current_request_id
from cluster.memory_plan import memory_plan
from cluster.metrics import BATCH_SIZE, DRAFT_TIME, VERIFY_TIME, Metrics
from cluster.models import ModelDirectories
from cluster.profiling import ProfiledModel, Profiling
from cluster.replica_load import ReplicaLoad
from cluster.replica_report import ModelCounts, counts_of, decision_fields
from cluster.request_observer import RequestObserver
from cluster.resources import (
    DRAFT_BUNDLE,
    TARGET_BUNDLE,
    available_memory_bytes,
)
from cluster.shard_group import GroupSpec
from cluster.speculation_policy import make_policy
from cluster.step_timing import TimedProposer, TimedTarget
from cluster.target_group import TargetGroup
from cluster.target_supervisor import TargetSupervisor
from specdec.chat_template import ChatTemplate, Conversation
from specdec.client import ModelInfo, ReplicaReport, SpeculationState
from specdec.config import DraftLimits, EngineConfig, QuantizationMethod
from specdec.detokenizer import IncrementalDetokenizer
from specdec.engine import Engine
from specdec.errors import NotReadyError, OverloadedError, TargetFailedError, UnknownModelError
from specdec.profile import ProfileOrder, ProfileReport
from specdec.proposers import DraftVocabulary, Proposer, make_proposer
from specdec.request_output import RequestOutput
from specdec.sampling_params import SamplingDefaults, SamplingParams, StructuredOutput
from specdec.sequence import Request
from specdec.speculation import SpeculationPolicy
from specdec.structured_output import BUSY, COMPILE_TIMEOUT_S, Grammar, GrammarCompiler
from specdec.token_bytes import TokenBytes
from specdec.tokenizer import ChatMessage, Tokenizer, check_token_ids
from specdec.workers import Target

if TYPE_CHECKING:
    from cluster.tracing import Tracing

logger = logging.getLogger(__name__)

_DRAFT_TIMEOUT_S = 10.0
"""Streams wait for drafts; a worker that takes so long is better done without."""


@dataclass(frozen=True)
class Generation:
    """A request under way. The seed is known before the first token."""

    seed: int
    outputs: AsyncGenerator[RequestOutput, None]


class Router:
    """Owns an engine and the models it drives. Not ready until `start` has returned."""

    def __init__(
        self,
        config: ServeConfig,
        directories: ModelDirectories,
        memory_bytes: int,
        replica: str = "local",
    ) -> None:
        """`memory_bytes` is this replica's share of the machine; what is free may be less.

        `replica` is the name that the cluster knows it by.
        """
        self.config = config
        self.metrics = Metrics()
        self._replica = replica
        self._directories = directories
        models = directories.configs()
        self._model = models.target
        if config.generation_config == "none":
            self._model = replace(models.target, sampling_defaults=SamplingDefaults())
        if config.device == "cpu":
            memory_bytes = min(memory_bytes, available_memory_bytes())
        self._plan = memory_plan(config, models, memory_bytes)
        self._target: TargetSupervisor | None = None
        self._draft: DraftSupervisor | None = None
        self._loop: EngineLoop | None = None
        speculation = config.speculative_config
        self._control = speculation.control if speculation else None
        self._speculation_version: int | None = None
        self.num_requests = 0
        self._load = ReplicaLoad(config.target_requests_per_replica, time.monotonic)
        self._tracing = _tracing(config, replica)
        self._profiling = Profiling(config.profile_dir, config.profile_max_mib, replica)

    async def start(self, placement: PlacementGroup | None) -> None:
        """Starts the models, warms them up and begins to serve. Raises what loading raises."""
        draft = asyncio.create_task(asyncio.to_thread(self._start_draft, placement))
        grammars = asyncio.create_task(asyncio.to_thread(self._start_grammars))
        try:
            self._target = await asyncio.to_thread(self._start_target, placement)
        finally:
            self._draft = await draft
            await grammars
        logger.info("the models are loaded and warm")
        policy = await asyncio.to_thread(self._make_policy)
        engine = Engine(
            self._plan.engine,
            self._model,
            self._timed(self._target.current),
            self._tokenizer,
            proposer=self._make_proposer(),
            policy=policy,
        )
        if self._control is not None:  # it may have changed while steps were measured
            engine.set_speculation(self._control)
        self._loop = EngineLoop(engine, self._remake_target, self.metrics[BATCH_SIZE].observe)
        logger.info("ready: %s with %s", self.config.served_model_name, self._plan)

    def _make_proposer(self) -> Proposer | None:
        proposer = make_proposer(self._plan.engine.speculation, self._draft)
        if proposer is None:
            return None
        return TimedProposer(proposer, self._observe_draft)

    def _observe_draft(self, seconds: float) -> None:
        self.metrics[DRAFT_TIME].observe(seconds)
        if self._tracing is not None:
            self._tracing.steps.add_draft(seconds)

    def _timed(self, target: Target) -> TimedTarget:
        return TimedTarget(target, self._observe_verify)

    def _observe_verify(self, seconds: float) -> None:
        self.metrics[VERIFY_TIME].observe(seconds)
        if self._tracing is not None:
            self._tracing.steps.add_verify(seconds)

    def _remake_target(self) -> TimedTarget:
        assert self._target is not None, "a target is lost that never was"
        return self._timed(self._target.remake())

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        """Read while the models start, which takes longer."""
        return Tokenizer(self._directories.target)

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self._tokenizer, self._model.vocab_size, self._model.eos_token_ids)

    def _start_grammars(self) -> None:
        self._grammars.wait_until_ready()

    def _make_policy(self) -> SpeculationPolicy | None:
        assert self._target is not None, "a policy measures the target"
        if self._control is None:
            return None
        return make_policy(
            self._control,
            self._plan.engine,
            self._target.current,
            self._draft,
            self._plan.draft,
            lambda: self._can_draft,
            max(1, min(self.config.max_num_seqs, round(self.config.target_requests_per_replica))),
        )

    @property
    def is_ready(self) -> bool:
        """Whether requests are answered now."""
        loop = self._loop
        if loop is None or loop.failure is not None:
            return False
        return not loop.is_recovering and not loop.is_draining

    @property
    def num_open_requests(self) -> int:
        """Requests that are decoded or prefilled, or wait, each of their choices counted as one.

        Known without asking the engine.
        """
        return 0 if self._loop is None else self._loop.num_sequences

    def load_in_requests(self) -> float:
        """How much of this replica the load takes; to be asked every few seconds."""
        if self._loop is None:
            return 0.0
        stats = self._loop.last_stats
        return self._load.requests(
            self.num_open_requests, stats.num_generated_tokens, stats.capacity_tokens_per_s
        )

    @property
    def failure(self) -> TargetFailedError | None:
        """Why the engine is lost; None while it is not."""
        return None if self._loop is None else self._loop.failure

    async def check_models(self) -> None:
        """Has a worker that died unnoticed replaced. Raises TargetFailedError if none can be."""
        if self._loop is None or self._target is None:
            return
        if self._loop.failure is not None:
            raise self._loop.failure
        if self._loop.is_recovering:
            return
        if self._draft is not None:
            self._loop.post(self._draft.check)
        target = self._target.current
        try:
            await asyncio.to_thread(target.check_alive)
        except TargetFailedError as error:
            if target is self._target.current:  # else a step has noticed too
                self._loop.lose_target(error)

    async def drain(self) -> None:
        """Refuses requests, and returns when none runs any more or the time for it is up."""
        if self._loop is not None:
            await self._loop.drain(self.config.drain_timeout_s)

    async def close(self) -> None:
        """Ends the engine and the models; streams still open end with an error."""
        if self._loop is not None:
            await self._loop.close()
        if self._draft is not None:
            await asyncio.to_thread(self._draft.close)
        if self._target is not None:
            await asyncio.to_thread(self._target.close)
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    def _start_target(self, placement: PlacementGroup | None) -> TargetSupervisor:
        size = self.config.tensor_parallel_size
        quantization = self.config.quantization_method
        spec = self._group_spec(
            "target", self._directories.target, size, self._plan.engine, quantization
        )
        return TargetSupervisor(lambda: TargetGroup(spec, placement))

    def _start_draft(self, placement: PlacementGroup | None) -> DraftSupervisor | None:
        limits, speculation = self._plan.draft, self.config.speculative_config
        if limits is None or speculation is None:
            return None
        directory, size = self._directories.draft, speculation.draft_tensor_parallel_size
        assert directory is not None, "a plan for a draft model that is nowhere"
        spec = self._group_spec("draft model", directory, size, limits, speculation.quantization)
        vocabulary = DraftVocabulary.between(directory, self._directories.target)
        spec = replace(spec, vocabulary=vocabulary.shared)
        return DraftSupervisor(lambda: DraftGroup(spec, placement), limits, vocabulary)

    def _group_spec(
        self,
        name: str,
        directory: Path,
        size: int,
        limits: EngineConfig | DraftLimits,
        quantization: QuantizationMethod | None,
    ) -> GroupSpec:
        is_target = isinstance(limits, EngineConfig)
        step_timeout_s = self.config.step_timeout_s
        return GroupSpec(
            name=name,
            model_directory=directory,
            dtype=self.config.dtype,
            device=self.config.device,
            quantization=quantization,
            kernels=self.config.kernels,
            tensor_parallel_size=size,
            limits=limits,
            num_replicas=self.config.most_replicas,
            bundle_index=TARGET_BUNDLE if is_target else DRAFT_BUNDLE,
            transport=None if self.config.transport == "auto" else self.config.transport,
            start_timeout_s=self.config.start_timeout_s,
            step_timeout_s=step_timeout_s if is_target else min(step_timeout_s, _DRAFT_TIMEOUT_S),
            logs=self.config.logs,
        )

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence."""
        return self._plan.engine.max_model_len

    async def apply_speculation(self, state: SpeculationState) -> None:
        """Goes by what is wanted of speculation, from the next step on."""
        if self._control is not None:
            self._control = state.in_force
            if self._loop is not None:
                with suppress(TargetFailedError, NotReadyError):  # over; the next Router asks anew
                    await self._loop.set_speculation(state.in_force)
        self._speculation_version = state.version

    def report(self) -> ReplicaReport:
        """How this replica is, by the name that the cluster knows it by."""
        if self._loop is None:
            return ReplicaReport(self._replica, is_ready=False, reason="the model is loading")
        stats = self._loop.last_stats
        return ReplicaReport(
            self._replica,
            is_ready=self.is_ready,
            reason=self._why_not_ready(self._loop),
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_decoding=stats.num_decoding,
            kv_cache_usage=1 - stats.num_free_blocks / stats.num_blocks,
            is_speculation_on=stats.is_speculation_on and self._can_draft,
            speculation_version=self._speculation_version,
            **decision_fields(stats, time.monotonic(), datetime.now(UTC)),
            estimated_speedup=stats.estimated_speedup,
            estimated_tokens_per_s=stats.estimated_tokens_per_s,
            mode=self._control.mode if self._control else "",
            is_draft_worker_up=self._draft.is_available if self._draft else None,
            counts=counts_of(stats, self.num_requests, self.metrics, self._model_counts),
        )

    @property
    def _model_counts(self) -> ModelCounts:
        target, draft = self._target, self._draft
        return ModelCounts(
            num_target_restarts=target.num_restarts if target else 0,
            num_draft_restarts=draft.num_restarts if draft else 0,
            num_catch_up_tokens=draft.num_catch_up_tokens if draft else 0,
        )

    async def profile(self, order: ProfileOrder) -> ProfileReport:
        """Profiles the models of this replica. Raises what `Profiling.take` raises."""
        if self._loop is None or self._target is None:
            raise NotReadyError("the model is still loading")
        models: dict[str, ProfiledModel] = {"target": self._target}
        if self._draft is not None:
            models["draft model"] = self._draft
        return await self._profiling.take(order, models, self._loop.call)

    @property
    def _can_draft(self) -> bool:
        speculation = self.config.speculative_config
        has_lookup = speculation is not None and len(speculation.methods) > 1
        return self._draft is None or self._draft.is_available or has_lookup

    def _why_not_ready(self, loop: EngineLoop) -> str:
        if loop.failure is not None:
            return "the model stopped answering"
        if loop.is_recovering:
            return "the model is starting again"
        return "it is draining" if loop.is_draining else ""

    async def generate(self, call: GenerateCall) -> Generation:
        """Begins a request. Its outputs raise what the engine has against it."""
        request_id = call.request_id or secrets.token_hex(8)
        current_request_id.set(request_id)
        observer = self._observer(request_id, call)
        try:
            loop = self.check_admission(call.model, call.params.n)
            request = await self._prepare(request_id, call)
        except BaseException as error:
            observer.on_refused(error)
            raise
        observer.on_queued(request)
        return Generation(request.seed, loop.generate(request, observer))

    def _observer(self, request_id: str, call: GenerateCall) -> RequestObserver:
        clock = time.perf_counter
        trace = self._tracing.begin(request_id, call, clock) if self._tracing else None
        return RequestObserver(request_id, self.metrics, clock, trace)

    async def _prepare(self, request_id: str, call: GenerateCall) -> Request:
        """Tokens, grammar and seed of a request that there is room for."""
        self.num_requests += call.params.n
        return Request(
            request_id=request_id,
            prompt_token_ids=await self._encode(call.prompt),
            params=call.params,
            seed=secrets.randbits(63) if call.params.seed is None else call.params.seed,
            priority=call.priority,
            resume_token_ids=call.resume_token_ids,
            grammar=await self._compile(call.params.structured_output),
            stream_interval=call.stream_interval,
            cache_salt=call.cache_salt,
            queue_deadline_s=time.monotonic() + self.config.queue_timeout_s,
        )

    def check_admission(self, model: str, num_choices: int) -> EngineLoop:
        """What runs a request of so many choices, if it would be admitted now.

        Raises UnknownModelError, NotReadyError and OverloadedError.
        """
        self._check_model(model)
        if self._loop is None:
            raise NotReadyError("the model is still loading")
        self._loop.require_room(num_choices)
        return self._loop

    def max_tokens(self, params: SamplingParams) -> int:
        """How long a choice can get, after the shortest of prompts."""
        asked = params.settled(self._model.sampling_defaults).max_tokens
        return self.max_model_len if asked is None else min(asked, self.max_model_len)

    async def tokenize(self, call: TokenizeCall) -> list[int]:
        """The ids of a text or a chat."""
        self._check_model(call.model)
        encoded = await self._encode(call.prompt, add_special_tokens=call.add_special_tokens)
        return list(encoded)

    def spell(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary spells it. At once, and from any thread."""
        return self._tokenizer.token_strings(token_ids)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """What each token adds to a text. The first time takes a moment: not on the event loop."""
        return TokenBytes(self._tokenizer)

    @property
    def chat_template(self) -> ChatTemplate:
        """How the model wants conversations to look."""
        return self._tokenizer.chat_template

    def is_special(self, text: str) -> bool:
        """Whether a text is the name of a token that is left out of answers."""
        token_id = self._tokenizer.token_id(text)
        return token_id is not None and token_id in self._tokenizer.special_token_ids

    def detokenizer(self) -> IncrementalDetokenizer:
        """Turns the tokens of an answer into text, one by one."""
        return IncrementalDetokenizer(self._tokenizer)

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
            sampling_defaults=self._model.sampling_defaults,
            speculation_methods=speculation.methods if speculation else (),
        )

    def _check_model(self, model: str) -> None:
        if model and model != self.config.served_model_name:
            raise UnknownModelError(model, self.config.served_model_name)

    async def _compile(self, spec: StructuredOutput | None) -> Grammar | None:
        """Beside the steps, and without a thread that waits: it may take more than a second."""
        if spec is None:
            return None
        compiled = asyncio.wrap_future(self._grammars.submit(spec))
        compiled.add_done_callback(lambda done: done.exception())  # nobody may be waiting any more
        done, _ = await asyncio.wait([compiled], timeout=COMPILE_TIMEOUT_S)
        if not done:
            raise OverloadedError(BUSY)
        return compiled.result()

    async def _encode(self, prompt: Prompt, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Off the event loop: a text of a million characters takes a second."""
        encode = self._tokenizer.encode
        if isinstance(prompt, str):
            return tuple(await asyncio.to_thread(encode, prompt, add_special_tokens))
        if isinstance(prompt, Conversation):
            return tuple(await asyncio.to_thread(self._tokenizer.encode_conversation, prompt))
        if isinstance(prompt[0], ChatMessage):
            return tuple(await asyncio.to_thread(self._tokenizer.encode_chat, prompt))
        return prompt


def _tracing(config: ServeConfig, replica: str) -> Tracing | None:
    """None where no traces are wanted; the packages that make them are imported only then."""
    if config.otlp_traces_endpoint is None:
        return None
    from cluster.tracing import tracing_to

    return tracing_to(config.otlp_traces_endpoint, config.served_model_name, replica)
