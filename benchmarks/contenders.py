"""What `benchmarks.throughput` compares: transformers, our engine in process, our service.

Each runs the same workload: a number of streams that all begin at once and are given the same
prompts and numbers of tokens. Each lives in processes of its own, where idle threads of one cannot
slow another, and all are loaded before the first is measured.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.machine import num_usable_cores
from benchmarks.streams import Call, speculation_options, stream_all
from benchmarks.timed_runner import TimedRunner
from specdec.client import Client
from specdec.config import EngineConfig
from specdec.engine import Engine
from specdec.model_config import ModelConfig
from specdec.parallel import TensorParallelGroup
from specdec.request_output import RequestOutput
from specdec.runner import LocalTarget, load_runner
from specdec.sampling_params import SamplingParams
from specdec.sequence import Request
from specdec.speculative_config import SpeculativeConfig
from specdec.tokenizer import Tokenizer

_STOP_TIMEOUT_S = 10.0
_NUM_BLOCKS = 1024  # of 16 tokens: more than any workload here holds


@dataclass(frozen=True)
class Workload:
    """One prompt for each stream, continued greedily by exactly `max_tokens` tokens."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    num_speculative_tokens: int = 0

    def params(self) -> SamplingParams:
        """The same for every stream."""
        return SamplingParams(
            temperature=0,
            max_tokens=self.max_tokens,
            ignore_eos=True,
            speculation=speculation_options(self.num_speculative_tokens),
        )


@dataclass(frozen=True)
class Measurement:
    """A workload's run, from its start to the last token of its last stream.

    first_token_s: until a stream's first token, the median of the streams.
    mean_acceptance_length: tokens a draft yielded, the target's own included; 1 without drafts.
    others_percent: what processes that take no part used meanwhile, in percent of one core.
    """

    num_tokens: int
    seconds: float
    first_token_s: float
    mean_acceptance_length: float = 1.0
    others_percent: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(frozen=True)
class StepProfile:
    """Where the milliseconds of a decoding step go, on average over a run."""

    num_streams: int
    num_steps: int
    model_ms: float
    logits_ms: float
    sampling_ms: float  # verification included
    input_ms: float  # making the model's input, and keeping sequence states
    engine_ms: float  # scheduling, drafting, committing, detokenizing


class Contender(Protocol):
    """Something that generates."""

    def measure(self, workload: Workload) -> Measurement:
        """Runs a workload once."""


class TransformersContender:
    """`generate` of transformers in fp32; several streams are a batch, padded on the left."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._pad_token_id: int = self._model.generation_config.eos_token_id
        self._model.generation_config.pad_token_id = self._pad_token_id
        self._model.generation_config.eos_token_id = None  # goes on after it, as ours is told to

    def measure(self, workload: Workload) -> Measurement:
        """Runs a workload as one batch."""
        inputs, mask = _padded_left(workload.prompts, self._pad_token_id)
        clock = _FirstTokenClock()
        self._model.generate(
            inputs,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=workload.max_tokens,
            streamer=clock,
        )
        seconds = time.perf_counter() - clock.started_at
        num_tokens = len(workload.prompts) * workload.max_tokens
        return Measurement(num_tokens, seconds, clock.first_token_s)


class _FirstTokenClock:
    """A streamer for `generate` that notes when the first token comes."""

    def __init__(self) -> None:
        self.started_at = time.perf_counter()
        self.first_token_s = 0.0
        self._num_calls = 0

    def put(self, value: Tensor) -> None:
        self._num_calls += 1
        if self._num_calls == 2:  # the prompt comes first
            self.first_token_s = time.perf_counter() - self.started_at

    def end(self) -> None:
        pass


class EngineContender:
    """`specdec.engine.Engine` with the model in the same process."""

    def __init__(self, directory: Path) -> None:
        model = ModelConfig.from_directory(directory)
        config = EngineConfig(
            max_model_len=model.max_position_embeddings,
            num_blocks=_NUM_BLOCKS,
            speculation=SpeculativeConfig(),
        )
        self._runner = load_runner(directory, "float32", config, TensorParallelGroup())
        self._engine = Engine(config, model, LocalTarget(self._runner), Tokenizer(directory))

    def measure(self, workload: Workload) -> Measurement:
        """Runs a workload, step by step."""
        started_at = time.perf_counter()
        for index, prompt in enumerate(workload.prompts):
            self._engine.add(Request(str(index), prompt, workload.params(), seed=0))
        first_token_s: dict[str, float] = {}
        finished: list[RequestOutput] = []
        while self._engine.has_work:
            outputs = self._engine.step()
            for output in outputs:
                first_token_s.setdefault(output.request_id, time.perf_counter() - started_at)
            finished += [output for output in outputs if output.finish_reason is not None]
        return Measurement(
            num_tokens=sum(output.num_output_tokens for output in finished),
            seconds=time.perf_counter() - started_at,
            first_token_s=statistics.median(first_token_s.values()),
            mean_acceptance_length=statistics.fmean(
                output.speculation.mean_acceptance_length for output in finished
            ),
        )

    def profile(self, workload: Workload) -> StepProfile:
        """Runs a workload once more, with a clock around each part of a step."""
        num_steps = self._engine.stats().num_steps
        with TimedRunner(self._runner) as timed:
            seconds = self.measure(workload).seconds
        num_steps = self._engine.stats().num_steps - num_steps
        spent = {name: 1000 * total / num_steps for name, total in timed.seconds.items()}
        return StepProfile(
            num_streams=len(workload.prompts),
            num_steps=num_steps,
            model_ms=spent["model.forward"],
            logits_ms=spent["model.compute_logits"],
            sampling_ms=spent["_verify"] - spent["model.compute_logits"],
            input_ms=spent["execute"] - spent["model.forward"] - spent["_verify"],
            engine_ms=1000 * seconds / num_steps - spent["execute"],
        )


class ServiceContender:
    """The running service, over gRPC, one call a stream."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def measure(self, workload: Workload) -> Measurement:
        """Runs a workload, a thread for each stream."""
        calls = [Call(prompt, workload.params()) for prompt in workload.prompts]
        started_at = time.perf_counter()
        answers = stream_all(self._client, calls, num_streams=len(calls))
        return Measurement(
            num_tokens=sum(len(answer.token_ids) for answer in answers),
            seconds=time.perf_counter() - started_at,
            first_token_s=statistics.median(answer.first_token_s for answer in answers),
            mean_acceptance_length=statistics.fmean(
                answer.speculation.mean_acceptance_length for answer in answers
            ),
        )


class Worker:
    """A contender in a process of its own, asleep between calls. A context manager."""

    def __init__(self, factory: Callable[[Path], Any], directory: Path) -> None:
        """`factory` makes the contender from a model directory; it must be importable."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_work, args=(factory, directory, theirs), daemon=True
        )
        self._process.start()
        theirs.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()
        self._process.join(_STOP_TIMEOUT_S)

    def measure(self, workload: Workload) -> Measurement:
        """Runs a workload once, in the other process."""
        measurement: Measurement = self.call("measure", workload)
        return measurement

    def call(self, method: str, workload: Workload) -> Any:
        """Calls any method of the contender. EOFError: the other process has died."""
        self._connection.send((method, workload))
        return self._connection.recv()


def _work(factory: Callable[[Path], Any], directory: Path, connection: Connection) -> None:
    torch.set_num_threads(num_usable_cores())
    contender = factory(directory)
    while True:
        try:
            method, workload = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return  # the parent is done
        connection.send(getattr(contender, method)(workload))


def _padded_left(prompts: Sequence[Sequence[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, both [num_streams, longest prompt]."""
    longest = max(len(prompt) for prompt in prompts)
    padding = [longest - len(prompt) for prompt in prompts]
    ids = [[pad_token_id] * pad + list(p) for pad, p in zip(padding, prompts, strict=True)]
    mask = [[0] * pad + [1] * (longest - pad) for pad in padding]
    return torch.tensor(ids), torch.tensor(mask)
