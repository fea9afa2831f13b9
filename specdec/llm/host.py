"""What `LLM` and `AsyncLLM` are both made of: an engine, its models, and requests for it."""

from __future__ import annotations

import asyncio
import random
import secrets
import threading
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

from specdec.config.hardware import available_memory_bytes, smallest_gpu_bytes
from specdec.engine.engine import Engine
from specdec.engine.engine_thread import EngineLoop
from specdec.engine.memory_plan import memory_plan
from specdec.engine.metrics import BATCH_SIZE, DRAFT_TIME, VERIFY_TIME, Metrics, counts_of
from specdec.engine.model_resolution import resolve_models, with_settled_dtype
from specdec.engine.request_metrics import AbortedError, RequestObserver, TimedProposer, TimedTarget
from specdec.llm.arguments import Arguments
from specdec.llm.executors import make_executor
from specdec.llm.metrics import LLMReport, Metric, metrics_of
from specdec.llm.outputs import OutputBuilder, OutputKind, RequestOutput
from specdec.llm.preparations import Preparations
from specdec.llm.prompts import PromptParts
from specdec.llm.stats_log import StatsLog
from specdec.models.resolve import print_progress
from specdec.sequences.sequence import EngineRequest
from specdec.text.chat_template import Conversation
from specdec.text.grammar import Grammar, GrammarCompiler
from specdec.text.tokenizer import Tokenizer
from specdec.types.control import SpeculationControl
from specdec.types.counters import ModelCounts
from specdec.types.errors import InvalidValueError, NotReadyError
from specdec.types.sampling_params import (
    SEED_LIMIT,
    SamplingDefaults,
    SamplingParams,
    StructuredOutput,
)
from specdec.types.stats import EngineStats
from specdec.types.worker import Target


@dataclass(frozen=True)
class Call:
    """A request for the engine, with the text that it was made of, where it was one."""

    request: EngineRequest
    prompt: str | None


class EngineHost:
    """An engine, loaded and warm. It runs once a stream is opened, on a thread of its own."""

    def __init__(self, arguments: Arguments) -> None:
        """Finds, loads and measures the models. Raises what any of that raises."""
        self._arguments = arguments
        directories = resolve_models(arguments.config, print_progress)
        models = directories.configs()
        config = self.config = with_settled_dtype(arguments.config, models)
        self.model = models.target
        if config.generation_config == "none":
            self.model = replace(models.target, sampling_defaults=SamplingDefaults())
        in_process = arguments.executor is None
        memory_bytes = _memory_bytes(arguments)
        self._plan = memory_plan(config, models, memory_bytes, in_process=in_process)
        self.tokenizer = Tokenizer(directories.target)
        self.metrics = Metrics()
        self._stats_log = StatsLog(arguments.logs_stats, time.monotonic)
        self._num_requests = 0
        seed = secrets.randbits(64) if arguments.seed is None else arguments.seed
        self._seeds = random.Random(seed)
        self._grammars: GrammarCompiler | None = None
        self._lock = threading.Lock()  # of its being made: requests are prepared on many threads
        self._loop: EngineLoop | None = None
        self.preparations = Preparations()
        self._is_closed = False
        self._executor = make_executor(arguments.executor, config, directories, self._plan)
        self._ended: tuple[EngineStats, ModelCounts] | None = None
        self._engine: Engine | None = None
        try:
            self._engine = self._make_engine()
        except BaseException:
            self._executor.close()
            raise

    def _make_engine(self) -> Engine:
        speculation = self.config.speculative_config
        self.control = speculation.control if speculation else None
        policy = None
        if self.control is not None:
            policy = self._executor.make_policy(self.control, self.config.max_num_seqs)
        proposer = self._executor.make_proposer()
        if proposer is not None:
            proposer = TimedProposer(proposer, self.metrics[DRAFT_TIME].observe)
        target = self._timed(self._executor.target)
        return Engine(self._plan.engine, self.model, target, self.tokenizer, proposer, policy)

    @property
    def engine(self) -> Engine:
        """Raises NotReadyError after the end, when the models are to be free."""
        if self._engine is None:
            raise NotReadyError("it has been shut down")
        return self._engine

    def _timed(self, target: Target) -> TimedTarget:
        return TimedTarget(target, self.metrics[VERIFY_TIME].observe)

    def seed_for(self, params: SamplingParams) -> int:
        """A request's own seed, or the next one that follows from the seed that all have."""
        if not isinstance(params, SamplingParams):
            raise InvalidValueError("sampling_params", params, "a specdec.SamplingParams")
        return self._seeds.randrange(SEED_LIMIT) if params.seed is None else params.seed

    def call(
        self,
        request_id: str,
        prompt: PromptParts | Conversation,
        params: SamplingParams,
        seed: int,
        priority: int,
    ) -> Call:
        """A request, found to be one that can be answered. Raises InvalidValueError, NotReadyError.

        Encodes text, and compiles grammars, which may take seconds: not on an event loop.
        """
        self._require_open()
        parts = self._encoded(prompt)
        assert parts.token_ids is not None, "a prompt that was not encoded"
        request = EngineRequest(
            request_id=request_id,
            prompt=parts.token_ids,
            params=params,
            seed=seed,
            priority=priority,
            grammar=self._compile(params.structured_output),
            cache_salt=parts.cache_salt,
        )
        self.engine.check(request)
        return Call(request, parts.text)

    def _encoded(self, prompt: PromptParts | Conversation) -> PromptParts:
        if isinstance(prompt, Conversation):
            text = self.tokenizer.render(prompt)
            return PromptParts(text, tuple(self.tokenizer.encode(text, add_special_tokens=False)))
        if prompt.token_ids is not None:
            return prompt
        assert prompt.text is not None, "a prompt of nothing"
        return replace(prompt, token_ids=tuple(self.tokenizer.encode(prompt.text)))

    def _compile(self, spec: StructuredOutput | None) -> Grammar | None:
        if spec is None:
            return None
        with self._lock:
            if self._grammars is None:
                self._grammars = GrammarCompiler(
                    self.tokenizer, self.model.vocab_size, self.model.eos_token_ids
                )
        return self._grammars.compile(spec)

    async def stream(
        self, call: Call, kind: OutputKind, *, is_aborted: bool = False
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answers a call on the running event loop; leaving early aborts it.

        is_aborted: it was before, and all that is to be told is that.
        """
        loop, arrival_time = self._running_loop(), time.time()
        observer = RequestObserver(call.request.request_id, self.metrics)
        observer.on_queued(call.request)
        self._num_requests += call.request.params.n
        builder = OutputBuilder(call.request, call.prompt, self.tokenizer)
        steps = loop.generate(call.request, observer)
        try:
            if is_aborted:
                raise AbortedError(call.request.request_id)
            async for step in steps:
                builder.add(step)
                if kind == "delta":
                    yield builder.delta(observer.times, arrival_time)
                elif kind == "cumulative" or step.is_last:
                    yield builder.output(observer.times, arrival_time)
        except AbortedError as error:
            observer.on_broken_off(error)  # without effect where the engine's loop has told it
            builder.abort()
            tell = builder.delta if kind == "delta" else builder.output
            yield tell(observer.times, arrival_time)
        finally:
            await steps.aclose()
            self._stats_log.note(self._stats())

    async def complete(self, call: Call) -> RequestOutput:
        """The whole answer."""
        [output] = [each async for each in self.stream(call, "final_only")]
        return output

    def abort(self, request_id: str) -> None:
        """Ends the requests of this id; on the event loop of their streams."""
        self.preparations.abort(request_id)
        if self._loop is not None:
            self._loop.abort(request_id)

    def _running_loop(self) -> EngineLoop:
        """The engine's thread, telling the event loop that runs now."""
        self._require_open()
        loop = self._loop
        if loop is not None and loop.event_loop is not asyncio.get_running_loop():
            _require_replaceable(loop)
            loop.stop()
            if loop.failure is not None:  # the step in flight was its last
                raise loop.failure
            loop = None
        if loop is None:
            loop = self._loop = EngineLoop(
                self.engine, self._remake_target, self.metrics[BATCH_SIZE].observe,
                self._executor.lose_target,
            )  # fmt: skip
        return loop

    def _require_open(self) -> None:
        if self._is_closed:
            raise NotReadyError("it has been shut down")

    def _remake_target(self) -> Target:
        return self._timed(self._executor.remake_target())

    def changed_control(self, **changes: Any) -> SpeculationControl:
        """What is in force with some of it changed; those that are None are left as they are."""
        given = {name: value for name, value in changes.items() if value is not None}
        speculation = self.config.speculative_config
        if self.control is None or speculation is None:
            name, value = next(iter(given.items()), ("mode", "auto"))
            limit = "left out: without speculative_config nothing drafts"
            raise InvalidValueError(name, value, limit)
        method = given.get("method")
        if method is not None and method not in speculation.methods:
            limit = f"what is loaded: {' or '.join(speculation.methods)}"
            raise InvalidValueError("method", method, limit)
        return replace(self.control, **given)

    def set_control(self, control: SpeculationControl) -> None:
        """Has the next step go by it."""
        engine, loop = self.engine, self._loop
        self.control = control
        if loop is None:
            engine.set_speculation(control)
        else:
            loop.post(lambda: engine.set_speculation(control))

    def get_metrics(self) -> list[Metric]:
        """As of the last end of an answer, or later."""
        stats, model_counts = self._stats(), self._model_counts()
        counts = counts_of(stats, self._num_requests, self.metrics, model_counts)
        report = LLMReport.of(stats, self.control.mode if self.control else "", counts)
        speculation = self.config.speculative_config
        num_positions = speculation.num_speculative_tokens if speculation else 0
        arguments = self._arguments
        return metrics_of(report, arguments.metric_prefix, arguments.model_name, num_positions)

    def begin_batch(self) -> None:
        """Has the line of statistics tell of what comes from now on."""
        self._stats_log.begin(self._stats())

    def end_batch(self) -> None:
        """Writes the line, where it is wanted."""
        self._stats_log.write(self._stats())

    def _stats(self) -> EngineStats:
        loop, engine = self._loop, self._engine  # which another thread may be dropping
        if loop is not None:
            return loop.last_stats
        if engine is not None:
            return engine.stats()
        assert self._ended is not None, "neither an engine nor what it came to"
        return self._ended[0]

    def _model_counts(self) -> ModelCounts:
        return self._executor.counts if self._ended is None else self._ended[1]

    def close(self) -> None:
        """Ends the engine's thread and the models. May be called again, from any other thread.

        What was counted can be asked for still; of the models nothing is kept.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._loop is not None:
            self._loop.stop()
        self._ended = self._stats(), self._executor.counts
        self._loop = self._engine = None
        self._executor.close()
        if self._grammars is not None:
            self._grammars.close()


def _require_replaceable(loop: EngineLoop) -> None:
    """Raises where another one over the same engine would not know how it stands."""
    if loop.failure is not None:
        raise loop.failure
    if loop.is_recovering:
        raise NotReadyError("the models are being started again")
    if loop.num_streams and not loop.event_loop.is_closed():
        raise NotReadyError("another event loop has streams that are open")


def _memory_bytes(arguments: Arguments) -> int:
    config = arguments.config
    if config.device == "cuda":
        return int(smallest_gpu_bytes() * config.gpu_memory_utilization)
    return available_memory_bytes()
