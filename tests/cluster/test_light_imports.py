"""Only the ranks of models import torch, which takes seconds and 200 MB."""

import subprocess
import sys

import pytest

LIST_IMPORTS = (
    "import sys, {module}; print(*sorted({{'torch', 'transformers'}} & set(sys.modules)))"
)
LOAD_TOKENIZER = "import pathlib, specdec.text.tokenizer as t; t.Tokenizer(pathlib.Path({path!r}))"


def run_python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    "module", ["cluster.cli.main", "cluster.serve.startup", "cluster.serve.deployment"]
)
def test_no_torch_without_a_model(module):
    assert run_python(LIST_IMPORTS.format(module=module)) == []


def test_a_tokenizer_is_loaded_without_torch(tiny_model_dir):
    code = (
        f"{LOAD_TOKENIZER.format(path=str(tiny_model_dir))}\n{LIST_IMPORTS.format(module='json')}"
    )
    assert run_python(code) == ["transformers"]
