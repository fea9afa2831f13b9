"""Tokens per second: speculation at a given acceptance against none, and transformers.

The target has the sizes of Llama-3.1-8B and random weights. Drafts are any tokens, of which the
verifier `synthetic` accepts as many as a trained drafter of that acceptance length would. Their
number is fixed, and then chosen by the policy of a service, from the costs that it measures.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

import torch

from benchmarks.gpu.parts import Context, PartSkippedError, Result
from benchmarks.gpu.random_models import LLAMA_8B, SMALL, random_decoder, write_config
from benchmarks.tiny_model import write_tiny_llama
from specdec.config.engine import EngineConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.engine import Engine
from specdec.engine.engine_profiler import EngineProfiler
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.llama import CausalDecoder
from specdec.sequences.sequence import EngineRequest
from specdec.speculation.policy.factory import ProfiledModels, make_policy
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.speculation.proposers.base import DraftRequest, Proposal, SynchronousProposer
from specdec.text.tokenizer import Tokenizer
from specdec.types.messages import StepInput, VerifyOutput
from specdec.types.sampling.sampling_params import SamplingParams
from specdec.worker import LoadedModel, LocalTarget, TargetModelRunner
from specdec.worker.device.step_graphs import CudaGraphs

Drafting = Literal["none", "fixed", "policy"]
"""Choice of the number of draft tokens: none, a fixed one, or the policy's."""

_DRAFTINGS: tuple[Drafting, ...] = ("none", "fixed", "policy")
_BLOCK_SIZE, _MAX_MODEL_LEN = 16, 512
_PROMPT_TOKENS, _MAX_TOKENS = 64, 96
_ROUNDS = 3
_NUM_DRAFTS, _ACCEPTED_LENGTH = 5, 3.5
_BATCHES = (1, 4, 16, 64, 128, 256)
_SPECULATION = SpeculativeConfig.of(
    "ngram", _NUM_DRAFTS, verifier="synthetic", synthetic_acceptance_length=_ACCEPTED_LENGTH
)
_COMPILED_LAYERS = 8
_LEAST_GAIN, _LEAST_RATIO = 2.4, 0.98


class AnyTokens(SynchronousProposer):
    """Drafts the same token again and again, at no cost."""

    def release(self, seq_id: int) -> None:
        """See Proposer."""

    def _propose(self, request: DraftRequest) -> Proposal:
        tokens, draft = request.seq.token_ids, (2,) * request.max_tokens
        return Proposal(request.seq.seq_id, len(tokens), tokens[-1], draft)


@dataclass(frozen=True)
class Rate:
    """Tokens per second, and milliseconds of a step.

    engine_ms: outside of the target. begin_ms: in its `begin`, which packs and launches.
    drafts_per_row: draft tokens of a sequence and step.
    """

    tokens_per_s: float
    step_ms: float
    engine_ms: float
    begin_ms: float
    drafts_per_row: float


class _TimedTarget:
    """A target that sums the seconds of its calls."""

    def __init__(self, target: LocalTarget) -> None:
        self._target = target
        self.reset()

    def reset(self) -> None:
        """Forget the seconds so far."""
        self.begin_s = self.collect_s = 0.0

    def begin(self, step: StepInput) -> None:
        """See Target."""
        began_at_s = time.perf_counter()
        self._target.begin(step)
        self.begin_s += time.perf_counter() - began_at_s

    def collect(self) -> VerifyOutput:
        """See Target."""
        began_at_s = time.perf_counter()
        output = self._target.collect()
        self.collect_s += time.perf_counter() - began_at_s
        return output


class Throughput:
    """A random target in this process, and engines on it."""

    def __init__(
        self, context: Context, batches: Sequence[int] = _BATCHES, num_layers: int | None = None
    ) -> None:
        """num_layers: of the target, in place of those of its sizes."""
        self._context = context
        fields = {**(SMALL if context.is_small else LLAMA_8B)}
        if num_layers is not None:
            fields["num_hidden_layers"] = num_layers
        self.batches = (1, 2) if context.is_small else batches
        directory = context.directory / "throughput"
        write_tiny_llama(directory)
        self._tokenizer = Tokenizer(directory)
        self.model: ModelConfig = write_config(directory, fields)
        decoder = random_decoder(
            self.model, context.device, torch.bfloat16, _MAX_MODEL_LEN, _BLOCK_SIZE
        )
        self._target = LocalTarget(self._runner(decoder))
        gc.collect()  # these two as in the processes of a service
        gc.freeze()

    def _runner(self, decoder: CausalDecoder) -> TargetModelRunner:
        limits = self._limits(_SPECULATION)
        may_capture = self._context.is_gpu and decoder.fits_graphs
        return TargetModelRunner(
            LoadedModel(
                decoder, TensorParallelGroup(), self.model.vocab_size, has_padding_block=True
            ),
            limits,
            on_device=True,
            graphs=CudaGraphs(decoder.device) if may_capture else None,
        )

    def _limits(self, speculation: SpeculativeConfig | None) -> EngineConfig:
        most = max(self.batches)
        return EngineConfig(
            max_model_len=_MAX_MODEL_LEN,
            num_blocks=most * _MAX_MODEL_LEN // _BLOCK_SIZE // 2 + _MAX_MODEL_LEN,
            block_size=_BLOCK_SIZE,
            max_num_seqs=most,
            max_num_batched_tokens=2048,
            async_scheduling=self._context.is_gpu,
            speculation=speculation,
        )

    def measure(self, batch: int, drafting: Drafting = "none", temperature: float = 0.0) -> Rate:
        """Measure `batch` requests from when all of them decode until the first one ends."""
        speculation = None if drafting == "none" else _SPECULATION
        limits, proposer = self._limits(speculation), AnyTokens() if speculation else None
        policy, target = self._policy if drafting == "policy" else None, _TimedTarget(self._target)
        engine = Engine(limits, self.model, target, self._tokenizer, proposer, policy)
        for index in range(batch):
            engine.add(_request(index, temperature))
        while engine.stats().num_decoding < batch:  # the prompts are not timed
            engine.step()
        target.reset()
        before, began_at_s = engine.stats().counts, time.perf_counter()
        num_tokens, num_steps = before.num_generated_tokens, before.num_steps
        num_drafts = before.speculation.num_draft_tokens
        while engine.stats().num_decoding == batch:
            engine.step()
        seconds, counts = time.perf_counter() - began_at_s, engine.stats().counts
        steps = counts.num_steps - num_steps
        for index in range(batch):
            engine.abort(str(index))
        while engine.has_work:
            engine.step()
        return Rate(
            tokens_per_s=(counts.num_generated_tokens - num_tokens) / seconds,
            step_ms=seconds / steps * 1e3,
            engine_ms=(seconds - target.begin_s - target.collect_s) / steps * 1e3,
            begin_ms=target.begin_s / steps * 1e3,
            drafts_per_row=(counts.speculation.num_draft_tokens - num_drafts) / steps / batch,
        )

    @cached_property
    def _policy(self) -> SpeculationPolicy | None:
        """The policy of a service, which keeps what it has observed of the batches before."""
        limits = self._limits(_SPECULATION)
        profiler = EngineProfiler(limits, self.model, self._tokenizer)
        models = ProfiledModels(self._target, profiler.measure)
        return make_policy(_SPECULATION.control, limits, models)


def _request(index: int, temperature: float) -> EngineRequest:
    prompt = tuple((index + place) % 250 + 2 for place in range(_PROMPT_TOKENS))
    params = SamplingParams(temperature=temperature, max_tokens=_MAX_TOKENS, ignore_eos=True)
    return EngineRequest(prompt, params, request_id=str(index), seed=index)


def compare_speculation(context: Context) -> Result:
    """Compare drafts of acceptance length 3.5 with no speculation, by batch size.

    `ratios` has those of five drafts in each step, `policy_ratios` those of as many as the policy
    chooses, which is what a service does: medians of rounds in which all three alternate.
    """
    throughput = Throughput(context)
    ratios: dict[int, float] = {}
    policy_ratios: dict[int, float] = {}
    rates: dict[str, dict[int, dict[str, float]]] = {}
    result: Result = {
        "ratios": ratios,
        "policy_ratios": policy_ratios,
        "accepted_length": _ACCEPTED_LENGTH,
        "rates": rates,
    }
    for batch in throughput.batches:
        throughput.measure(batch, "fixed")  # warm
        rounds = [
            {drafting: throughput.measure(batch, drafting) for drafting in _DRAFTINGS}
            for _ in range(_ROUNDS)
        ]
        for drafting in _DRAFTINGS:
            found = sorted((each[drafting] for each in rounds), key=lambda rate: rate.tokens_per_s)
            rates.setdefault(drafting, {})[batch] = asdict(found[_ROUNDS // 2])
        ratios[batch] = _median_ratio(rounds, "fixed")
        policy_ratios[batch] = _median_ratio(rounds, "policy")
        result["aims"] = {
            "speculation at batch 1": {"value": ratios[1], "at_least": _LEAST_GAIN},
            "speculation at any batch": {
                "value": min(policy_ratios.values()),
                "at_least": _LEAST_RATIO,
            },
        }
        context.save(result)
    return result


def _median_ratio(rounds: Sequence[Mapping[Drafting, Rate]], drafting: Drafting) -> float:
    """Return the median over rounds of a rate as a multiple of that without drafts."""
    return statistics.median(
        each[drafting].tokens_per_s / each["none"].tokens_per_s for each in rounds
    )


def compare_transformers(context: Context) -> Result:
    """Compare one greedy stream with transformers: a static cache and torch.compile.

    The model has a quarter of the layers, whose compilation takes minutes otherwise.
    """
    throughput = Throughput(context, (1,), _COMPILED_LAYERS)
    throughput.measure(1)
    own = throughput.measure(1).tokens_per_s
    context.save({"specdec": own, "num_layers": _COMPILED_LAYERS, "passed": False})
    del throughput
    if context.is_gpu:
        torch.cuda.empty_cache()
    reference = _transformers_tokens_per_s(context)
    return {
        "specdec": own,
        "transformers": reference,
        "ratio": own / reference,
        "num_layers": _COMPILED_LAYERS,
    }


@torch.inference_mode()
def _transformers_tokens_per_s(context: Context) -> float:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise PartSkippedError(f"transformers is not installed: {error}") from error
    config = AutoConfig.from_pretrained(context.directory / "throughput")
    with torch.device(context.device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    # With a static cache on a GPU, `generate` compiles the decode step in mode reduce-overhead.
    model.generation_config.cache_implementation = "static"
    prompt = torch.arange(2, 2 + _PROMPT_TOKENS, device=context.device)[None]

    def generate(count: int) -> float:
        began_at_s = time.perf_counter()
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        model.generate(prompt, pad_token_id=0, **options)
        if context.is_gpu:
            torch.cuda.synchronize(context.device)
        return time.perf_counter() - began_at_s

    generate(_MAX_TOKENS)
    generate(2)
    return (_MAX_TOKENS - 2) / (generate(_MAX_TOKENS) - generate(2))
