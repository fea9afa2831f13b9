"""Imports without torch, which costs seconds and 200 MB and is needed by ranks only."""

import subprocess
import sys

import pytest

ASK = "import sys, {module}; print(*sorted({{'torch', 'transformers'}} & set(sys.modules)))"
READ = "import pathlib, specdec.text.tokenizer as t; t.Tokenizer(pathlib.Path({path!r}))"


def run_python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    "module", ["cluster.cli.main", "cluster.serve.startup", "cluster.serve.deployment"]
)
def test_no_torch_without_a_model(module):
    assert run_python(ASK.format(module=module)) == []


def test_a_general_tokenizer_is_read_without_torch(tiny_model_dir):
    code = f"{READ.format(path=str(tiny_model_dir))}\n{ASK.format(module='json')}"
    assert run_python(code) == ["transformers"]
