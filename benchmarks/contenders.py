"""Contenders of this project: the engine in process, and the service over gRPC."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.methods import NUM_SPECULATIVE_TOKENS, make_method
from benchmarks.streams import Call, timed_streams
from benchmarks.timed_runner import TimedRunner
from benchmarks.workloads import NO_METHOD, Measurement, StreamRecord, Workload
from specdec.config.engine import DraftLimits, DTypeName, EngineConfig
from specdec.config.quantization import QuantizationMethod
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.engine import Engine
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.resolve import resolve
from specdec.sequences.sequence import EngineRequest
from specdec.speculation.proposers import DraftModelProposer, Proposer, make_proposer
from specdec.text.tokenizer import Tokenizer
from specdec.types.responses import EngineOutput
from specdec.types.sampling.sampling_params import SamplingParams, SpeculationOptions
from specdec.worker import (
    HeadFiles,
    LoadedModel,
    LocalDraftWorker,
    LocalTarget,
    RankModel,
    TargetModelRunner,
    load_draft,
    load_served_head,
    load_target,
)

_BLOCK_SIZE = 16


@dataclass(frozen=True)
class EngineSettings:
    """Settings of the engine in process.

    methods: those that workloads name, see benchmarks.methods.
    num_blocks: size of the KV pool in blocks of 16 tokens; the draft model gets a second pool of
        that size.
    max_prefill_tokens: prompt tokens in a step that also decodes; None for no limit.
    """

    dtype: DTypeName = "float32"
    quantization: QuantizationMethod | None = None
    methods: tuple[str, ...] = (NO_METHOD,)
    num_speculative_tokens: int = NUM_SPECULATIVE_TOKENS
    num_blocks: int = 1024
    max_prefill_tokens: int | None = None


@dataclass(frozen=True)
class StepProfile:
    """Breakdown of the milliseconds of a decoding step, averaged over a run."""

    num_streams: int
    num_steps: int
    model_ms: float
    logits_ms: float  # including the best logit of each row
    sampling_ms: float  # including verification
    input_ms: float  # building the model's input and updating sequence states
    engine_ms: float  # scheduling, drafting, committing, detokenizing


class EngineContender:
    """`specdec.engine.engine.Engine` with the model in the same process; one engine per method.

    Prefix caching is off: the benchmarks repeat their prompts, and most peers have no prefix cache.
    """

    def __init__(self, directory: Path, settings: EngineSettings | None = None) -> None:
        """Load the model once, and a draft model if a method needs one."""
        self._settings = settings or EngineSettings()
        self._directory = directory
        self._model = ModelConfig.from_directory(directory)
        self._tokenizer = Tokenizer(directory)
        self._config = EngineConfig(
            max_model_len=min(
                self._model.max_position_embeddings, self._settings.num_blocks * _BLOCK_SIZE
            ),
            num_blocks=self._settings.num_blocks,
            block_size=_BLOCK_SIZE,
            max_prefill_tokens=self._settings.max_prefill_tokens,
            enable_prefix_caching=False,
        )
        self._runner = load_target(
            RankModel(
                directory,
                self._settings.dtype,
                self._config,
                quantization=self._settings.quantization,
            ),
            TensorParallelGroup(),
        )
        self._engines = {name: self._engine(name) for name in self._settings.methods}

    def measure(self, workload: Workload) -> Measurement:
        """Run a workload step by step."""
        engine, params = self._engines[workload.method], params_of(workload)
        requests = [
            EngineRequest(prompt, params, request_id=str(index), seed=0)
            for index, prompt in enumerate(workload.prompts)
        ]
        return run_requests(engine, requests, workload.num_open)

    def profile(self, workload: Workload) -> StepProfile:
        """Run a workload of NO_METHOD with a timer around each part of a step."""
        engine = self._engines[NO_METHOD]
        num_steps = engine.stats().counts.num_steps
        with TimedRunner(self._runner) as timed:
            seconds = self.measure(workload).seconds
        num_steps = engine.stats().counts.num_steps - num_steps
        spent = {name: 1000 * total / num_steps for name, total in timed.seconds.items()}
        return StepProfile(
            num_streams=len(workload.prompts),
            num_steps=num_steps,
            model_ms=spent["model.forward"],
            logits_ms=spent["model.compute_logits_and_argmax"],
            sampling_ms=spent["_verify"] - spent["model.compute_logits_and_argmax"],
            input_ms=spent["execute"] - spent["model.forward"] - spent["_verify"],
            engine_ms=1000 * seconds / num_steps - spent["execute"],
        )

    def _engine(self, name: str) -> Engine:
        method = make_method(name, self._settings.num_speculative_tokens)
        config = replace(self._config, speculation=method.config)
        target = LocalTarget(self._runner_of(name, method.config))
        return Engine(
            config,
            self._model,
            target,
            self._tokenizer,
            make_proposer(method.config, self._draft_model(method.config)),
            method.policy(target, config),
        )

    def _runner_of(self, name: str, speculation: SpeculativeConfig | None) -> TargetModelRunner:
        """Return a runner of the same model, with its own KV and sequences."""
        if name == NO_METHOD:
            return self._runner
        head = None
        if speculation is not None and speculation.head and speculation.head.model:
            files = HeadFiles(resolve(speculation.head.model))
            head = load_served_head(files, self._model, self._runner.model)
        same = self._runner
        loaded = LoadedModel(same.model, same.group, same.vocab_size)
        return TargetModelRunner(loaded, self._config, head=head)

    def _draft_model(self, config: SpeculativeConfig | None) -> Proposer | None:
        if config is None or config.draft_model is None:
            return None
        limits = DraftLimits(
            self._config.num_blocks,
            self._config.block_size,
            self._config.max_model_len,
            self._config.max_num_batched_tokens,
            self._config.enable_prefix_caching,
        )
        runner = load_draft(
            RankModel(
                self._directory,
                self._settings.dtype,
                limits,
                quantization=config.draft_model.quantization,
            ),
            TensorParallelGroup(),
        )
        return DraftModelProposer(LocalDraftWorker(runner), limits)


def run_requests(
    engine: Engine,
    requests: Sequence[EngineRequest],
    num_open: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Measurement:
    """Run requests step by step, with `num_open` of them at once; clock: of all times."""
    started_at = clock()
    outputs = _run(engine, requests, num_open, clock)
    seconds = clock() - started_at
    return Measurement(
        seconds=seconds,
        streams=tuple(_record(outputs[each.request_id]) for each in requests),
        mean_acceptance_length=statistics.fmean(
            each[-1].output.speculation.mean_acceptance_length for each in outputs.values()
        ),
    )


@dataclass(frozen=True)
class _Arrival:
    """Output of a request and its time, in seconds from the request."""

    output: EngineOutput
    at_s: float


def _run(
    engine: Engine,
    requests: Sequence[EngineRequest],
    num_open: int,
    clock: Callable[[], float],
) -> dict[str, list[_Arrival]]:
    """Return the outputs of each request, with `num_open` requests running at once."""
    waiting = list(reversed(requests))
    added_at: dict[str, float] = {}
    arrived: dict[str, list[_Arrival]] = {each.request_id: [] for each in requests}

    def add_next() -> None:
        if waiting:
            request = waiting.pop()
            added_at[request.request_id] = clock()
            engine.add(request)

    for _ in range(num_open):
        add_next()
    while engine.has_work:
        outputs = engine.step()
        now = clock()
        for output in outputs:
            request_id = output.request_id
            arrived[request_id].append(_Arrival(output, now - added_at[request_id]))
            if output.finish_reason is not None:
                add_next()
    return arrived


def _record(arrivals: Sequence[_Arrival]) -> StreamRecord:
    return StreamRecord(
        token_ids=tuple(token for each in arrivals for token in each.output.token_ids),
        arrivals_s=tuple(each.at_s for each in arrivals if each.output.token_ids),
    )


class ServiceContender:
    """Running service, over gRPC, with one call per stream."""

    def __init__(self, address: str) -> None:
        self._address = address

    def measure(self, workload: Workload) -> Measurement:
        """Run a workload."""
        params = params_of(workload)
        calls = [Call(prompt, params) for prompt in workload.prompts]
        seconds, answers = timed_streams(self._address, calls, workload.num_open)
        return Measurement(
            seconds=seconds,
            streams=tuple(StreamRecord(each.token_ids, each.arrivals_s) for each in answers),
            mean_acceptance_length=statistics.fmean(
                answer.speculation.mean_acceptance_length for answer in answers
            ),
        )


def params_of(workload: Workload) -> SamplingParams:
    """Return parameters with speculation as configured, or disabled for NO_METHOD."""
    return SamplingParams(
        temperature=workload.temperature,
        seed=0,
        max_tokens=workload.max_tokens,
        ignore_eos=True,
        speculation=SpeculationOptions(enabled=workload.method != NO_METHOD),
    )
