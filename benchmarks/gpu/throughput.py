"""Tokens per second: speculation at a given acceptance against none, and transformers.

The target has the sizes of Llama-3.1-8B and random weights. Drafts are any tokens, of which the
verifier `synthetic` accepts as many as a trained drafter of that accepted length would have.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.gpu.parts import Context, PartSkippedError, Result
from benchmarks.gpu.random_models import LLAMA_8B, SMALL, random_decoder, write_config
from benchmarks.tiny_model import write_tiny_llama
from specdec.config.engine import EngineConfig
from specdec.config.speculative import SpeculativeConfig
from specdec.engine.engine import Engine
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config import ModelConfig
from specdec.models.llama import CausalDecoder
from specdec.sequences.sequence import EngineRequest
from specdec.speculation.proposers.base import DraftRequest, Proposal, SynchronousProposer
from specdec.text.tokenizer import Tokenizer
from specdec.types.sampling_params import SamplingParams
from specdec.worker import LocalTarget, TargetModelRunner
from specdec.worker.step_graphs import CudaGraphs

_BLOCK_SIZE, _MAX_MODEL_LEN = 16, 512
_PROMPT_TOKENS, _MAX_TOKENS = 64, 96
_NUM_DRAFTS, _ACCEPTED_LENGTH = 5, 3.5
_BATCHES = (1, 4, 16, 64, 128, 256)
_COMPILED_LAYERS = 8
_LEAST_GAIN, _LEAST_RATIO = 2.4, 0.98


class AnyTokens(SynchronousProposer):
    """Drafts the same token again and again, at no cost."""

    def release(self, seq_id: int) -> None:
        """See Proposer."""

    def _propose(self, request: DraftRequest) -> Proposal:
        tokens, draft = request.seq.token_ids, (2,) * request.max_tokens
        return Proposal(request.seq.seq_id, len(tokens), tokens[-1], draft)


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

    def _runner(self, decoder: CausalDecoder) -> TargetModelRunner:
        limits = self._limits(SpeculativeConfig.of("ngram", _NUM_DRAFTS))
        runner = TargetModelRunner(
            decoder,
            TensorParallelGroup(),
            num_blocks=limits.num_blocks,
            block_size=_BLOCK_SIZE,
            vocab_size=self.model.vocab_size,
            has_padding_block=True,
        )
        may_capture = self._context.is_gpu and decoder.fits_graphs
        runner.use_device_steps(limits, CudaGraphs(decoder.device) if may_capture else None)
        return runner

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

    def tokens_per_s(self, batch: int, *, drafts: bool, temperature: float = 0.0) -> float:
        """Return the tokens per second of `batch` requests that decode together."""
        speculation = None
        if drafts:
            speculation = SpeculativeConfig.of(
                "ngram",
                _NUM_DRAFTS,
                verifier="synthetic",
                synthetic_acceptance_length=_ACCEPTED_LENGTH,
            )
        limits, proposer = self._limits(speculation), AnyTokens() if drafts else None
        engine = Engine(limits, self.model, self._target, self._tokenizer, proposer)
        for index in range(batch):
            engine.add(_request(index, temperature))
        while engine.stats().num_decoding < batch:  # the prompts are not timed
            engine.step()
        begin, began_at_s = engine.stats().counts.num_generated_tokens, time.perf_counter()
        while engine.has_work:
            engine.step()
        count = engine.stats().counts.num_generated_tokens - begin
        return count / (time.perf_counter() - began_at_s)


def _request(index: int, temperature: float) -> EngineRequest:
    prompt = tuple((index + place) % 250 + 2 for place in range(_PROMPT_TOKENS))
    params = SamplingParams(temperature=temperature, max_tokens=_MAX_TOKENS, ignore_eos=True)
    return EngineRequest(prompt, params, request_id=str(index), seed=index)


def compare_speculation(context: Context) -> Result:
    """Compare five drafts of accepted length 3.5 with no speculation, by batch size."""
    throughput, ratios = Throughput(context), dict[int, float]()
    plain: dict[int, float] = {}
    for batch in throughput.batches:
        throughput.tokens_per_s(batch, drafts=True)  # warm
        plain[batch] = throughput.tokens_per_s(batch, drafts=False)
        ratios[batch] = throughput.tokens_per_s(batch, drafts=True) / plain[batch]
        context.save({"ratios": ratios, "tokens_per_s_without": plain})
    aims = {
        "speculation at batch 1": {"value": ratios[1], "at_least": _LEAST_GAIN},
        "speculation at any batch": {"value": min(ratios.values()), "at_least": _LEAST_RATIO},
    }
    return {
        "ratios": ratios,
        "tokens_per_s_without": plain,
        "accepted_length": _ACCEPTED_LENGTH,
        "aims": aims,
    }


def compare_transformers(context: Context) -> Result:
    """Compare one greedy stream with transformers: a static cache and torch.compile.

    The model has a quarter of the layers, whose compilation takes minutes otherwise.
    """
    throughput = Throughput(context, (1,), _COMPILED_LAYERS)
    throughput.tokens_per_s(1, drafts=False)
    own = throughput.tokens_per_s(1, drafts=False)
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
