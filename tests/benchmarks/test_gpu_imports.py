"""Imports of the GPU check."""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def imported(path):
    """Return the modules that a file imports when it is imported itself."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def file_of(module):
    path = ROOT.joinpath(*module.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((each for each in files if each.is_file()), None)


def all_imported(module):
    """Return the modules that one imports, and those that its own code's modules import."""
    found, pending = set(), [module]
    while pending:
        new = set(imported(file)) if (file := file_of(pending.pop())) else set()
        pending += new - found
        found |= new
    return found


def test_the_check_needs_few_packages():
    """A machine with a GPU may have torch, Triton and transformers, and what they need, alone."""
    engine = "specdec.llm"  # in which `specdec` finds its names when they are first asked for
    modules = all_imported("benchmarks.gpu_check") | {engine, *all_imported(engine)}
    packages = {each.partition(".")[0] for each in modules} - sys.stdlib_module_names
    of_transformers = {"filelock", "huggingface_hub", "numpy", "safetensors", "tokenizers", "tqdm"}
    others = {"llguidance", "psutil"}
    assert packages == {"benchmarks", "specdec", "torch", *of_transformers, *others}
