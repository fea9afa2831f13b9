"""Replays outputs by the engine of an `LLM`: any ranks, quantization, kernels and device."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import aclosing
from typing import Any

from specdec.engine.receipts.model import receipt_model
from specdec.engine.requests.replays import comparison_in, replay_request
from specdec.llm.host import EngineHost
from specdec.sequences.sequence import EngineRequest
from specdec.text.grammar.matcher import Grammar
from specdec.types.messages import Logprobs
from specdec.types.sampling.sampling_params import StructuredOutput
from specdec.types.sampling.sampling_spec import Replay

Submit = Callable[[Coroutine[Any, Any, Logprobs]], Future[Logprobs]]


class EngineReplayer:
    """See Replayer."""

    def __init__(self, host: EngineHost, submit: Submit) -> None:
        """submit: runs a coroutine on the event loop of the engine's streams.

        Reads all weights. Raises UnsupportedModelError for a model without weight files.
        """
        self._host, self._submit = host, submit
        self.model, self.tokenizer = host.model, host.tokenizer
        directory, max_model_len = host.directories.target, host.setup.plan.engine.max_model_len
        self.receipt_model = receipt_model(host.config, directory, host.model, max_model_len)

    def grammar(self, spec: StructuredOutput, num_sequences: int) -> Grammar:
        """See Replayer."""
        grammar = self._host.compile(spec, num_sequences)
        assert grammar is not None, "a structured output has a grammar"
        return grammar

    def replay(self, request: EngineRequest, replay: Replay) -> Logprobs:
        """See Replayer."""
        return self._submit(self._run(replay_request(request, replay))).result()

    async def _run(self, request: EngineRequest) -> Logprobs:
        streams = self._host.running_engine().thread
        async with aclosing(streams.generate(request)) as outputs:
            return await comparison_in(outputs)
