"""Replays outputs by the engine of an `LLM`: any ranks, quantization, kernels and device."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import aclosing
from typing import Any

from specdec.engine.receipts.model import receipt_model
from specdec.engine.requests.replays import comparison_in, replay_request
from specdec.llm.llm_engine import LLMEngine
from specdec.sequences.sequence import EngineRequest
from specdec.text.grammar.matcher import Grammar
from specdec.types.messages import Logprobs
from specdec.types.sampling.sampling_params import StructuredOutput
from specdec.types.sampling.sampling_spec import Replay

Submit = Callable[[Coroutine[Any, Any, Logprobs]], Future[Logprobs]]


class EngineReplayer:
    """See Replayer."""

    def __init__(self, engine: LLMEngine, submit: Submit) -> None:
        """submit: runs a coroutine on the event loop of the engine's streams.

        Reads all weights. Raises UnsupportedModelError for a model without weight files.
        """
        self._llm_engine, self._submit = engine, submit
        self.model, self.tokenizer = engine.model, engine.tokenizer
        directory, max_model_len = engine.directories.target, engine.setup.plan.engine.max_model_len
        self.receipt_model = receipt_model(engine.config, directory, engine.model, max_model_len)

    def grammar(self, spec: StructuredOutput, num_sequences: int) -> Grammar:
        """See Replayer."""
        grammar = self._llm_engine.compile(spec, num_sequences)
        assert grammar is not None, "a structured output has a grammar"
        return grammar

    def replay(self, request: EngineRequest, replay: Replay) -> Logprobs:
        """See Replayer."""
        return self._submit(self._run(replay_request(request, replay))).result()

    async def _run(self, request: EngineRequest) -> Logprobs:
        streams = self._llm_engine.running_engine().thread
        async with aclosing(streams.generate(request)) as outputs:
            return await comparison_in(outputs)
