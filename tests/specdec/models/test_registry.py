"""The registry of architectures."""

import subprocess
import sys

import pytest

from specdec.models.llama import CausalDecoder
from specdec.models.registry import ARCHITECTURES


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_has_a_decoder(name):
    assert ARCHITECTURES[name].load_decoder() is CausalDecoder


def test_importing_the_registry_does_not_import_torch():
    code = "import sys, specdec.models.registry; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
