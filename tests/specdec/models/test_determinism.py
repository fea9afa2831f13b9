"""Models and devices for which the deterministic mode is available or refused."""

from dataclasses import replace

import pytest
import torch

from specdec.config.llm import LLMConfig
from specdec.kernels.backend import KernelBackend
from specdec.kernels.collectives import OrderedCollectives, ProcessGroupCollectives
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.config.traits import NormKind
from specdec.models.determinism import require_deterministic
from specdec.types.errors import InvalidValueError, UnsupportedModelError
from tests.specdec.models.families import save_family

CPU, GPU = torch.device("cpu"), torch.device("cuda")
ALONE = TensorParallelGroup()


def test_torch_kernels_are_refused():
    with pytest.raises(InvalidValueError, match="deterministic is True; it must be False with"):
        KernelBackend.select("torch", CPU, deterministic=True)


def test_native_kernels_are_deterministic_as_they_are(monkeypatch):
    monkeypatch.setattr("specdec.kernels.backend.native_library", lambda: object())
    assert KernelBackend.select("auto", CPU, deterministic=True) is KernelBackend.CPU


@pytest.mark.parametrize("deterministic", [True, False])
def test_triton_has_a_backend_for_it(monkeypatch, deterministic):
    monkeypatch.setattr("specdec.kernels.backend.triton_fault", lambda device: None)
    found = KernelBackend.select("auto", GPU, deterministic=deterministic)
    assert found is (KernelBackend.INVARIANT if deterministic else KernelBackend.TRITON)
    assert found.is_triton


@pytest.mark.parametrize(
    "changes",
    [
        {"kernels": "torch"},
        {"device": "cuda", "enable_lora": True},
    ],
    ids=str,
)
def test_settings_that_exclude_it_are_refused(changes):
    with pytest.raises(InvalidValueError, match="deterministic"):
        LLMConfig(model="tiny", deterministic=True, **changes)
    LLMConfig(model="tiny", **changes)


def test_models_without_invariant_kernels_are_refused_on_a_gpu(tmp_path):
    save_family(tmp_path, "olmo2")
    config = ModelConfig.from_directory(tmp_path)
    with pytest.raises(UnsupportedModelError, match="norms over all heads"):
        require_deterministic(config, ALONE, GPU)
    require_deterministic(config, ALONE, CPU)


def test_recurrent_layers_have_invariant_kernels_on_a_cpu(tmp_path):
    save_family(tmp_path, "lfm2-plain")
    config = ModelConfig.from_directory(tmp_path)
    require_deterministic(config, ALONE, CPU)
    with pytest.raises(UnsupportedModelError, match="recurrent layers on device cuda"):
        require_deterministic(config, ALONE, GPU)


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss", "deepseek-v3"])
def test_experts_sinks_and_latents_have_invariant_kernels(tmp_path, family):
    save_family(tmp_path, family)
    require_deterministic(ModelConfig.from_directory(tmp_path), ALONE, GPU)


def test_ranks_and_other_norms_are_refused_on_a_gpu(tiny_model_dir):
    config = ModelConfig.from_directory(tiny_model_dir)
    by_nccl, in_order = (
        TensorParallelGroup(0, 2, collectives)
        for collectives in (ProcessGroupCollectives(None, "NCCL"), OrderedCollectives(None))
    )
    require_deterministic(config, ALONE, GPU)
    require_deterministic(config, in_order, GPU)
    require_deterministic(config, by_nccl, CPU)
    with pytest.raises(UnsupportedModelError, match="an order of NCCL's choice on device cuda"):
        require_deterministic(config, by_nccl, GPU)
    layer = replace(config, traits=replace(config.traits, norm=NormKind.LAYER))
    with pytest.raises(UnsupportedModelError, match="LayerNorm"):
        require_deterministic(layer, ALONE, GPU)
