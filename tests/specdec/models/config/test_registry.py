# Modules: specdec.models.config.architecture
# Modules: specdec.models.config.families.dense, specdec.models.config.families.gemma4
# Modules: specdec.models.config.families.hunyuan, specdec.models.config.families.llama4
# Modules: specdec.models.config.families.mistral, specdec.models.config.families.mixtures
# Modules: specdec.models.config.families.other_mixtures
# Modules: specdec.models.config.families.sigmoid_mixtures
"""The registry of architectures."""

import subprocess
import sys

import pytest

from specdec.models.config.registry import ARCHITECTURES, architecture_of


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_entry_is_described(name):
    entry = ARCHITECTURES[name]
    assert entry.models
    assert entry.notes
    assert architecture_of(entry.model_type) == name


def test_no_model_type_is_in_two_entries():
    types = [each.model_type for each in ARCHITECTURES.values()]
    assert len(set(types)) == len(types)


def test_an_unknown_model_type_has_no_architecture():
    assert architecture_of("mamba") is None


def test_finding_a_model_and_its_architecture_does_not_import_torch():
    modules = "specdec.models.config.registry, specdec.models.resolve"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
