"""`AsyncLLM`: streaming inference in this process, on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from os import PathLike
from typing import Any, ClassVar, Self, Unpack, get_args

from specdec.llm.arguments import LLMArguments, read_arguments
from specdec.llm.base_llm import BaseLLM
from specdec.llm.llm_engine import LLMEngine
from specdec.llm.outputs import OutputKind, RequestOutput
from specdec.llm.prompts import Message, Prompt, PromptParts, read_conversation, read_prompt
from specdec.types.adapters import AdapterInfo, AdapterOrder, LoRARequest
from specdec.types.drafters import DrafterOrder, DrafterVersion
from specdec.types.errors import AbortedError, InvalidValueError
from specdec.types.request import Conversation
from specdec.types.sampling.sampling_params import SamplingParams


class AsyncLLM(BaseLLM):
    """Streaming inference. The model loads at construction; the engine runs on another thread.

    Streams are read on one event loop at a time.
    """

    renamed: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("agenerate", "async_generate", "generate_async"),
        "write `async for output in llm.generate(prompt, params)`",
    )

    def __init__(self, model: str | PathLike[str], **arguments: Unpack[LLMArguments]) -> None:
        """model: an alias, a directory, a GGUF file or a Hub id. The rest: docs/python.md.

        Raises InvalidValueError, ModelNotFoundError, UnsupportedModelError, OutOfMemoryError.
        """
        engine = LLMEngine(read_arguments(model, arguments))
        super().__init__(engine, engine.close)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        output_kind: OutputKind = "cumulative",
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the outputs of a request; leaving the stream early aborts it.

        request_id: None to assign one. output_kind: whether outputs are cumulative, hold only new
        tokens, or there is only a final one. lora_request: an adapter, which is loaded when it is
        first used. Raises InvalidValueError.
        """
        read = partial(read_prompt, "prompt", prompt)
        return self._stream(read, sampling_params, request_id, output_kind, priority, lora_request)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        output_kind: OutputKind = "cumulative",
        priority: int = 0,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the reply to a conversation, rendered by the chat template; see `generate`."""
        read = partial(
            read_conversation,
            "messages",
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self._stream(read, sampling_params, request_id, output_kind, priority, lora_request)

    async def _stream(
        self,
        read: Callable[[], PromptParts | Conversation],
        params: SamplingParams | None,
        request_id: str | None,
        kind: OutputKind,
        priority: int,
        lora: LoRARequest | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        prompt = read()
        if kind not in get_args(OutputKind):
            kinds = ", ".join(get_args(OutputKind))
            raise InvalidValueError("output_kind", kind, f"one of {kinds}")
        name = str(next(self._ids)) if request_id is None else request_id
        if not isinstance(name, str):
            raise InvalidValueError("request_id", name, "a string")
        params = SamplingParams() if params is None else params
        seed = self._llm_engine.seed_for(params)  # here, so that seeds follow the order of requests
        preparation = self._llm_engine.preparations.begin(name)
        with self._llm_engine.using(lora):
            prepared = await asyncio.to_thread(
                self._llm_engine.prepare, name, prompt, params, seed, priority, lora
            )
            with suppress(AbortedError), preparation:  # its stream reports an abort
                preparation.require_alive()
                prepared = await self._llm_engine.compiled(prepared)
            async with aclosing(self._llm_engine.stream(prepared, kind, preparation)) as stream:
                async for output in stream:
                    yield output

    async def load_drafter(self, path: str) -> tuple[DrafterVersion, ...]:
        """Draft with another version of the draft head, also for running requests.

        path: a directory or Hub id of a head with the method and sizes of the configured one. A
        version of which fewer drafts are accepted is rolled back. Returns all versions; see
        docs/drafter-versions.md. Raises what `DrafterControl.execute` raises.
        """
        return (await self._llm_engine.order_drafter(DrafterOrder(path=path))).versions

    async def use_drafter(self, version: int) -> tuple[DrafterVersion, ...]:
        """Draft with an earlier version of the draft head again; 1 is the configured one."""
        return (await self._llm_engine.order_drafter(DrafterOrder(version=version))).versions

    async def drafter_versions(self) -> tuple[DrafterVersion, ...]:
        """Return the versions of the draft head, oldest first, with their accepted drafts."""
        return (await self._llm_engine.order_drafter(DrafterOrder())).versions

    async def add_lora(self, lora_request: LoRARequest) -> tuple[AdapterInfo, ...]:
        """Load an adapter before a request needs it; return all loaded adapters.

        Raises what `AdapterControl.execute` raises, as for a name that is taken, and
        InvalidValueError for another adapter's id.
        """
        with self._llm_engine.using(lora_request):
            return (await self._llm_engine.order_adapter(AdapterOrder.of(lora_request))).adapters

    async def remove_lora(self, lora_name: str | int) -> tuple[AdapterInfo, ...]:
        """Unload an adapter; running requests complete with it. Return all adapters.

        lora_name: or its `lora_int_id`, as in vLLM.
        """
        order = self._llm_engine.unload_order(lora_name)
        return (await self._llm_engine.order_adapter(order)).adapters

    async def list_loras(self) -> tuple[AdapterInfo, ...]:
        """Return the loaded adapters, in the order in which they were loaded."""
        return (await self._llm_engine.order_adapter(AdapterOrder())).adapters

    async def abort(self, request_id: str) -> None:
        """End the requests with this id; their streams end with finish reason `abort`."""
        self._llm_engine.abort(request_id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.shutdown)
