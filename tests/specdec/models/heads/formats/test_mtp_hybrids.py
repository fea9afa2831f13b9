"""MTP layers in the checkpoint of a target with recurrent layers: an attending layer like its."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from specdec.models.config.model_config import ModelConfig
from specdec.models.heads.config import HeadConfig
from specdec.types.errors import UnsupportedModelError
from tests.specdec.models.families import config_class, save_family
from tests.specdec.models.heads.driver import HIDDEN, VOCAB, head_logits, save, sequences
from tests.specdec.models.heads.formats.test_mtp import speculators
from tests.specdec.models.heads.reference import drafted
from tests.specdec.models.hybrid_families import DELTA, SCALES
from tests.specdec.tiny import random_model

EPS = DELTA["rms_norm_eps"]
SIZES = {
    **DELTA,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "hidden_size": HIDDEN,
    "vocab_size": VOCAB,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 40,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 0,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 25,
    "shared_expert_intermediate_size": 31,
}
FAMILIES = {
    "qwen3-next": ("Qwen3Next", EXPERTS),
    "qwen3.5": ("Qwen3_5", {}),
    "qwen3.5-moe": ("Qwen3_5Moe", EXPERTS),
}
SLOW = ("qwen3.5", "qwen3.5-moe")
ATTENDING = 1
"""The layer of another random model whose weights are those of the MTP layer."""


def new_model(name, seed):
    family, changes = FAMILIES[name]
    config = config_class(family)(**SIZES, **changes)
    config._experts_implementation = "eager"
    model = random_model(getattr(transformers, f"{family}ForCausalLM"), config, seed)
    model.set_attn_implementation("eager")
    return model


class MtpLayer(nn.Module):
    """The layer by the code of transformers, which runs no MTP layers."""

    def __init__(self, name):
        super().__init__()
        self.target, other = new_model(name, 0), new_model(name, 5)
        self.layer, self.rotary = other.model.layers[ATTENDING], other.model.rotary_emb
        for weight in self.layer.parameters():
            weight.data *= SCALES["Qwen3Next"] if weight.ndim >= 2 else 1.0
        norms = [other.model.norm, other.model.layers[0].input_layernorm]
        self.norm, self.token_norm = norms
        self.feature_norm = other.model.layers[0].post_attention_layernorm
        self.fc = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def tensors(self):
        named = {"pre_fc_norm_embedding": self.token_norm, "pre_fc_norm_hidden": self.feature_norm}
        named |= {"norm": self.norm, "fc": self.fc}
        found = {f"mtp.{name}.weight": each.weight for name, each in named.items()}
        found |= {f"mtp.layers.0.{name}": each for name, each in self.layer.state_dict().items()}
        return {name: each.detach().clone() for name, each in found.items()}

    def run(self, tokens, features):
        embedded = self.target.model.embed_tokens(tokens)
        x = self.fc(torch.cat([self.token_norm(embedded), self.feature_norm(features)], 1))[None]
        count = len(tokens)
        rotation = self.rotary(x, torch.arange(count)[None])
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        found = self.layer(x, position_embeddings=rotation, attention_mask=mask)
        return (found if isinstance(found, torch.Tensor) else found[0])[0]

    def reference(self, part):
        with torch.inference_mode():
            logits = lambda x: self.target.lm_head(self.norm(x))  # noqa: E731
            return drafted(part, part.hidden, self.run, logits, self.norm, 5)


@pytest.fixture(
    scope="module",
    params=["qwen3-next", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)],
)
def checkpoint(request, tmp_path_factory):
    directory, layer = tmp_path_factory.mktemp(request.param), MtpLayer(request.param)
    layer.target.save_pretrained(directory)
    path = directory / "model.safetensors"
    save_file(load_file(path) | layer.tensors(), path, {"format": "pt"})
    return directory, layer


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_logits_equal_the_reference(checkpoint, size):
    directory, layer = checkpoint
    parts = sequences()
    found = head_logits(directory, directory, parts, size=size, borders=(5, 12))
    expected = torch.stack([layer.reference(part) for part in parts])
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


def of_speculators(name):
    """Return the name that the converter of the speculators library gives a tensor."""
    names = {
        "pre_fc_norm_embedding": "token_layernorm",
        "pre_fc_norm_hidden": "hidden_layernorm",
        "norm": "final_layernorm",
        "fc": "input_proj",
    }
    stem = name.removeprefix("mtp.").removesuffix(".weight")
    name = f"{names[stem]}.weight" if stem in names else name.removeprefix("mtp.layers.0.")
    return f"mtp_layers.0.{name}"


def test_a_layer_alone_in_a_file_of_speculators(checkpoint, tmp_path):
    directory, layer = checkpoint
    parts = sequences()
    fields = json.loads((directory / "config.json").read_text())
    tensors = {of_speculators(name): each for name, each in layer.tensors().items()}
    save(tmp_path, speculators(fields), tensors)
    expected = torch.stack([layer.reference(part) for part in parts])
    torch.testing.assert_close(
        head_logits(tmp_path, directory, parts), expected, atol=2e-4, rtol=1e-4
    )


def test_every_tensor_of_the_layer_is_read(checkpoint):
    directory, layer = checkpoint
    config = HeadConfig.from_directory(directory, ModelConfig.from_directory(directory))
    num_values = sum(tensor.numel() for tensor in layer.tensors().values())
    assert config.weight_bytes("float32") == 4 * num_values
    assert config.describe()[0].startswith("taken for MTP (Qwen3-Next): layers: 1, full attention")


def test_layers_of_single_blocks_are_refused(tmp_path):
    save_family(tmp_path, "nemotron-h")
    path = tmp_path / "model.safetensors"
    layer = {"mtp.layers.0.mixer.q_proj.weight": torch.zeros(144, 90)}
    save_file(load_file(path) | layer, path, {"format": "pt"})
    target = ModelConfig.from_directory(tmp_path)
    with pytest.raises(UnsupportedModelError, match="blocks of attention and experts with a norm"):
        HeadConfig.from_directory(tmp_path, target)
