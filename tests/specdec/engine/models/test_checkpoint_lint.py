"""Reports of `specdec models show` about the files of a model."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.engine.models.checkpoint_lint import lint_checkpoint
from specdec.models.config.model_config import ModelConfig
from tests.specdec.models.families import FAMILIES, save_family
from tests.specdec.packing import gptq, write_packed


def lint(directory):
    return lint_checkpoint(directory, ModelConfig.from_directory(directory))


@pytest.fixture
def directory(tiny_model_dir, tmp_path):
    shutil.copytree(tiny_model_dir, tmp_path / "model")
    return tmp_path / "model"


def edit(directory, **tensors):
    path = directory / "model.safetensors"
    save_file(load_file(path) | tensors, path, {"format": "pt"})


def test_a_plain_checkpoint(tiny_model_dir):
    found = lint(tiny_model_dir)
    assert found.faults == ()
    assert found.notes == ("the output head is the embedding (tie_word_embeddings)",)


def test_each_kind_of_note(directory):
    raw = json.loads((directory / "config.json").read_text())
    del raw["rope_parameters"]
    raw |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_mrope": True}
    raw.pop("layer_types", None)
    (directory / "config.json").write_text(json.dumps(raw))
    edit(
        directory,
        **{
            f"model.layers.{i}.self_attn.{n}_proj.bias": torch.ones(m * 16)
            for i in range(2)
            for n, m in (("q", 9), ("k", 3), ("v", 3), ("o", 9))
        },
        **{"lm_head.weight": torch.ones(383, 144)},
        **{"model.rotary_emb.inv_freq": torch.ones(8)},
    )
    save_file({"a": torch.ones(1)}, directory / "consolidated.safetensors")
    found = lint(directory)
    assert found.faults == ()
    text = "\n".join(found.notes)
    assert "keys of config.json that nothing reads: " in text
    assert "use_mrope" in text
    assert "assumed, because config.json lacks them: sliding_window" not in text
    assert "files that nothing reads: consolidated.safetensors" in text
    assert "the stored output head is used" in text
    assert "nothing reads 2 tensors, model.layers.*.self_attn.o_proj.bias (2)" in text
    assert "not used: tables of rotary embeddings: 1 tensors" in text


def test_defaults_that_are_assumed(tmp_path):
    save_family(tmp_path, "mistral-window")
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["sliding_window"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert "assumed, because config.json lacks them: sliding_window 4096" in lint(tmp_path).notes


def test_zero_points_of_another_version(directory, tmp_path):
    config = {"quant_method": "gptq", "bits": 4, "group_size": 8, "sym": True}
    packed = tmp_path / "packed"
    write_packed(
        directory,
        packed,
        tmp_path / "plain",
        config,
        lambda weight: gptq(weight, sym=True, version=2),
    )
    found = lint(packed)
    assert found.faults == ()
    assert "14 tensors are quantized: gptq, described by config.json" in found.notes
    assert any("other version of the layout" in note for note in found.notes)


def test_faults_are_those_of_the_loader(directory):
    name = "model.layers.1.mlp.up_proj.weight"
    edit(directory, **{name: torch.ones(200, 144, dtype=torch.int8)})
    (fault,) = lint(directory).faults
    assert fault.startswith(f"{name} has codes of type I8, and neither the quantization that")


def test_missing_weights_are_a_fault(directory):
    (directory / "model.safetensors").unlink()
    assert "has no weights in safetensors" in lint(directory).faults[0]


@pytest.mark.parametrize("family", ["gpt-oss", "deepseek-v3", "gemma3", "minimax-m2"])
def test_families_have_no_faults(tmp_path, family):
    assert family in FAMILIES
    save_family(tmp_path, family)
    found = lint(tmp_path)
    assert found.faults == ()
    assert not any("reads" in note for note in found.notes if "config.json" not in note)
