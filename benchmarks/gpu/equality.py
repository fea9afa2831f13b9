"""Tokens end to end: every method and request feature, with drafts against without, on the device.

In float32 on a random model. A share of the requests may differ, because two tokens whose scores
are equal within rounding may swap between two shapes of a product.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.parts import Context, Result, run_cases, share_differing
from benchmarks.random_heads import HEADS
from benchmarks.tiny_model import write_tiny_llama
from specdec import LLM, SamplingParams
from specdec.config.kv_cache import KVCacheDType
from specdec.config.quantization import QuantizationMethod
from specdec.llm.prompts import TokensPrompt
from specdec.models.config.model_config import ModelConfig
from specdec.types.sampling.sampling_params import StructuredOutput

_NUM_PROMPTS, _HALF_TOKENS, _MAX_TOKENS = 8, 12, 40
_MAX_DIFFERING = 0.125
_SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
_BLOCK_SIZE = 16
_FEW_BLOCKS = 20
_KV_GIB = 0.25


@dataclass(frozen=True)
class Case:
    """One comparison.

    speculation: keys of speculative_config. params: of the requests. head: kind of a random head.
    window: of the target's attention. is_tight: whether the KV pool is too small for all requests.
    kv_cache_dtype: of both models; quantization: of the target. That without drafts has the same.
    """

    name: str
    speculation: Mapping[str, Any]
    params: Mapping[str, Any] = field(default_factory=dict)
    head: str | None = None
    window: int | None = None
    is_tight: bool = False
    kv_cache_dtype: KVCacheDType = "auto"
    quantization: QuantizationMethod | None = None
    needs_gpu: bool = False


_LOOKUP = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}


def cases() -> Iterator[Case]:
    """Yield all cases."""
    for count in range(1, 9):
        yield Case(f"ngram, k {count}", {**_LOOKUP, "num_speculative_tokens": count})
    for method in ("suffix", "lookahead", "draft_model"):
        yield Case(method, {"method": method, "num_speculative_tokens": 4})
    for name in ("eagle3", "dspark", "medusa"):
        yield Case(f"head {name}", {"method": name, "num_speculative_tokens": 4}, head=name)
    yield Case("tree", {**_LOOKUP, "num_draft_tree_tokens": 8})
    for name in ("eagle3", "medusa"):
        trees = {"method": name, "num_speculative_tokens": 4, "num_draft_tree_tokens": 12}
        yield Case(f"trees of {name}", trees, head=name)
    large = {"method": "eagle3", "num_speculative_tokens": 5, "num_draft_tree_tokens": 60}
    sampled = {"temperature": 0.9, "top_p": 0.95}
    yield Case("large trees of eagle3, sampled", large, sampled, head="eagle3")
    for verifier in ("rejection", "block"):
        yield Case(verifier, {**_LOOKUP, "verifier": verifier}, {"temperature": 0.0})
    schema = StructuredOutput(json_schema=json.dumps(_SCHEMA))
    yield Case("grammar", _LOOKUP, {"structured_output": schema, "ignore_eos": False})
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1}
    yield Case("penalties", _LOOKUP, penalties)
    yield Case("log-probabilities", _LOOKUP, {"logprobs": 3})
    yield Case("truncation", _LOOKUP, {"temperature": 1.0, "top_p": 0.9, "top_k": 20})
    yield Case("window", _LOOKUP, window=24)
    yield Case("preemption", _LOOKUP, is_tight=True)
    yield Case("KV in fp8", _LOOKUP, kv_cache_dtype="fp8")
    eagle3 = {"method": "eagle3", "num_speculative_tokens": 4, "num_draft_tree_tokens": 8}
    yield Case("trees with KV in fp8", eagle3, head="eagle3", kv_cache_dtype="fp8_e5m2")
    yield Case("target in int4", _LOOKUP, quantization="int4", needs_gpu=True)
    yield Case("target in int8", _LOOKUP, quantization="int8", needs_gpu=True)
    draft = {"method": "draft_model", "num_speculative_tokens": 4, "quantization": "int4"}
    yield Case("draft model in int4", draft, needs_gpu=True)


NGRAM = tuple(f"ngram, k {count}" for count in range(1, 9))
DRAFTERS = (
    *("suffix", "lookahead", "draft_model", "head eagle3", "head dspark", "head medusa"),
    *("tree", "trees of eagle3", "trees of medusa", "large trees of eagle3, sampled"),
    *("rejection", "block"),
)
FEATURES = ("grammar", "penalties", "log-probabilities", "truncation", "window", "preemption")
FORMATS = (
    *("KV in fp8", "trees with KV in fp8"),
    *("target in int4", "target in int8", "draft model in int4"),
)


def compare_ngram(context: Context) -> Result:
    """Compare n-gram drafts of each length."""
    return _compare_all(context, NGRAM)


def compare_drafters(context: Context) -> Result:
    """Compare the other methods and verifiers: lookups, a draft model, heads, a tree."""
    return _compare_all(context, DRAFTERS)


def compare_features(context: Context) -> Result:
    """Compare n-gram drafts of requests with each feature, and of other attention and memory."""
    return _compare_all(context, FEATURES)


def compare_formats(context: Context) -> Result:
    """Compare drafts of targets with other number formats, against the same target without."""
    return _compare_all(context, FORMATS)


def _compare_all(context: Context, names: Sequence[str]) -> Result:
    """Run the cases of these names; one fails where more than an eighth of the requests differ."""
    directory = write_tiny_llama(context.directory / f"equality-{os.getpid()}")
    plain_of: dict[str, list[tuple[int, ...]]] = {}

    def run(case: Case) -> Result:
        key = repr(
            (case.params, case.window, case.is_tight, case.kv_cache_dtype, case.quantization)
        )
        if key not in plain_of:
            plain_of[key], _ = _generate(case, directory, context, drafts=False)
        return _compare(plain_of[key], case, directory, context)

    step = 5 if context.is_small else 1
    chosen = [
        case for case in cases() if case.name in names and (context.is_gpu or not case.needs_gpu)
    ]
    return run_cases([(case.name, partial(run, case)) for case in chosen[::step]], context)


def compare_graphs(context: Context) -> Result:
    """Compare tokens of steps that are graphs with those of steps launched by operators."""
    directory = write_tiny_llama(context.directory / "graphs")
    case = Case("graphs", _LOOKUP)
    found, _ = _generate(case, directory, context, drafts=True)
    expected, _ = _generate(case, directory, context, drafts=True, enforce_eager=True)
    differing = share_differing(found, expected)
    return {"passed": differing <= _MAX_DIFFERING, "differing": differing}


def _compare(plain: list[tuple[int, ...]], case: Case, directory: Path, context: Context) -> Result:
    drafted, num_drafts = _generate(case, directory, context, drafts=True)
    differing = share_differing(plain, drafted)
    is_passed = num_drafts > 0 and differing <= _MAX_DIFFERING
    return {"passed": is_passed, "differing": differing, "num_drafts": num_drafts}


def _generate(
    case: Case, directory: Path, context: Context, *, drafts: bool, **settings: Any
) -> tuple[list[tuple[int, ...]], int]:
    """Return the tokens of each request, and the number of drafts."""
    model = _with_window(directory, case.window)
    if context.is_gpu:  # other parts have the rest
        settings["kv_cache_memory_gib"] = _KV_GIB
    if case.kv_cache_dtype != "auto":
        settings["kv_cache_dtype"] = case.kv_cache_dtype
        settings["kernels"] = "auto" if context.is_gpu else "torch"
    if case.quantization is not None:
        settings["quantization"] = case.quantization
    if case.is_tight:
        config = ModelConfig.from_directory(model)
        pool = _FEW_BLOCKS * _BLOCK_SIZE * config.kv_bytes_per_token("float32", 1)
        settings |= {"kv_cache_memory_gib": pool / 2**30, "max_model_len": 128}
    with LLM(
        str(model),
        device=context.device.type,
        dtype="float32",
        max_num_seqs=_NUM_PROMPTS,
        block_size=_BLOCK_SIZE,
        speculative_config=_speculation(case, model) if drafts else None,
        **settings,
    ) as llm:
        prompts = [TokensPrompt(prompt_token_ids=_prompt(index)) for index in range(_NUM_PROMPTS)]
        outputs = llm.generate(prompts, [_params(case, index) for index in range(_NUM_PROMPTS)])
    tokens = [tuple(output.outputs[0].token_ids) for output in outputs]
    return tokens, sum(output.speculation.num_drafts for output in outputs)


def _speculation(case: Case, model: Path) -> dict[str, Any]:
    keys = {"policy": "threshold", **case.speculation}
    if case.head is not None:
        head = model.with_name(f"{model.name}-{case.head}")
        if not head.exists():
            torch.manual_seed(0)
            HEADS[case.head](head, ModelConfig.from_directory(model))
        keys["model"] = str(head)
    elif case.speculation["method"] == "draft_model":
        keys["model"] = str(model)
    return keys


def _with_window(directory: Path, window: int | None) -> Path:
    """Return a model with a sliding window: the same weights as a Mistral."""
    if window is None:
        return directory
    model = directory.with_name(f"{directory.name}-window")
    if not model.exists():
        shutil.copytree(directory, model)
        config = json.loads((model / "config.json").read_text())
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
        (model / "config.json").write_text(json.dumps(config | {"sliding_window": window}))
    return model


def _params(case: Case, index: int) -> SamplingParams:
    """Return the parameters of a request, half of which are greedy."""
    values = {"temperature": 0.8 * (index % 2), "max_tokens": _MAX_TOKENS, "ignore_eos": True}
    return SamplingParams(seed=index, **{**values, **case.params})


def _prompt(index: int) -> list[int]:
    """Return the same random bytes twice, so that lookups find matches."""
    generator = torch.Generator().manual_seed(index)
    half = torch.randint(2, 258, (_HALF_TOKENS,), generator=generator)
    return half.tolist() * 2
