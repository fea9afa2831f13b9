"""Imports of the GPU check."""

import ast
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


def test_the_check_needs_neither_ray_nor_a_transport():
    """A machine with a GPU may have torch, transformers and triton alone."""
    packages = {each.partition(".")[0] for each in all_imported("benchmarks.gpu_check")}
    assert {"benchmarks", "specdec", "torch"} <= packages
    assert not packages & {"cluster", "fastapi", "grpc", "msgpack", "ray", "zmq"}
