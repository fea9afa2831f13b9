"""Random settings of an `LLM`: models, drafters and limits, and the tiny checkpoints they name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from specdec import LLM, LoRARequest, SamplingParams
from specdec.models.config.model_config import ModelConfig
from specdec.types.control import SpeculationMode
from tests.specdec.adapters import ATTENTION, adapter_dir
from tests.specdec.heads import HEADS
from tests.specdec.models.families import save_family
from tests.specdec.random_requests import STEMS
from tests.specdec.tiny import (
    disturbed_llama_dir,
    shuffled_llama_dir,
    tiny_llama_dir,
    train_tokenizer,
)

_MAX_MODEL_LEN = 200
_LLAMA = "llama"
HYBRIDS = ("qwen3-next", "lfm2", "granite-4", "falcon-h1", "kimi-linear", "jamba")
TARGETS = (*[_LLAMA] * 16, *HYBRIDS, "mistral-window", "gemma2", "qwen3-moe", "deepseek-v3")
LOOKUPS = ("ngram", "suffix", "lookahead")
MODELS = ("draft_model", "other_vocabulary", "pard")
METHODS = (*LOOKUPS, *MODELS, *HEADS)
_MASK = 381


class Checkpoints:
    """Tiny checkpoints in a directory, each written when it is first named."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.target = cache(self._target)
        self.drafter = cache(self._drafter)
        self.adapters = cache(self._adapters)

    def _target(self, family: str) -> Path:
        directory = self._directory / family
        if family == _LLAMA:
            return tiny_llama_dir(directory)
        save_family(directory, family)
        train_tokenizer(383).save_pretrained(directory)
        return directory

    def _drafter(self, family: str, method: str) -> Path:
        """Write what a method drafts with: a head that is fitted to texts, or a changed target."""
        target, directory = self.target(family), self._directory / f"{family}-{method}"
        if method in HEADS:
            return HEADS[method](target, directory, _texts(target))
        directory.mkdir()
        if method == "other_vocabulary":
            return shuffled_llama_dir(self.target(_LLAMA), directory)
        disturbed_llama_dir(target, directory)
        if method == "pard":
            path = directory / "config.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), "pard_token": _MASK}))
        return directory

    def _adapters(self, family: str) -> tuple[LoRARequest, ...]:
        target, root = self.target(family), self._directory / f"{family}-adapters"
        paths = (
            adapter_dir(root / "1", target, seed=1),
            adapter_dir(root / "2", target, seed=2, rank=8, modules=ATTENTION),
        )
        return tuple(LoRARequest(f"a{i}", i, str(path)) for i, path in enumerate(paths, 1))


def _texts(target: Path) -> list[Sequence[int]]:
    """Return texts of a model, which start like those of random requests."""
    sampled = [SamplingParams(temperature=t, seed=0, max_tokens=60) for t in (0.0, 0.7)]
    with LLM(target, speculative_config=None, max_model_len=_MAX_MODEL_LEN) as llm:
        found = [llm.generate([*STEMS], params, use_tqdm=False) for params in sampled]
    return [[*o.prompt_token_ids, *o.outputs[0].token_ids] for part in found for o in part]


@dataclass(frozen=True)
class RandomSettings:
    """Arguments of an `LLM`.

    common: those of both runs. limits: those of the run with drafts alone. speculation: its
    speculative_config. changes: whether it is turned off and on, and its length changed, meanwhile.
    """

    family: str
    method: str
    common: Mapping[str, Any]
    limits: Mapping[str, Any]
    speculation: Mapping[str, Any]
    changes: bool

    @property
    def mode(self) -> SpeculationMode:
        """The first mode: drafts in each step, unless the policy chooses."""
        return "auto" if self.speculation.get("policy") == "goodput" else "on"

    @property
    def has_adapters(self) -> bool:
        """Return whether some requests are for LoRA adapters."""
        return "enable_lora" in self.common

    @classmethod
    def of(cls, random: Random, checkpoints: Checkpoints, method: str = "") -> RandomSettings:
        """Return the next settings of a generator."""
        family = random.choice(TARGETS)
        chosen = random.choice(METHODS)
        method = method or chosen
        if method in ("pard", "mtp", "colocated_draft_model", "other_vocabulary"):
            family = _LLAMA
        speculation = _speculation(random, checkpoints, family, method)
        target = checkpoints.target(family)
        if method == "mtp":
            target = checkpoints.drafter(family, method)
            del speculation["model"]
        common = {"model": str(target), "max_model_len": _MAX_MODEL_LEN, **_common(random, family)}
        limits = _limits(random, ModelConfig.from_directory(target), speculation)
        return cls(family, method, common, limits, speculation, random.random() < 0.4)


def _speculation(
    random: Random, checkpoints: Checkpoints, family: str, method: str
) -> dict[str, Any]:
    name = "draft_model" if method in MODELS else method
    count = random.choice((1, 2, 3, 4, 5, 7))
    found: dict[str, Any] = {
        "method": name,
        "num_speculative_tokens": count,
        "policy": "goodput" if random.random() < 0.1 else "threshold",
    }
    if method not in LOOKUPS:
        found["model"] = str(checkpoints.drafter(family, method))
    if method not in (*MODELS, "lookahead") and random.random() < 0.5:
        found["num_draft_tree_tokens"] = random.choice((count + 1, 12, 24, 60))
    elif random.random() < 0.5:
        found |= random.choice(_LENGTHS)
    found |= _options(random, family, method)
    if method not in LOOKUPS and random.random() < 0.25:
        found["first"] = random.choice(LOOKUPS[:2])
    elif method not in LOOKUPS and random.random() < 0.15:
        found["fallback"] = random.choice(LOOKUPS)
    return found


_LENGTHS: tuple[Mapping[str, Any], ...] = (
    {"adaptive_length": True},
    {"batch_budget": True},
    {"policy": "table", "num_speculative_tokens_per_batch_size": ((1, 1, 1), (2, 8, 0))},
)
_CHOICES = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1))


def _options(random: Random, family: str, method: str) -> dict[str, Any]:
    if method == "ngram":
        return {"prompt_lookup_min": 1, "prompt_lookup_max": random.randint(1, 4)}
    if method == "suffix":
        return {"suffix_decoding_max_spec_factor": random.choice((1.0, 4.0))}
    if method == "lookahead":
        return {"lookahead_window_size": random.choice((1, 3, 8)), "lookahead_ngram_size": 3}
    found: dict[str, Any] = {}
    if method == "pard":
        found["parallel_drafting"] = True
    elif method == "draft_model":
        ahead = ("off", "off", "continuing", "outcomes", "auto")
        found["async_drafting"] = "off" if family in HYBRIDS else random.choice(ahead)
    if random.random() < 0.2:
        found["quantization"] = "int8"
    if method in ("draft_model", "eagle", "eagle3", "dflash") and random.random() < 0.2:
        found["draft_window"] = random.choice((1, 8, 40))
    if method == "draft_model" and random.random() < 0.2:
        found["max_model_len"] = 60
    if method == "medusa" and random.random() < 0.2:
        found |= {"medusa_choices": _CHOICES, "num_draft_tree_tokens": 8}
        found["num_speculative_tokens"] = 3
    return found


_FEW_BITS = ({"quantization": "int8"}, {"quantization": "w8a8"}, {"dtype": "bfloat16"})


def _common(random: Random, family: str) -> dict[str, Any]:
    """Return arguments that may change the model's output.

    Kernels of torch round by the number of rows. Formats of fewer bits enlarge that, by 0.1 in a
    log-probability, so that only the native kernels have them here.
    """
    found: dict[str, Any] = {"dtype": "float32"}
    if random.random() < 0.3:
        found["kernels"] = "torch"
    elif family == _LLAMA and random.random() < 0.4:
        found |= random.choice(_FEW_BITS)
    if random.random() < 0.2:
        found["deterministic"] = found.get("kernels") != "torch" and family == _LLAMA
    if family == _LLAMA and random.random() < 0.25:
        found |= {"enable_lora": True, "max_loras": random.choice((1, 2))}
    return found


def _limits(random: Random, model: ModelConfig, speculation: Mapping[str, Any]) -> dict[str, Any]:
    num_seqs = random.choice((1, 2, 4, 6))
    found: dict[str, Any] = {
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": random.choice((num_seqs + 5, 24, 64, 256)),
        "block_size": random.choice((1, 4, 16)),
        "enable_prefix_caching": random.random() < 0.7,
        "async_scheduling": random.random() < 0.7,
        "stream_interval": random.choice((1, 1, 3)),
    }
    if random.random() < 0.4:
        num_models = 1 if speculation["method"] in LOOKUPS else 3
        num_models *= 4 if model.recurrent else 1
        num_tokens = _MAX_MODEL_LEN * random.choice((1.5, 2, 3)) * num_models
        num_bytes = model.kv_bytes_per_token("float32", 1) * num_tokens
        found["kv_cache_memory_gib"] = num_bytes / 2**30
    return found
