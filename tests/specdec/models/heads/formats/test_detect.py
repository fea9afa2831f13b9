"""Detection of a checkpoint's method by its files alone."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.models.heads.config import (
    HeadConfig,
    head_method_of,
    method_of,
    separate_head_method_of,
)
from specdec.types.errors import UnsupportedModelError
from tests.specdec.models.heads.driver import save
from tests.specdec.models.heads.networks import test_dflash as dflash
from tests.specdec.models.heads.networks import test_eagle3 as eagle3
from tests.specdec.models.heads.test_malformed import base_of
from tests.specdec.tiny import tiny_llama_dir

METHODS = {
    "medusa": "medusa",
    "mlp": "mlp_speculator",
    "hydra": "hydra",
    "eagle": "eagle",
    "eagle3": "eagle3",
    "speculators": "eagle3",
    "p_eagle": "p_eagle",
    "dflash": "dflash",
    "dspark": "dspark",
}

WHOLE = "set method to draft_model, or to mtp if it is the target itself"
ALONE = "has layers for multi-token prediction alone (DeepseekV3ForCausalLMNextN)"


@pytest.mark.parametrize("kind", METHODS)
def test_every_format_of_a_head_has_its_method(tmp_path, target, kind):
    config, tensors = base_of(kind)
    directory = save(tmp_path, config, tensors)
    assert method_of(directory) == head_method_of(directory) == METHODS[kind]
    assert HeadConfig.from_directory(directory, target).method == METHODS[kind]


@pytest.mark.parametrize(
    ("changes", "method"),
    [({}, "dflash"), ({"sample_from_anchor": True}, "dspark")],
)
def test_a_block_drafter_of_speculators_by_its_key(tmp_path, changes, method):
    directory = save(tmp_path, dflash.speculators("dflash", **changes), dflash.block_weights())
    assert method_of(directory) == method


def test_original_medusa_weights_without_a_configuration(tmp_path):
    save(tmp_path, {}, {"0.0.linear.weight": torch.zeros(4, 4)}, "medusa_lm_head.pt")
    (tmp_path / "config.json").unlink()
    assert method_of(tmp_path) == "medusa"


def test_a_plain_model_is_a_draft_model(tmp_path):
    directory = tiny_llama_dir(tmp_path)
    assert (method_of(directory), head_method_of(directory)) == ("draft_model", None)


def test_a_model_with_a_pard_token_drafts_in_parallel(tmp_path):
    path = tiny_llama_dir(tmp_path) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pard_token": 380}))
    assert (method_of(tmp_path), head_method_of(tmp_path)) == ("pard", None)


@pytest.mark.parametrize(
    ("architecture", "name", "words"),
    [
        ("LlamaForCausalLM", "model.mtp_layers.0.input_proj.weight", WHOLE),
        ("Qwen3_5ForConditionalGeneration", "mtp.fc.weight", WHOLE),
        ("DeepseekV3ForCausalLMNextN", "model.layers.0.eh_proj.weight", ALONE),
    ],
)
def test_mtp_layers_are_beside_a_model_or_alone(tmp_path, architecture, name, words):
    path = tiny_llama_dir(tmp_path) / "model.safetensors"
    save_file(load_file(path) | {name: torch.zeros(4, 8)}, path)
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"architectures": [architecture]})
    )
    assert head_method_of(tmp_path) == "mtp"
    assert separate_head_method_of(tmp_path) is None
    with pytest.raises(UnsupportedModelError) as caught:
        method_of(tmp_path)
    assert words in str(caught.value)


def test_other_files_are_refused_with_what_was_looked_at(tmp_path):
    directory = save(tmp_path, {"model_type": "clip"}, {"vision.weight": torch.zeros(2, 2)})
    with pytest.raises(UnsupportedModelError) as caught:
        method_of(directory)
    message = str(caught.value)
    assert "medusa_num_heads, hydra_num_heads" in message
    assert "(architecture none, model_type clip, 1 tensors)" in message
    assert "set method to draft_model or one of medusa, mlp_speculator, hydra, eagle" in message
    assert "\n" not in message


def test_an_unknown_kind_of_speculators_is_refused(tmp_path):
    config = eagle3.speculators({"speculators_model_type": "xpress"})
    with pytest.raises(UnsupportedModelError, match=r"'xpress'; it must be one of eagle3, peagle"):
        method_of(save(tmp_path, config, eagle3.eagle3_weights()))
