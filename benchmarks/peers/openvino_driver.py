"""Driver of OpenVINO GenAI on a CPU, with continuous batching.

Settings: `properties` of the plugin, and `num_lookup_tokens`, the draft tokens of its prompt
lookup; 0 for none.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.peers.driver_loop import Settings, serve
from benchmarks.workloads import Measurement, StreamRecord, Workload

_CACHE_GIB = 1
_MAX_STREAMS = 64
_MAX_NGRAM_TOKENS = 4  # as ours


class OpenVinoContender:
    """One pipeline over paged KV, with prefix caching off."""

    def __init__(self, settings: Settings) -> None:
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = _CACHE_GIB
        scheduler.max_num_seqs = _MAX_STREAMS
        scheduler.enable_prefix_caching = False
        self._genai: Any = openvino_genai
        self._num_lookup_tokens: int = settings["num_lookup_tokens"]
        self._pipeline: Any = openvino_genai.ContinuousBatchingPipeline(
            settings["model"],
            scheduler,
            "CPU",
            {
                "INFERENCE_NUM_THREADS": settings["num_threads"],
                **settings["properties"],
                **({"prompt_lookup": True} if self._num_lookup_tokens else {}),
            },
        )

    def measure(self, workload: Workload) -> Measurement:
        """Run a workload, step by step."""
        config = self._config(workload.max_tokens)
        started_at = time.perf_counter()
        handles = [
            self._pipeline.add_request(index, self._tensor(prompt), config)
            for index, prompt in enumerate(workload.prompts)
        ]
        token_ids: list[list[int]] = [[] for _ in handles]
        arrivals_s: list[list[float]] = [[] for _ in handles]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            elapsed_s = time.perf_counter() - started_at
            for index, handle in enumerate(handles):
                if handle.can_read():
                    for output in handle.read().values():
                        token_ids[index].extend(output.generated_ids)
                    arrivals_s[index].append(elapsed_s)
        seconds = time.perf_counter() - started_at
        pairs = zip(token_ids, arrivals_s, strict=True)
        return Measurement(seconds, tuple(StreamRecord(tuple(i), tuple(a)) for i, a in pairs))

    def _config(self, max_tokens: int) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.do_sample = False
        config.ignore_eos = True
        if self._num_lookup_tokens:
            config.num_assistant_tokens = self._num_lookup_tokens
            config.max_ngram_size = _MAX_NGRAM_TOKENS
        return config

    def _tensor(self, prompt: tuple[int, ...]) -> Any:
        import numpy as np
        import openvino

        return openvino.Tensor(np.array([prompt], dtype=np.int64))


if __name__ == "__main__":
    serve(OpenVinoContender, ("openvino", "openvino-genai"))
