"""Logits, attention and tokens of whole models against references, in all data types.

They run on a random Llama and on the given model: logits of the decoder against transformers (eager
attention), paged attention against dense attention, and tokens with n-gram speculation against
tokens without. A share of the tokens may differ, because two tokens whose scores are equal within
rounding may swap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.parts import Case, Context, Result, run_cases
from benchmarks.gpu_steps import StepTimes, measure_steps
from benchmarks.tiny_model import write_tiny_llama
from specdec.config.engine import DTypeName, EngineConfig, Kernels
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.engine import Engine
from specdec.kernels import PagedAttention
from specdec.kernels.reference.forward_batch import Chunk, ForwardBatch
from specdec.kernels.reference.triton_availability import triton_fault
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.dtypes import DTYPES
from specdec.models.llama import CausalDecoder
from specdec.models.loading import load_model
from specdec.sequences.sequence import EngineRequest
from specdec.text.tokenizer import Tokenizer
from specdec.types.sampling.sampling_params import SamplingParams
from specdec.types.sharding import HeadShard
from specdec.worker import LoadedModel, LocalTarget, TargetModelRunner

_BLOCK_SIZE = 16
_MAX_MODEL_LEN = 256
_NUM_PROMPTS, _PROMPT_TOKENS, _MAX_TOKENS = 8, 24, 64

# Maximum relative error (norm of the difference over norm of the reference), and maximum share of
# prompts whose tokens differ. bfloat16 has 8 bits, so ties are common there.
_MAX_ERROR: dict[DTypeName, float] = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 1e-2}
_MAX_DIFFERING: dict[DTypeName, float] = {"float32": 0.125, "bfloat16": 0.5, "float16": 0.375}


@dataclass(frozen=True)
class Check:
    """Comparison whose `value` must not exceed `limit`."""

    name: str
    model: str
    dtype: DTypeName
    value: float
    limit: float

    @property
    def passed(self) -> bool:
        """Return whether the value is within its limit; NaN is not."""
        return self.value <= self.limit


def check_models(context: Context) -> Result:
    """Compare logits, attention and tokens of all models with references, on all kernels."""
    cases: list[Case] = [
        (f"attention, {dtype}", partial(_case, check_attention, dtype, context.device))
        for dtype in DTYPES
    ]
    kernels: list[Kernels] = ["torch"]
    if triton_fault(context.device) is None:
        kernels.insert(0, "triton")
    for directory in _models(context):
        cases += [
            (
                f"{directory.name}, {dtype}, {kind}",
                partial(_case, check_model, directory, dtype, context.device, kind),
            )
            for kind in kernels
            for dtype in DTYPES
        ]
    return run_cases(cases, context)


def _case(run: Callable[..., Check | list[Check]], *arguments: Any) -> Result:
    """Return the checks that a function makes as the result of a case."""
    found = run(*arguments)
    checks = found if isinstance(found, list) else [found]
    return {
        "passed": all(each.passed for each in checks),
        "checks": [asdict(each) for each in checks],
    }


def measure_models(context: Context) -> Result:
    """Measure a decode step and an 8-row verification of all models."""
    return {
        "steps": [
            measure(directory, dtype, context.device)
            for directory in _models(context)
            for dtype in DTYPES
        ]
    }


def _models(context: Context) -> list[Path]:
    tiny = context.directory / "tiny-llama"
    if not tiny.exists():
        write_tiny_llama(tiny)
    return [tiny] if context.model is None else [tiny, context.model]


def check_model(
    directory: Path, dtype: DTypeName, device: torch.device, kernels: Kernels = "torch"
) -> list[Check]:
    """Compare logits with transformers, and tokens with speculation to tokens without."""
    model = _load(directory, dtype, device, kernels)
    error = relative_error(
        _logits(model, _prompt(model, 0)), _reference(directory, dtype, device, _prompt(model, 0))
    )
    differing = _share_differing(directory, model)
    name = directory.name
    return [
        Check("logits", name, dtype, error, _MAX_ERROR[dtype]),
        Check("speculation", name, dtype, differing, _MAX_DIFFERING[dtype]),
    ]


@torch.inference_mode()
def check_attention(dtype: DTypeName, device: torch.device) -> Check:
    """Compare a prefill of 40 tokens into scattered blocks with dense attention."""
    num_tokens, heads, kv_heads, head_dim = 40, 8, 2, 64
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device=device, dtype=DTYPES[dtype])

    query, kv = normal(num_tokens, heads, head_dim), normal(num_tokens, 2, kv_heads, head_dim)
    cache = normal(8 * _BLOCK_SIZE, 2, kv_heads, head_dim)
    batch = _prefill([0] * num_tokens, blocks=(5, 0, 3))
    (shard,) = HeadShard.all_ranks(heads, kv_heads, 1)
    attention = PagedAttention(shard, head_dim, _BLOCK_SIZE, device)
    attended = attention.run(query, kv, cache, attention.plan(batch, DTYPES[dtype]))
    keys, values = kv.float().repeat_interleave(heads // kv_heads, dim=2).unbind(1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) / head_dim**0.5
    future = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    dense = torch.einsum("hqk,khd->qhd", weights, values)
    error = relative_error(attended, dense)
    return Check("attention", "random", dtype, error, _MAX_ERROR[dtype])


def measure(directory: Path, dtype: DTypeName, device: torch.device) -> dict[str, Any]:
    """Measure a decode step, an 8-row verification and the memory floor."""
    times: StepTimes = measure_steps(_runner(_load(directory, dtype, device)))
    return {"model": directory.name, "dtype": dtype, **asdict(times)}


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm of the expected tensor."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def _load(
    directory: Path, dtype: DTypeName, device: torch.device, kernels: Kernels = "torch"
) -> CausalDecoder:
    config = ModelConfig.from_directory(directory)
    model = load_model(
        directory,
        config,
        TensorParallelGroup(),
        dtype=DTYPES[dtype],
        max_model_len=_MAX_MODEL_LEN,
        block_size=_BLOCK_SIZE,
        device=device,
        kernels=kernels,
    )
    assert isinstance(model, CausalDecoder)
    return model


def _runner(model: CausalDecoder) -> TargetModelRunner:
    num_blocks = _NUM_PROMPTS * _MAX_MODEL_LEN // _BLOCK_SIZE
    limits = EngineConfig(_MAX_MODEL_LEN, num_blocks, _BLOCK_SIZE)
    loaded = LoadedModel(model, TensorParallelGroup(), len(model.vocab_slice))
    return TargetModelRunner(loaded, limits)


@torch.inference_mode()
def _logits(model: CausalDecoder, prompt: list[int]) -> Tensor:
    """Return the logits [num_tokens, vocab_size] of one prefill."""
    cache = model.new_kv_cache(_MAX_MODEL_LEN)
    batch = _prefill(prompt, range(-(-len(prompt) // _BLOCK_SIZE)))
    return model.compute_logits(model.forward(batch, cache))


@torch.inference_mode()
def _reference(
    directory: Path, dtype: DTypeName, device: torch.device, prompt: list[int]
) -> Tensor:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=DTYPES[dtype], attn_implementation="eager"
    )
    logits: Tensor = model.to(device)(torch.tensor([prompt], device=device)).logits[0]
    return logits


def _prefill(prompt: list[int], blocks: Sequence[int]) -> ForwardBatch:
    return ForwardBatch([Chunk(prompt, 0, blocks)], _BLOCK_SIZE)


def _share_differing(directory: Path, model: CausalDecoder) -> float:
    """Return the share of prompts, half greedy and half sampled, whose tokens differ.

    Raises AssertionError if nothing was drafted.
    """
    plain, plain_drafts = _generate(directory, model, None)
    drafted, num_drafts = _generate(
        directory, model, SpeculativeConfig.of(num_speculative_tokens=7)
    )
    assert plain_drafts == 0, "drafts without speculation"
    assert num_drafts > 0, "speculation drafted nothing, so there is nothing to compare"
    return sum(plain[name] != drafted[name] for name in plain) / len(plain)


def _generate(
    directory: Path, model: CausalDecoder, speculation: SpeculativeConfig | None
) -> tuple[dict[str, list[int]], int]:
    """Return the tokens by request, and the number of verified drafts."""
    runner = _runner(model)
    config = EngineConfig(
        max_model_len=_MAX_MODEL_LEN,
        num_blocks=runner.kv_cache.shape[1] // _BLOCK_SIZE,
        block_size=_BLOCK_SIZE,
        speculation=speculation,
    )
    tokenizer = Tokenizer(directory)
    engine = Engine(config, ModelConfig.from_directory(directory), LocalTarget(runner), tokenizer)
    for index in range(_NUM_PROMPTS):
        engine.add(_request(model, index))
    tokens: dict[str, list[int]] = {str(index): [] for index in range(_NUM_PROMPTS)}
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id].extend(output.token_ids)
    return tokens, engine.stats().counts.speculation.num_drafts


def _request(model: CausalDecoder, index: int) -> EngineRequest:
    params = SamplingParams(
        temperature=0.8 * (index % 2), top_p=0.95, max_tokens=_MAX_TOKENS, ignore_eos=True
    )
    return EngineRequest(tuple(_prompt(model, index)), params, request_id=str(index), seed=index)


def _prompt(model: CausalDecoder, index: int) -> list[int]:
    """Return the same random tokens twice, so that n-gram lookup finds matches."""
    generator = torch.Generator().manual_seed(index)
    half = torch.randint(0, len(model.vocab_slice), (_PROMPT_TOKENS // 2,), generator=generator)
    return half.tolist() * 2
