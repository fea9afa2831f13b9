"""Driver of llama.cpp through llama-cpp-python, one stream at a time.

Settings: `num_lookup_tokens`, the draft tokens of its prompt lookup; 0 for none.
"""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

from benchmarks.peers.driver_loop import Settings, serve
from benchmarks.workloads import Measurement, StreamRecord, Workload

_CONTEXT_TOKENS = 2048


class LlamaCppContender:
    """Contender that runs the GGUF file `model` as it is quantized."""

    def __init__(self, settings: Settings) -> None:
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        _leave_out_amx(llama_cpp.llama)
        count = settings["num_lookup_tokens"]
        self._llama: Any = llama_cpp.Llama(
            settings["model"],
            n_ctx=_CONTEXT_TOKENS,
            n_threads=settings["num_threads"],
            n_threads_batch=settings["num_threads"],
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=count) if count else None,
            verbose=False,
        )

    def measure(self, workload: Workload) -> Measurement:
        """Run the streams of a workload one after another."""
        started_at = time.perf_counter()
        streams = tuple(self._run(prompt, workload.max_tokens) for prompt in workload.prompts)
        return Measurement(time.perf_counter() - started_at, streams)

    def _run(self, prompt: tuple[int, ...], max_tokens: int) -> StreamRecord:
        """Run one stream; the generator continues past end-of-sequence tokens, as ours does."""
        self._llama.reset()
        started_at = time.perf_counter()
        token_ids, arrivals_s = [], []
        generated = self._llama.generate(list(prompt), temp=0.0, repeat_penalty=1.0, top_k=1)
        for token in islice(generated, max_tokens):
            token_ids.append(int(token))
            arrivals_s.append(time.perf_counter() - started_at)
        return StreamRecord(tuple(token_ids), tuple(arrivals_s))


def _leave_out_amx(module: Any) -> None:
    """Disable repacking of matrices for AMX.

    With 4-bit weights llama.cpp 0.3.36 crashes with a segmentation fault in its AMX path on the
    first token of SmolLM2. The constructor has no such parameter, so its default is changed.
    """
    defaults = module.llama_cpp.llama_model_default_params

    def changed() -> Any:
        params = defaults()
        params.use_extra_bufts = False
        return params

    module.llama_cpp.llama_model_default_params = changed


if __name__ == "__main__":
    serve(LlamaCppContender, ("llama-cpp-python",))
