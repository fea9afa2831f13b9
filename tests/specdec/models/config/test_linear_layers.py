# Modules: specdec.models.config.decoder_tensors
"""The layers that adapters may update, by the configuration alone, are those of a decoder."""

import pytest

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.decoder_tensors import linear_layers
from specdec.models.lora.torch_adapters import linears_of
from tests.specdec.models.families import WITH_ALL_TRAITS, save_family
from tests.specdec.models.passes import load

HYBRIDS_WITH_MIXTURES = ("qwen3-next", "granite-4-moe", "nemotron-h", "kimi-linear", "jamba")


@pytest.mark.parametrize("family", [*WITH_ALL_TRAITS, *HYBRIDS_WITH_MIXTURES])
def test_they_are_those_of_the_decoder(tmp_path, family):
    save_family(tmp_path, family)
    model = load(tmp_path, TensorParallelGroup(), kernels="torch")
    linears = linears_of(model.layers)
    found = {each.name: each.shape for linear in linears for each in linear.projections}
    assert linear_layers(model.config) == found
