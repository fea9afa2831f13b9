"""MTP layers in the layouts of four families, in the checkpoint of their target."""

import json
import shutil
from dataclasses import dataclass, replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from specdec.models.config.model_config import ModelConfig
from specdec.models.heads.config import HeadConfig, method_of, separate_head_method_of
from tests.specdec.models.heads.driver import (
    HIDDEN,
    KERNELS,
    NUM_LAYERS,
    RANKS_AND_KERNELS,
    VOCAB,
    head_logits,
    save,
    sequences,
    target_model,
    weights,
)
from tests.specdec.models.heads.reference import Layers, drafted, layer, layer_shapes, rms
from tests.specdec.tiny import random_model

OURS = ("token_norm", "feature_norm", "fc", "norm", "lm_head", "embed_tokens")


@dataclass(frozen=True)
class Family:
    prefix: str
    names: dict  # ours to theirs
    block: str  # prefix of the decoder layer
    feature_first: bool = False
    zero_centred: bool = False
    config: tuple = ()


def deepseek(config=()):
    names = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens")
    prefix = f"model.layers.{NUM_LAYERS}."
    return Family(prefix, dict(zip(OURS, names, strict=True)), prefix, config=config)


FAMILIES = {
    "mimo": Family(
        "model.mtp_layers.0.",
        dict(
            zip(
                OURS[:4],
                ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
                strict=True,
            )
        ),
        "model.mtp_layers.0.",
        feature_first=True,
    ),
    "qwen3-next": Family(
        "mtp.",
        dict(
            zip(
                OURS[:4],
                ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
                strict=True,
            )
        ),
        "mtp.layers.0.",
        zero_centred=True,
    ),
    "deepseek": deepseek(),
    "glm": deepseek(config=(("model_type", "glm4"),)),
    "ernie": Family(
        "model.mtp_",
        dict(zip(OURS[:3], ("emb_norm.0", "hidden_norm.0", "linear_proj.0"), strict=True)),
        "model.mtp_block.0.",
    ),
}


ALONE = "mtp_layers.0."


def speculators(layers):
    """Return the config.json of a file of the speculators library. layers: keys of the layer."""
    return {
        "architectures": ["MTPDraftModel"],
        "num_nextn_predict_layers": 1,
        "speculators_model_type": "mtp",
        "speculators_version": "0.6",
        "speculators_config": {
            "algorithm": "mtp",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "org/target"},
        },
        "transformer_layer_config": layers,
    }


def mtp_weights(family):
    """Return the weights by our names, with norms as they multiply."""
    shapes = {f"{name}.weight": (HIDDEN,) for name in ("token_norm", "feature_norm")}
    shapes["fc.weight"] = (HIDDEN, 2 * HIDDEN)
    if "norm" in family.names:
        shapes["norm.weight"] = (HIDDEN,)
    if "lm_head" in family.names:
        shapes |= dict.fromkeys(("embed_tokens.weight", "lm_head.weight"), (VOCAB, HIDDEN))
    return weights(shapes | layer_shapes(Layers(), HIDDEN, 40))


def stored(made, family):
    """Return the weights as the family stores them."""
    tensors = {}
    for name, tensor in made.items():
        if family.zero_centred and name.endswith("norm.weight"):
            tensor = tensor - 1
        stem = name.removesuffix(".weight")
        if stem in family.names:
            tensors[f"{family.prefix}{family.names[stem]}.weight"] = tensor
        else:
            tensors[family.block + name.removeprefix("layers.0.")] = tensor
    return tensors


def with_mtp(target_dir, directory, tensors, changes=()):
    """Copy the target with more tensors."""
    shutil.copytree(target_dir, directory)
    own = load_file(directory / "model.safetensors")
    save_file(own | tensors, directory / "model.safetensors", {"format": "pt"})
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(changes)))
    return directory


def reference(made, parts, target_dir, family):
    own = load_file(target_dir / "model.safetensors")
    embedding = made.get("embed_tokens.weight", own["model.embed_tokens.weight"])
    head = made.get("lm_head.weight", own["lm_head.weight"])
    eps = json.loads((target_dir / "config.json").read_text())["rms_norm_eps"]
    sizes = Layers(head_dim=16, theta=10_000.0)

    def final(x):
        return rms(x, made["norm.weight"], eps) if "norm.weight" in made else x

    def run(tokens, features):
        parts = [
            rms(embedding[tokens], made["token_norm.weight"], eps),
            rms(features, made["feature_norm.weight"], eps),
        ]
        x = torch.cat(parts[::-1] if family.feature_first else parts, dim=1)
        return layer(x @ made["fc.weight"].T, made, "layers.0", sizes)

    return torch.stack(
        [drafted(part, part.hidden, run, lambda x: final(x) @ head.T, final, 5) for part in parts]
    )


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


def weights_of_16(family):
    """As `mtp_weights`, for the target's heads of 16 dimensions."""
    made = mtp_weights(family)
    made |= weights(layer_shapes(Layers(head_dim=16), HIDDEN, 40), seed=2)
    return made


@pytest.mark.parametrize(("size", "kernels"), RANKS_AND_KERNELS)
def test_logits_equal_the_reference(tmp_path, target_dir, family, size, kernels):
    made, parts = weights_of_16(family), sequences()
    directory = with_mtp(target_dir, tmp_path / "a", stored(made, family), family.config)
    found = head_logits(directory, target_dir, parts, size=size, kernels=kernels, borders=(5, 12))
    expected = reference(made, parts, target_dir, family)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_layer_alone_in_a_file_of_speculators(tmp_path, target_dir, target, kernels):
    """It reads the embedding first, under the names of MiMo's layers, and names its target."""
    family = replace(FAMILIES["mimo"], prefix=ALONE, block=ALONE, feature_first=False)
    made, parts = weights_of_16(family), sequences()
    layers = json.loads((target_dir / "config.json").read_text())
    save(tmp_path, speculators(layers), stored(made, family))
    expected = reference(made, parts, target_dir, family)
    found = head_logits(tmp_path, target_dir, parts, kernels=kernels, borders=(5, 12))
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    head = HeadConfig.from_directory(tmp_path, target)
    assert (head.target_name, head.num_draft_tokens) == ("org/target", 3)
    assert head.describe()[0].startswith("taken for MTP (speculators 0.6): layers: 1, full")
    assert method_of(tmp_path) == separate_head_method_of(tmp_path) == "mtp"


def test_layers_in_a_pickled_checkpoint(tmp_path, target_dir, family):
    made, parts = weights_of_16(family), sequences()
    directory = with_mtp(target_dir, tmp_path / "a", stored(made, family), family.config)
    path = directory / "model.safetensors"
    torch.save(load_file(path), directory / "pytorch_model.bin")
    path.unlink()
    found = head_logits(directory, target_dir, parts)
    expected = reference(made, parts, target_dir, family)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


def test_the_target_loads_without_its_mtp_layers(tmp_path, target_dir, target, family):
    tensors = stored(weights_of_16(family), family)
    directory = with_mtp(target_dir, tmp_path / "a", tensors, {"num_nextn_predict_layers": 1})
    config = ModelConfig.from_directory(directory)
    assert config == target
    assert len(target_model(directory).layers) == NUM_LAYERS
    head = HeadConfig.from_directory(directory, config)
    assert (head.method, head.num_kv_layers, head.feature_size) == ("mtp", 1, HIDDEN)
    assert head.weight_bytes("float32") == 4 * sum(each.numel() for each in tensors.values())


def test_mimo_is_a_qwen2_decoder_with_mtp_layers(tmp_path):
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 40, "num_hidden_layers": 2}
    tiny = Qwen2Config(
        num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCAB, eos_token_id=0, **sizes
    )
    directory = tmp_path / "qwen2"
    random_model(Qwen2ForCausalLM, tiny, 0).save_pretrained(directory)
    family = FAMILIES["mimo"]
    made = stored(mtp_weights(family), family)
    changes = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    mimo = with_mtp(directory, tmp_path / "mimo", made, changes)
    config = ModelConfig.from_directory(mimo)
    assert config == ModelConfig.from_directory(directory)
    assert target_model(mimo).embed_tokens.weight.shape == (VOCAB, HIDDEN)
    assert HeadConfig.from_directory(mimo, config).method == "mtp"


def test_rotation_is_that_of_the_full_attention_of_the_target(tmp_path, target_dir, target):
    full = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    ropes = {"full_attention": full, "sliding_attention": sliding}
    family = FAMILIES["mimo"]
    tensors = stored(weights_of_16(family), family)
    changes = {"rope_theta": None, "rope_parameters": ropes}
    directory = with_mtp(target_dir, tmp_path / "a", tensors, changes)
    decoder = HeadConfig.from_directory(directory, target).shape.decoder
    assert (decoder.rope.theta, decoder.rotary_fraction) == (5e5, 0.5)


def test_only_the_first_of_several_layers_is_used(tmp_path, target_dir, target):
    family = FAMILIES["mimo"]
    tensors = stored(weights_of_16(family), family)
    more = {name.replace("mtp_layers.0", "mtp_layers.1"): t.clone() for name, t in tensors.items()}
    directory = with_mtp(target_dir, tmp_path / "a", tensors | more)
    config = HeadConfig.from_directory(directory, target)
    assert config.describe() == (
        "taken for MTP (MiMo): layers: 1, full attention, feature before embedding, inputs "
        "normalized, final norm, normalized output recycled, embedding of the target, output head "
        "of the target",
        "the first of 2 MTP layers is used",
    )
