"""The engine of `LLM` and `AsyncLLM` in their process, and the preparation of its requests."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, AsyncExitStack, aclosing, nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import entry_points

from specdec.config.hardware import available_memory_bytes, require_gpu, smallest_gpu_bytes
from specdec.config.llm import LLMConfig
from specdec.engine.engine_setup import EngineSetup
from specdec.engine.executor import Executor
from specdec.engine.lifecycle import LoadedEngine, RunningEngine, StoppedEngine, ended
from specdec.engine.memory.memory_plan import MemoryPlan, memory_plan
from specdec.engine.metrics.request_metrics import RequestMetrics
from specdec.engine.models.colocation import with_colocated_draft
from specdec.engine.models.model_detection import with_detected_models
from specdec.engine.models.model_resolution import (
    ModelDirectories,
    resolve_models,
    with_resolved_dtype,
)
from specdec.engine.models.preflight import check_draft_model, check_target
from specdec.engine.orders.adapter_control import require_adapters
from specdec.engine.requests.preparations import Preparation, Preparations
from specdec.llm.arguments import Arguments
from specdec.llm.drafter_choice import with_fastest_drafter
from specdec.llm.lora_ids import LoRAIds
from specdec.llm.metrics import StatsLog
from specdec.llm.outputs import OutputBuilder, OutputKind, RequestOutput
from specdec.llm.prompts import PromptParts
from specdec.models.resolve import print_progress
from specdec.sequences.prediction import PredictedText
from specdec.sequences.sequence import EngineRequest
from specdec.text.grammar.compiler import GrammarCompiler
from specdec.text.grammar.matcher import Grammar
from specdec.text.tokenizer import Tokenizer
from specdec.types.adapters import AdapterOrder, AdapterReport, LoRARequest
from specdec.types.drafters import DrafterOrder, DrafterReport
from specdec.types.errors import AbortedError, InvalidValueError, NotReadyError, SpecdecError
from specdec.types.request import Conversation
from specdec.types.responses import EngineOutput
from specdec.types.sampling.sampling_params import (
    SEED_LIMIT,
    SamplingParams,
    StructuredOutput,
    VerifierName,
)

logger = logging.getLogger(__name__)

EXECUTORS = "specdec.executors"
"""Entry point group of functions from config, directories and plan to an Executor."""


@dataclass(frozen=True)
class PreparedRequest:
    """A request to the engine, with its prompt if that was a text, and its adapter if any."""

    request: EngineRequest
    prompt: str | None
    lora: LoRARequest | None = None

    def with_grammar(self, grammar: Grammar | None) -> PreparedRequest:
        """Return the same request with a compiled grammar."""
        return replace(self, request=replace(self.request, grammar=grammar))


class LLMEngine:
    """An engine with loaded models, and the requests of an `LLM` to it.

    The engine's thread starts with the first stream.
    """

    def __init__(self, arguments: Arguments) -> None:
        """Find, load and measure the models. Raises what any of that raises."""
        if arguments.config.device == "cuda":
            require_gpu()
        config = with_detected_models(arguments.config, print_progress)
        in_process = arguments.executor is None
        _check_target(config, in_process=in_process)
        config = with_fastest_drafter(config, print_progress)
        if config.device == "cuda" and in_process:
            config = with_colocated_draft(config, print_progress)
        self.arguments = arguments = replace(arguments, config=config)
        directories = self.directories = resolve_models(arguments.config, print_progress)
        check_draft_model(config, directories, print_progress)
        self.setup = EngineSetup(
            arguments.config,
            directories.configs(),
            _memory_bytes(arguments.config),
            in_process=in_process,
        )
        self.config, self.model = self.setup.config, self.setup.model
        self.tokenizer = Tokenizer(directories.target)
        self.stats_log = StatsLog(arguments.logs_stats, time.monotonic)
        seed = secrets.randbits(64) if arguments.seed is None else arguments.seed
        self._seeds = random.Random(seed)
        self._grammars: GrammarCompiler | None = None
        self._lock = threading.Lock()  # guards its creation: requests are prepared on many threads
        self.preparations = Preparations()  # requests that are prepared, or wait for an adapter
        self._lora_ids = LoRAIds()
        self._is_closed = False
        self._process_id: int | None = None  # of the process that has started threads
        plan = self.setup.plan
        if not in_process:
            self.bind_to_process()
        self._executor = _make_executor(arguments.executor, self.config, directories, plan)
        self.engine: LoadedEngine | RunningEngine | StoppedEngine
        try:
            self.engine = self.setup.load(self._executor, self.tokenizer)
        except BaseException:
            self._executor.close()
            raise

    def seed_for(self, params: SamplingParams) -> int:
        """Return a request's own seed, or the next one drawn from the seed of the `LLM`."""
        if not isinstance(params, SamplingParams):
            raise InvalidValueError("sampling_params", params, "a specdec.SamplingParams")
        return self._seeds.randrange(SEED_LIMIT) if params.seed is None else params.seed

    def prepare(
        self,
        request_id: str,
        prompt: PromptParts | Conversation,
        params: SamplingParams,
        seed: int,
        priority: int,
        lora: LoRARequest | None = None,
    ) -> PreparedRequest:
        """Return a validated request without its grammar, within `using`.

        Encodes text and waits for the grammar compiler, which may take seconds: not for an event
        loop. Raises InvalidValueError and NotReadyError.
        """
        self.require_open()
        parts = self._encoded(prompt)
        assert parts.token_ids is not None, "a prompt that was not encoded"
        request = EngineRequest(
            request_id=request_id,
            prompt=parts.token_ids,
            params=params,
            seed=seed,
            priority=priority,
            cache_salt=parts.cache_salt,
            model="" if lora is None else lora.lora_name,
            prediction=self._predicted_text(params.speculation.prediction),
        )
        self.engine.check(request)
        if params.structured_output is not None:
            self._compiler().wait_until_ready()
        return PreparedRequest(request, parts.text, lora)

    def using(self, lora: LoRARequest | None) -> AbstractContextManager[None]:
        """Return a context that reserves the id of an adapter while a request is open.

        Raises InvalidValueError for another adapter's id, and where none can be loaded.
        """
        if lora is None:
            return nullcontext()
        if not isinstance(lora, LoRARequest):
            raise InvalidValueError("lora_request", lora, "a specdec.LoRARequest, or None")
        adapters = require_adapters(self.setup.adapters)
        return self._lora_ids.used_by_call(lora, adapters.names)

    def unload_order(self, lora: str | int) -> AdapterOrder:
        """Return the order to unload an adapter, by name or `lora_int_id`.

        Raises InvalidValueError for the id of no adapter, and where none can be loaded.
        """
        adapters = require_adapters(self.setup.adapters)
        return AdapterOrder.unload(self._lora_ids.name_of(lora, adapters.names()))

    def _encoded(self, prompt: PromptParts | Conversation) -> PromptParts:
        if isinstance(prompt, Conversation):
            if unknown := self.tokenizer.chat_template.unknown_options(prompt):
                names = ", ".join(unknown)
                logger.warning("chat_template_kwargs: the chat template does not read %s", names)
            chat = self.tokenizer.render(prompt)
            return PromptParts(chat.text, tuple(self.tokenizer.encode_rendered(chat)))
        if prompt.token_ids is not None:
            return prompt
        assert prompt.text is not None, "an empty prompt"
        return replace(prompt, token_ids=tuple(self.tokenizer.encode(prompt.text)))

    def _predicted_text(self, text: str | None) -> PredictedText | None:
        """Return predicted output, without tokens that cannot fit the context."""
        if text is None:
            return None
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        return PredictedText(tokens[: self.setup.plan.engine.max_model_len])

    def compile(self, spec: StructuredOutput | None, num_sequences: int) -> Grammar | None:
        """Return the grammar of a request for all its choices; None without one. Takes seconds."""
        return None if spec is None else self._compiler().compile(spec, num_sequences)

    async def compiled(self, prepared: PreparedRequest) -> PreparedRequest:
        """Return a request with its grammar; a caller that is cancelled gives up its copies."""
        params = prepared.request.params
        if params.structured_output is None:
            return prepared
        submitted = self._compiler().submit(params.structured_output, num_sequences=params.n)
        grammar: Grammar = await asyncio.wrap_future(submitted)
        return prepared.with_grammar(grammar)

    def _compiler(self) -> GrammarCompiler:
        with self._lock:
            if self._grammars is None:
                self.bind_to_process()
                self._grammars = GrammarCompiler(
                    self.tokenizer, self.model.vocab_size, self.model.eos_token_ids
                )
            return self._grammars

    async def stream(
        self, prepared: PreparedRequest, kind: OutputKind, preparation: Preparation | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the outputs of a request on the running event loop; leaving early aborts it.

        preparation: of the request; None where nothing can abort it before its stream is open.
        """
        request, engine = prepared.request, self.running_engine()
        preparation = preparation or Preparation(request.request_id)
        metrics = RequestMetrics(request.request_id, self.setup.metrics)
        metrics.on_queued(request.params, request.seed)
        builder = OutputBuilder(
            request, prepared.prompt, self.tokenizer, metrics, time.time(), self._default_verifier
        )
        make_output = builder.delta if kind == "delta" else builder.output
        steps = self._steps(prepared, engine, metrics, preparation)
        try:
            async for step in steps:
                builder.add(step)
                if kind != "final_only" or step.is_last:
                    yield make_output()
        except AbortedError as error:
            # No effect where its stream has recorded it.
            metrics.on_refused(error, request.params.n)
            builder.abort()
            yield make_output()
        finally:
            await steps.aclose()
            self.stats_log.note(self.engine.last_stats)

    async def _steps(
        self,
        prepared: PreparedRequest,
        engine: RunningEngine,
        metrics: RequestMetrics,
        preparation: Preparation,
    ) -> AsyncGenerator[EngineOutput, None]:
        """Stream the engine's outputs; an adapter is loaded first, and held until the end."""
        request, lora, thread = prepared.request, prepared.lora, engine.thread
        async with AsyncExitStack() as held:
            if lora is not None:
                control = require_adapters(engine.loaded.adapters)
                holding = control.holding(lora, thread)
                preparation.require_alive()
                with preparation:
                    adapter_id = await held.enter_async_context(holding)
                request = replace(request, adapter_id=adapter_id)
            outputs = thread.generate(request, metrics, preparation)
            await held.enter_async_context(aclosing(outputs))
            async for output in outputs:
                yield output

    @property
    def _default_verifier(self) -> VerifierName:
        speculation = self.config.speculative_config
        return "coupled" if speculation is None else speculation.verifier

    async def order_adapter(self, order: AdapterOrder) -> AdapterReport:
        """Execute an order on the running event loop; see `RunningEngine.order_adapter`."""
        return await self.running_engine().order_adapter(order)

    async def order_drafter(self, order: DrafterOrder) -> DrafterReport:
        """Execute an order on the running event loop; see `RunningEngine.order_drafter`."""
        return await self.running_engine().order_drafter(order)

    def abort(self, request_id: str) -> None:
        """End the requests with this id; on the event loop of their streams."""
        self.require_open()
        self.preparations.abort(lambda each, caller: each == request_id)
        self.engine.abort(request_id)

    def running_engine(self) -> RunningEngine:
        """Return the engine with a thread for the running event loop; start that if necessary."""
        self.require_open()
        self.bind_to_process()
        current = self.engine
        engine = current.on_running_loop()
        if engine is not current:  # `close` may replace it meanwhile, on another thread
            self.engine = engine
        return engine

    def bind_to_process(self) -> None:
        """Note that this process has threads or ranks for the models, which its forks lack."""
        self._process_id = os.getpid()

    def require_open(self) -> None:
        """Raise NotReadyError after `close`, and in a fork of the process that has the threads."""
        if self._is_closed:
            raise ended()
        if self._is_forked:
            reason = f"the LLM belongs to process {self._process_id}, whose threads a fork lacks"
            raise NotReadyError(f"{reason}; load it in this process, or start processes by spawn")

    @property
    def _is_forked(self) -> bool:
        return self._process_id not in (None, os.getpid())

    def close(self) -> None:
        """End the engine's thread and the models; the metrics stay. From any thread, repeatedly."""
        if self._is_closed or self._is_forked:  # a fork has nothing to end
            return
        self._is_closed = True
        self.engine = self.engine.stop()
        self._executor.close()
        if self._grammars is not None:
            self._grammars.close()


def _memory_bytes(config: LLMConfig) -> int:
    if config.device == "cuda":
        return int(smallest_gpu_bytes() * config.gpu_memory_utilization)
    return available_memory_bytes()


def _check_target(config: LLMConfig, *, in_process: bool) -> None:
    """Check the target and the memory before drafters are measured. Raises SpecdecError."""
    models = check_target(config, print_progress).configs()
    resolved = with_resolved_dtype(config, models)
    memory_plan(resolved, models, _memory_bytes(config), in_process=in_process)


def _make_executor(
    name: str | None, config: LLMConfig, directories: ModelDirectories, plan: MemoryPlan
) -> Executor:
    """Make an executor and load its models.

    name: of an entry point; None loads the models into this process. Raises SpecdecError where no
    installed package has that name, and what loading raises.
    """
    if name is None:
        from specdec.llm.local_executor import LocalExecutor  # imports torch

        return LocalExecutor(config, directories, plan)
    found = entry_points(group=EXECUTORS, name=name)
    if not found:
        raise SpecdecError(
            f"several ranks need the executor {name!r}, and no installed package has one: "
            f"install specdec with its cluster package, or leave tensor_parallel_size at 1"
        )
    make: Callable[[LLMConfig, ModelDirectories, MemoryPlan], Executor] = next(iter(found)).load()
    return make(config, directories, plan)
