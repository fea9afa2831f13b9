"""Compilation of a kernel for a GPU that need not be there."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source

from tools.gpu_kernels.report import Resources
from tools.gpu_kernels.variant import Variant
from tools.gpu_kernels.variants import variants

_MAX_PROCESSES = 4
"""Each imports torch and Triton, which takes 500 MB."""


def compile_variant(variant: Variant, architecture: int) -> Resources:
    """Compile a variant; return what it takes, as ptxas reports it."""
    names = variant.kernel.arg_names
    signature = {
        name: "constexpr" if name in variant.constants else variant.types[name] for name in names
    }
    # As at run time: addresses that torch allocates are multiples of 16, and some integers.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith("*") or name in variant.multiples
    }
    source = ASTSource(variant.kernel, signature, dict(variant.constants), aligned)
    target = GPUTarget("cuda", architecture, 32)
    compiled = compile_source(source, target=target, options=dict(variant.options))
    registers, spilled = _ptxas_report(compiled.asm["ptx"])
    return Resources(registers, spilled, compiled.metadata.shared)


def compile_all() -> dict[str, dict[str, Resources]]:
    """Compile all variants, in a process for each core; return resources by name and target."""
    num_processes = min(os.cpu_count() or 1, _MAX_PROCESSES)
    with ProcessPoolExecutor(num_processes, get_context("spawn")) as pool:
        return dict(pool.map(_compile_nth, range(len(_all_variants())), chunksize=4))


@cache
def _all_variants() -> list[Variant]:
    return list(variants())


def _compile_nth(index: int) -> tuple[str, dict[str, Resources]]:
    """Compile a variant by its place among all, since kernels cannot be sent to a process."""
    variant = _all_variants()[index]
    return variant.name, {
        f"sm_{architecture}": compile_variant(variant, architecture)
        for architecture in variant.architectures
    }


def _ptxas_report(ptx: str) -> tuple[int, int]:
    """Return registers per thread and spilled bytes that ptxas reports for a module."""
    found = re.search(r"\.target (\S+)", ptx)
    assert found is not None, ptx[:200]
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "kernel.ptx"
        source.write_text(ptx, encoding="utf-8")
        output = Path(directory) / "kernel.cubin"
        command = [knobs.nvidia.ptxas.path, "-v", f"--gpu-name={found[1]}", source, "-o", output]
        run = subprocess.run(command, check=True, capture_output=True, text=True)
    registers = re.search(r"Used (\d+) registers", run.stderr)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", run.stderr)
    assert registers is not None, run.stderr
    return int(registers[1]), sum(map(int, spills))
