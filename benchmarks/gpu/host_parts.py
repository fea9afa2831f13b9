"""Parts that need no GPU: tests of the kernels, their compilation, memory plans, counts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu.parts import Context, PartSkippedError, Result
from benchmarks.gpu.random_models import LLAMA_1B, LLAMA_8B, write_config
from specdec.config.llm import LLMConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.memory.gpu_workspace import gpu_workspace_bytes
from specdec.engine.memory.memory_plan import memory_plan
from specdec.engine.models.model_resolution import Models
from specdec.types.errors import OutOfMemoryError

_GIB = 2**30
_GPU_BYTES = {"L4, 24 GB": 22, "A100, 40 GB": 39, "H100, 80 GB": 78, "H200, 141 GB": 139}
"""GiB that a process finds free on an otherwise empty GPU."""
_TIMEOUT_S = 600
_TRITON = (3, 7)
_TEST_PACKAGES = ("pytest", "hypothesis", "xdist")
_ROOT = Path(__file__).parent.parent.parent
_KERNEL_TESTS = "tests/specdec/kernels/triton"
_COUNT_TESTS = "tests/specdec/worker/device/test_step_counts.py"
_MAX_OUTPUT_CHARS = 2000
_PYTEST = ("-q", "-o", "addopts=--import-mode=importlib", "-o", "minversion=8", "-m", "not slow")
"""Without the settings of plugins that a machine with a GPU may lack."""


def run_kernel_tests(context: Context) -> Result:
    """Run the tests of the kernels: in Triton's interpreter, which needs no GPU."""
    del context
    tests = _required(_KERNEL_TESTS, "triton", *_TEST_PACKAGES)
    found = import_module("triton").__version__
    if tuple(map(int, found.split(".")[:2])) < _TRITON:
        raise PartSkippedError(f"the tests need Triton {_TRITON[0]}.{_TRITON[1]}, not {found}")
    return _run("pytest", *_PYTEST, tests)


def compile_kernels(context: Context) -> Result:
    """Compile every kernel for sm_80 and sm_90, and check registers, spills and shared memory."""
    del context
    _required("tools/gpu_kernels", "triton")
    return _run("tools.gpu_kernels", "check")


def count_operators(context: Context) -> Result:
    """Run the tests that count a step's operators and copies, and find values the host reads."""
    del context
    return _run("pytest", *_PYTEST, _required(_COUNT_TESTS, *_TEST_PACKAGES))


def plan_memory(context: Context) -> Result:
    """Plan an 8B model in bfloat16, alone and with a 1B draft model beside it, on common GPUs."""
    target = write_config(context.directory / "8b", LLAMA_8B)
    draft = write_config(context.directory / "1b", LLAMA_1B)
    alone = LLMConfig(model="8b", device="cuda", dtype="bfloat16", max_model_len=8192)
    shared = LLMConfig(
        model="8b",
        device="cuda",
        dtype="bfloat16",
        max_model_len=8192,
        speculative_config=SpeculativeConfig.of("draft_model", 5, share_gpu=True),
    )
    plans = {
        name: {
            "workspace_gib": round(gpu_workspace_bytes(alone, target, drafts=False) / _GIB, 2),
            "tokens_alone": _num_tokens(alone, Models(target), size),
            "tokens_with_draft": _num_tokens(shared, Models(target, draft), size),
        }
        for name, size in _GPU_BYTES.items()
    }
    return {"plans": plans}


def _num_tokens(config: LLMConfig, models: Models, gib: int) -> int | str:
    """Return the tokens of KV of the target, or why it does not fit."""
    try:
        plan = memory_plan(config, models, int(gib * _GIB * config.gpu_memory_utilization))
    except OutOfMemoryError as error:
        return str(error)
    return plan.engine.num_blocks * plan.engine.block_size


def _required(path: str, *packages: str) -> str:
    """Return a path of the repository; skip the part where it or a package is missing."""
    for name in packages:
        if find_spec(name) is None:
            raise PartSkippedError(f"the package {name} is not installed")
    if not (_ROOT / path).exists():
        raise PartSkippedError(f"{path} does not exist")
    return path


def _run(module: str, *arguments: str) -> Result:
    """Run a module in a process; it passes if its exit code is 0."""
    command: Sequence[str] = (sys.executable, "-m", module, *arguments)
    try:
        done = subprocess.run(
            command, cwd=_ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"passed": False, "output": f"not done within {_TIMEOUT_S} s"}
    output = (done.stdout + done.stderr).strip()
    summary = output.splitlines()[-1] if output else ""
    is_passed = done.returncode == 0
    return {
        "passed": is_passed,
        "command": " ".join(("python", "-m", module, *arguments)),
        "output": summary if is_passed else output[-_MAX_OUTPUT_CHARS:],
    }
