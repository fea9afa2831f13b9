"""Check the engine on a GPU, and measure its steps against the memory floor, part by part.

`python -m benchmarks.gpu_check [--model DIR] [--peer-url URL] [--output FILE] [--minutes 25]
[--only PART ...]`

Each part (`benchmarks/gpu/`) runs in a separate process, for a limited time. Those that measure
no times run side by side. The report is written after each of them, with what a part that failed or
was stopped had found; a run that was interrupted, or had no time left, is continued by the same
command. Without a GPU the parts run that need none, and the report states why the others were
skipped. Nothing uses the network. A summary is printed last; the exit status is 1 if a check
failed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.checks import check_models, measure_models
from benchmarks.gpu.determinism import measure_deterministic
from benchmarks.gpu.device_kernels import (
    check_attention_kernels,
    check_row_kernels,
    check_sampling_kernels,
    check_verification_kernels,
)
from benchmarks.gpu.drafting import measure_draft_model, measure_head
from benchmarks.gpu.equality import (
    compare_drafters,
    compare_features,
    compare_formats,
    compare_graphs,
    compare_ngram,
)
from benchmarks.gpu.expert_kernels import check_expert_kernels
from benchmarks.gpu.extras import check_edits, measure_extras
from benchmarks.gpu.format_kernels import check_format_kernels
from benchmarks.gpu.formats import measure_formats
from benchmarks.gpu.host_parts import (
    compile_kernels,
    count_operators,
    plan_memory,
    run_kernel_tests,
)
from benchmarks.gpu.hybrid import check_recurrent_kernels, measure_hybrid
from benchmarks.gpu.lora_kernels import check_lora_kernels
from benchmarks.gpu.mixture import measure_mixture
from benchmarks.gpu.page import page, summary
from benchmarks.gpu.parts import Context, Part, PartReport, Run, run_parts
from benchmarks.gpu.processes import ForkedPart, forked
from benchmarks.gpu.prompts import measure_prompts
from benchmarks.gpu.ranks import compare_ranks
from benchmarks.gpu.service import measure_service
from benchmarks.gpu.steps import measure_grid, measure_main_steps
from benchmarks.gpu.throughput import compare_speculation, compare_transformers
from benchmarks.gpu.trees import measure_trees
from benchmarks.report_file import DOCS, write_text
from specdec.kernels.reference.triton_availability import triton_fault


def _gpu_check(name: str, run: Run, limit_s: float = 75.0) -> Part:
    """Return a part that checks values on a GPU, beside others of its kind."""
    return Part(name, run, needs_gpu=True, limit_s=limit_s, is_timed=False)


def _measurement(name: str, run: Run, limit_s: float, least_s: float = 0.0) -> Part:
    """Return a part that measures times on a GPU."""
    return Part(name, run, needs_gpu=True, limit_s=limit_s, least_s=least_s)


PARTS = (
    _gpu_check("attention kernels", partial(check_attention_kernels, dtypes=(torch.bfloat16,))),
    _gpu_check(
        "attention kernels, other types",
        partial(check_attention_kernels, dtypes=(torch.float16, torch.float32)),
    ),
    _gpu_check("row kernels", check_row_kernels),
    _gpu_check("format kernels", check_format_kernels),
    _gpu_check("sampling kernels", check_sampling_kernels),
    _gpu_check("logit edits", check_edits),
    _gpu_check("verification kernels", check_verification_kernels),
    _gpu_check("LoRA kernels", check_lora_kernels),
    _gpu_check("expert kernels", check_expert_kernels),
    _gpu_check("recurrent kernels", check_recurrent_kernels),
    _gpu_check("graphs", compare_graphs),
    Part("checks", check_models, is_timed=False),
    Part("equality of n-gram", compare_ngram, is_timed=False),
    Part("equality of drafters", compare_drafters, is_timed=False),
    Part("equality of features", compare_features, is_timed=False),
    Part("equality of formats", compare_formats, is_timed=False),
    _measurement("ranks", compare_ranks, 120.0),
    _measurement("main steps", measure_main_steps, 100.0),
    _measurement("prompts", measure_prompts, 60.0),
    _measurement("trees", measure_trees, 60.0),
    _measurement("penalties, grammars, log-probabilities", measure_extras, 45.0),
    _measurement("draft head", measure_head, 50.0),
    _measurement("draft model", measure_draft_model, 40.0),
    _measurement("speculation", compare_speculation, 90.0),
    _measurement("deterministic", measure_deterministic, 75.0),
    _measurement("number formats", measure_formats, 120.0, 70.0),
    _measurement("mixture of experts", measure_mixture, 60.0, 25.0),
    _measurement("hybrid", measure_hybrid, 60.0, 25.0),
    _measurement("grid", measure_grid, 240.0, 90.0),
    _measurement("service", measure_service, 300.0, 150.0),
    _measurement("transformers", compare_transformers, 150.0, 60.0),
    Part("steps", measure_models),
    Part("memory plans", plan_memory, is_timed=False),
    Part("counts", count_operators, is_timed=False, limit_s=300.0, least_s=90.0),
    Part("compilation", compile_kernels, is_timed=False, limit_s=600.0, least_s=300.0),
    Part("kernels", run_kernel_tests, is_timed=False, limit_s=600.0, least_s=200.0),
)
"""In the order in which they run: kernels, whole engine, costs, and last what needs no GPU."""


def main(arguments: list[str] | None = None) -> int:
    """Run the parts and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu_check", description="Check the engine on a GPU, and measure its steps."
    )
    parser.add_argument("--model", type=Path, help="directory of a real model to check as well")
    parser.add_argument(
        "--peer-url", help="another service with the same model, to compare: http://HOST:PORT"
    )
    parser.add_argument("--minutes", type=float, default=25.0, help="limit of a run (default: 25)")
    names = [part.name for part in PARTS]
    parser.add_argument("--only", nargs="+", choices=names, help="parts to run (default: all)")
    parser.add_argument(
        "--output",
        type=Path,
        help="JSON file (default: docs/benchmarks/gpu-check.json on a GPU, else none)",
    )
    options = parser.parse_args(arguments)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive a fork
    with tempfile.TemporaryDirectory() as directory:
        gpu = forked(_gpu_name, Path(directory))
        device = torch.device("cpu" if gpu is None else "cuda")
        if triton_fault(device) is None:
            import_module("specdec.kernels.triton.attention")  # once for all parts
        path = options.output or (None if gpu is None else DOCS / "gpu-check.json")
        report = PartReport(path, _head(gpu or device.type, options.model))
        chosen = [part for part in PARTS if options.only is None or part.name in options.only]
        context = Context(device, Path(directory), options.model, options.peer_url)
        run_parts(chosen, context, report, options.minutes * 60, start=ForkedPart)
    if path is not None:
        write_text(path.with_suffix(".md"), page(report))
    print("\n".join(summary(report)))
    return 0 if report.passed else 1


def _gpu_name() -> str | None:
    """Return the name of the GPU, None without one; initializes CUDA."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _head(device: str, model: Path | None) -> dict[str, Any]:
    """Return what a report is about: a run of anything else begins again."""
    return {
        "device": device,
        "torch": torch.__version__,
        "source": _source_digest(),
        "model": None if model is None else model.name,
    }


def _source_digest() -> str:
    """Return a digest of the code that is measured."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for folder in ("specdec", "benchmarks/gpu"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
