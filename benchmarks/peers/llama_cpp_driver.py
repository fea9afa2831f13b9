"""llama.cpp by llama-cpp-python, one stream at a time.

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
    """The GGUF file `model`, quantized as it is."""

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
        """Runs the streams of a workload one after another."""
        started_at = time.perf_counter()
        streams = tuple(self._run(prompt, workload.max_tokens) for prompt in workload.prompts)
        return Measurement(time.perf_counter() - started_at, streams)

    def _run(self, prompt: tuple[int, ...], max_tokens: int) -> StreamRecord:
        """The generator goes on behind an end-of-sequence token, as ours is told to."""
        self._llama.reset()
        started_at = time.perf_counter()
        token_ids, arrivals_s = [], []
        generated = self._llama.generate(list(prompt), temp=0.0, repeat_penalty=1.0, top_k=1)
        for token in islice(generated, max_tokens):
            token_ids.append(int(token))
            arrivals_s.append(time.perf_counter() - started_at)
        return StreamRecord(tuple(token_ids), tuple(arrivals_s))


def _leave_out_amx(module: Any) -> None:
    """Keeps matrices as they are in the file instead of repacked for AMX.

    With 4-bit weights the AMX path of llama.cpp dies of a segmentation fault on the first token of
    SmolLM2 (version 0.3.36). The constructor does not take the parameter, so its default is set.
    """
    defaults = module.llama_cpp.llama_model_default_params

    def changed() -> Any:
        params = defaults()
        params.use_extra_bufts = False
        return params

    module.llama_cpp.llama_model_default_params = changed


if __name__ == "__main__":
    serve(LlamaCppContender, ("llama-cpp-python",))
