"""`LLM`: offline inference of batches in this process."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from os import PathLike
from typing import Any, ClassVar, TypeVar, Unpack

from tqdm.auto import tqdm

from specdec.engine.receipts.report import ReceiptReport
from specdec.llm.arguments import LLMArguments, read_arguments
from specdec.llm.base_llm import BaseLLM
from specdec.llm.concurrency import run_workers
from specdec.llm.llm_engine import LLMEngine, PreparedRequest
from specdec.llm.outputs import RequestOutput, RequestOutputs
from specdec.llm.prompts import Message, Prompt, PromptParts, read_conversations, read_prompts
from specdec.llm.receipts.engine_replay import EngineReplayer
from specdec.llm.receipts.verification import verify_receipt
from specdec.types.adapters import AdapterInfo, AdapterOrder, LoRARequest
from specdec.types.drafters import DrafterOrder, DrafterVersion
from specdec.types.errors import InvalidValueError
from specdec.types.reports.receipts import Receipt
from specdec.types.request import Conversation
from specdec.types.sampling.sampling_params import SamplingParams

T = TypeVar("T")
Params = SamplingParams | Sequence[SamplingParams]
Adapters = LoRARequest | Sequence[LoRARequest | None] | None
UseTqdm = bool | Callable[..., "tqdm[Any]"]

_OPEN_PER_PLACE = 2
"""Requests sent to the engine per place in the batch, so that its queue is never empty."""
_GRACE_S = 1.0


class LLM(BaseLLM):
    """Offline inference of batches. Can be used where an event loop runs, as in a notebook."""

    renamed: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("agenerate", "async_generate", "generate_async"),
        "write `async for output in AsyncLLM(model).generate(prompt, params)`",
    )

    def __init__(self, model: str | PathLike[str], **arguments: Unpack[LLMArguments]) -> None:
        """model: an alias, a directory, a GGUF file or a Hub id. The rest: docs/python.md.

        Raises InvalidValueError, ModelNotFoundError, UnsupportedModelError, OutOfMemoryError.
        """
        engine = LLMEngine(read_arguments(model, arguments))
        engine.bind_to_process()
        self._thread = EventLoopThread(engine.require_open)
        super().__init__(engine, partial(_end, engine, self._thread))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | None = None,
        use_tqdm: UseTqdm = True,
        *,
        priority: Sequence[int] | None = None,
        lora_request: Adapters = None,
    ) -> RequestOutputs:
        """Generate completions for all prompts; return their list, in order, when all are complete.

        prompts: texts, lists of token ids, or mappings with `prompt` or `prompt_token_ids`.
        sampling_params: for all, or one for each; None for the model's defaults.
        use_tqdm: whether to show progress; or a function that makes the bar, instead of tqdm.
        priority: one for each; lower numbers are scheduled first.
        lora_request: an adapter for all, or one or None for each; loaded when it is first used.

        Raises InvalidValueError before anything runs. An error of one request ends them all.
        """
        read = read_prompts(prompts)
        return self._answer("prompts", read, sampling_params, use_tqdm, priority, lora_request)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | None = None,
        use_tqdm: UseTqdm = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: Adapters = None,
    ) -> RequestOutputs:
        """Generate answers to one conversation or several, by the chat template; see `generate`."""
        conversations = read_conversations(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self._answer(
            "messages", conversations, sampling_params, use_tqdm, None, lora_request
        )

    def verify(
        self, receipt: Receipt, *, tolerance: float | None = None, public_key: str | None = None
    ) -> ReceiptReport:
        """Verify a receipt by a pass over its prompt and output; see `verify_receipt`."""
        replayer = EngineReplayer(self._llm_engine, self._thread.submit)
        return verify_receipt(receipt, replayer, tolerance=tolerance, public_key=public_key)

    def load_drafter(self, path: str) -> tuple[DrafterVersion, ...]:
        """Draft with another version of the draft head, also for running requests.

        path: a directory or Hub id of a head with the method and sizes of the configured one. A
        version of which fewer drafts are accepted is rolled back. Returns all versions; see
        docs/drafter-versions.md. Raises what `DrafterControl.execute` raises.
        """
        return self._order(DrafterOrder(path=path))

    def use_drafter(self, version: int) -> tuple[DrafterVersion, ...]:
        """Draft with an earlier version of the draft head again; 1 is the configured one."""
        return self._order(DrafterOrder(version=version))

    def drafter_versions(self) -> tuple[DrafterVersion, ...]:
        """Return the versions of the draft head, oldest first, with their accepted drafts."""
        return self._order(DrafterOrder())

    def add_lora(self, lora_request: LoRARequest) -> tuple[AdapterInfo, ...]:
        """Load an adapter before a request needs it; return all loaded adapters.

        Raises what `AdapterControl.execute` raises, as for a name that is taken, and
        InvalidValueError for another adapter's id.
        """
        with self._llm_engine.using(lora_request):
            return self._order_adapter(AdapterOrder.of(lora_request))

    def remove_lora(self, lora_name: str | int) -> tuple[AdapterInfo, ...]:
        """Unload an adapter; running requests complete with it. Return all adapters.

        lora_name: or its `lora_int_id`, as in vLLM.
        """
        return self._order_adapter(self._llm_engine.unload_order(lora_name))

    def list_loras(self) -> tuple[AdapterInfo, ...]:
        """Return the loaded adapters, in the order in which they were loaded."""
        return self._order_adapter(AdapterOrder())

    def _order_adapter(self, order: AdapterOrder) -> tuple[AdapterInfo, ...]:
        return self._thread.submit(self._llm_engine.order_adapter(order)).result().adapters

    def _order(self, order: DrafterOrder) -> tuple[DrafterVersion, ...]:
        return self._thread.submit(self._llm_engine.order_drafter(order)).result().versions

    def _answer(
        self,
        field: str,
        prompts: Sequence[PromptParts | Conversation],
        params: Params | None,
        use_tqdm: UseTqdm,
        priority: Sequence[int] | None,
        lora_request: Adapters,
    ) -> RequestOutputs:
        """Validate and run a batch."""
        params = SamplingParams() if params is None else params
        all_params = _one_for_each("sampling_params", params, len(prompts))
        priorities = _one_for_each("priority", 0 if priority is None else priority, len(prompts))
        loras = _one_for_each("lora_request", lora_request, len(prompts))
        with ExitStack() as used:
            requests = [
                self._prepare(f"{field}[{index}]", used, *each)
                for index, each in enumerate(
                    zip(prompts, all_params, priorities, loras, strict=True)
                )
            ]
            return self._run(requests, use_tqdm)

    def _prepare(
        self,
        where: str,
        used: ExitStack,
        prompt: PromptParts | Conversation,
        params: SamplingParams,
        priority: int,
        lora: LoRARequest | None,
    ) -> PreparedRequest:
        """Return one request of a batch; errors name its place. used: adapters of the batch."""
        engine = self._llm_engine
        try:
            used.enter_context(engine.using(lora))
            seed = engine.seed_for(params)
            prepared = engine.prepare(str(next(self._ids)), prompt, params, seed, priority, lora)
            return prepared.with_grammar(engine.compile(params.structured_output, params.n))
        except InvalidValueError as error:
            raise InvalidValueError(f"{error.field} of {where}", error.value, error.limit) from None

    def _run(self, requests: Sequence[PreparedRequest], use_tqdm: UseTqdm) -> RequestOutputs:
        """Run a batch and show progress; Ctrl-C aborts all of it."""
        ended: queue.SimpleQueue[RequestOutput | None] = queue.SimpleQueue()
        batch = self._thread.submit(_run_all(self._llm_engine, requests, ended.put))
        batch.add_done_callback(lambda _: ended.put(None))
        try:
            with Progress(len(requests), use_tqdm) as progress:
                while (output := ended.get()) is not None:
                    progress.add(output)
        except BaseException:
            batch.cancel()
            raise
        return RequestOutputs(batch.result())


async def _run_all(
    llm_engine: LLMEngine,
    requests: Sequence[PreparedRequest],
    on_output: Callable[[RequestOutput], None],
) -> list[RequestOutput]:
    """Run all requests, a limited number at once, by priority; return the outputs in order."""
    order = sorted(range(len(requests)), key=lambda index: requests[index].request.priority)
    outputs: dict[int, RequestOutput] = {}
    waiting = iter(order)

    async def work() -> None:
        for index in waiting:
            stream = llm_engine.stream(requests[index], "final_only")
            [outputs[index]] = [each async for each in stream]
            on_output(outputs[index])

    llm_engine.stats_log.begin(llm_engine.engine.last_stats)
    most = _OPEN_PER_PLACE * llm_engine.config.max_num_seqs
    await run_workers(work, min(len(requests), most))
    llm_engine.stats_log.write(llm_engine.engine.last_stats)
    return [outputs[index] for index in range(len(requests))]


def _one_for_each(field: str, given: Any, count: int) -> list[Any]:
    if not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise InvalidValueError(f"{field} length", len(given), f"1, or as many as prompts: {count}")
    return list(given)


def _end(engine: LLMEngine, thread: EventLoopThread) -> None:
    engine.close()
    thread.stop()


class Progress:
    """Progress bar with the number of outputs and tokens per second, if enabled."""

    def __init__(self, total: int, use_tqdm: bool | Callable[..., Any]) -> None:
        """use_tqdm: True for tqdm's bar; or a function that makes one, called like tqdm."""
        make = use_tqdm if callable(use_tqdm) else tqdm
        self._bar: Any = None
        if use_tqdm:
            self._bar = make(total=total, desc="Processed prompts", dynamic_ncols=True)
        self._began_at_s = time.perf_counter()
        self._num_prompt_tokens = self._num_output_tokens = 0

    def add(self, output: RequestOutput) -> None:
        """Count a complete output."""
        if self._bar is None:
            return
        self._num_prompt_tokens += len(output.prompt_token_ids)
        self._num_output_tokens += sum(len(each.token_ids) for each in output.outputs)
        seconds = max(time.perf_counter() - self._began_at_s, 1e-9)
        self._bar.set_postfix_str(
            f"input {self._num_prompt_tokens / seconds:.1f} tokens/s, "
            f"output {self._num_output_tokens / seconds:.1f} tokens/s",
            refresh=False,
        )
        self._bar.update(1)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


class EventLoopThread:
    """Runs coroutines until it is stopped, at the latest with the interpreter."""

    def __init__(self, require_open: Callable[[], None]) -> None:
        """require_open: raises where no coroutine can run."""
        self._require_open, self._loop = require_open, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="llm", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._loop.run_forever()
        if tasks := asyncio.all_tasks(self._loop):
            self._loop.run_until_complete(_end_tasks(tasks))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine; call it from another thread. Raises what `require_open` raises."""
        try:
            self._require_open()
        except BaseException:
            coroutine.close()
            raise
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self) -> None:
        """Stop the thread and wait for it. Running tasks are cancelled after a second."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            # The garbage collector may run `stop` on the thread itself.
            if threading.current_thread() is not self._thread:
                self._thread.join()


async def _end_tasks(tasks: set[asyncio.Task[Any]]) -> None:
    _, late = await asyncio.wait(tasks, timeout=_GRACE_S)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
