"""Only the ranks of models import torch, which takes seconds and 200 MB, and they little else."""

import subprocess
import sys

LIGHT = [
    "cluster.cli.main",
    "cluster.cli.generate",
    "cluster.cli.serve",
    "cluster.serve.startup",
    "cluster.serve.application",
]
IMPORT_EACH = """
import importlib, sys
for name in {names}:
    importlib.import_module(name)
    print(*(f"{{heavy}}:{{name}}" for heavy in {heavy} if heavy in sys.modules))
"""
MODELS = ("torch", "transformers")
SERVICE = ("transformers", "huggingface_hub", "pydantic", "fastapi", "specdec.engine")
LOAD_TOKENIZER = "import pathlib, specdec.text.tokenizer as t; t.Tokenizer(pathlib.Path({path!r}))"


def run_python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_no_torch_without_a_model():
    assert run_python(IMPORT_EACH.format(names=LIGHT, heavy=MODELS)) == []


def test_a_tokenizer_is_loaded_without_torch(tiny_model_dir):
    code = LOAD_TOKENIZER.format(path=str(tiny_model_dir)) + IMPORT_EACH.format(
        names=["json"], heavy=MODELS
    )
    assert run_python(code) == ["transformers:json"]


def test_a_rank_starts_without_what_only_a_service_needs():
    """The time to replace a lost rank is mostly that of its imports."""
    names = ["cluster.workers.rank.worker"]
    assert run_python(IMPORT_EACH.format(names=names, heavy=SERVICE)) == []
