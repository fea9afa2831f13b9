# Modules: specdec.models.config.families.key_types, specdec.models.config.families.fixed_values
"""Keys of config.json of every family: none that changes the layers is ignored, or has any type."""

import json
import re
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
import transformers

from specdec.models.config.config_files import decoder_of, supported_architecture
from specdec.models.config.families.fixed_values import FIXED
from specdec.models.config.model_config import ModelConfig
from specdec.models.config.registry import ARCHITECTURES, SUPPORTED_ARCHITECTURES
from specdec.types.errors import UnsupportedModelError
from tests.specdec.models.families import FAMILIES, SIZES, config_class
from tests.specdec.models.hybrid_families import HYBRIDS

MODELS = Path(transformers.__file__).parent / "models"
LM = "ForCausalLM"
WITHOUT_EFFECT = {
    # Of training, and of how results are returned.
    *("initializer_range", "router_aux_loss_coef", "router_jitter_noise", "z_loss_coefficient"),
    *("output_router_logits", "output_attentions", "output_hidden_states", "return_dict"),
    *("num_logits_to_keep", "pad_token_id", "rescale_prenorm_residual", "resid_pdrop", "use_cache"),
    *(f"linear_{name}" for name in ("a_log_max", "a_log_min", "dt_init_floor", "dt_max", "dt_min")),
    # Initial steps of Mamba. transformers also bounds those of Nemotron-H by time_step_min, in
    # prompts and not in single tokens; the published code does not.
    *("time_step_floor", "time_step_max", "time_step_min"),
    # The choice of a kernel.
    *("chunk_size", "mamba_chunk_size", "use_associative_scan", "use_mamba_kernels", "use_mambapy"),
    # The part of a head that is rotated, of which latent attention has a size.
    *("head_dim", "num_key_value_heads"),
    # Read where `layer_types` is null, and of layers that no model has.
    *("sliding_window_pattern", "intermediate_size"),
}


@cache
def configs_of(architecture):
    """Return the keys of tiny models, with other features each, as transformers writes them."""
    found = [each for each in {**FAMILIES, **HYBRIDS}.values() if f"{each[0]}{LM}" == architecture]
    configs = [config_class(family)(**{**SIZES, **own}).to_dict() for family, own in found]
    named = {"architectures": [architecture]}
    return [json.loads(json.dumps(raw, default=list)) | named for raw in configs]


def config_of(architecture):
    return configs_of(architecture)[0]


class Recorded(dict):
    """Keys with a record of those that were read."""

    def __init__(self, fields):
        super().__init__(dict(fields._fields))
        self.read = set()

    def __getitem__(self, key):
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key, default=None):
        self.read.add(key)
        return super().get(key, default)

    def __contains__(self, key):
        self.read.add(key)
        return super().__contains__(key)


def read_keys(raw):
    name, family, fields = decoder_of(supported_architecture(raw), raw)
    recorded = Recorded(fields)
    ModelConfig.from_fields(name, (name, family, recorded), {})
    return recorded.read & raw.keys()


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_keys_that_transformers_reads_are_read_or_refused(architecture):
    folder = MODELS / ARCHITECTURES[architecture].model_type.removesuffix("_text")
    (code,) = folder.glob("modeling_*.py")
    used = set(re.findall(r"config\.(\w+)", code.read_text())) & config_of(architecture).keys()
    used = {key for key in used - WITHOUT_EFFECT if not key.endswith("dropout")}
    fixed = {"use_bidirectional_attention", "clip_qkv", *FIXED.get(architecture, ())}
    assert used <= fixed.union(*map(read_keys, configs_of(architecture)))


NEITHER = ("architectures", "dtype", "eos_token_id", "model_type")


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_text_in_place_of_another_value_is_refused_by_the_key(architecture):
    raw = config_of(architecture)
    for key in read_keys(raw) - {*NEITHER}:
        with pytest.raises(UnsupportedModelError) as refused:
            ModelConfig.from_dict({**raw, key: "false"}, {})
        assert key in str(refused.value) or "rope" in key, key
        assert "'false'" in str(refused.value), key


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_null_is_the_default_or_refused(architecture):
    raw = config_of(architecture)
    for key in read_keys(raw) - {*NEITHER}:
        with suppress(UnsupportedModelError):
            ModelConfig.from_dict({**raw, key: None}, {})


@pytest.mark.parametrize(
    ("architecture", "key"), [(name, key) for name, values in FIXED.items() for key in values]
)
def test_values_that_the_layers_do_not_have_are_refused(architecture, key):
    raw, values = config_of(architecture), FIXED[architecture][key]
    for value in (*values[-1:], None):
        ModelConfig.from_dict({**raw, key: value}, {})
    other = not values[0] if values and type(values[0]) is bool else 77
    with pytest.raises(UnsupportedModelError, match=rf"^{key} in config\.json is {other}; it must"):
        ModelConfig.from_dict({**raw, key: other}, {})


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("GemmaForCausalLM", {"use_bidirectional_attention": True}, "is True; it must be false"),
        ("LlamaForCausalLM", {"layer_types": ["sliding_attention"] * 3}, "without sliding_atten"),
        ("Lfm2ForCausalLM", {"conv_dim": 91}, r"conv_dim .* must be hidden_size \(90\)"),
        ("BambaForCausalLM", {"attn_rotary_emb": 16}, "attn_rotary_emb .* must be 8, half of a"),
        ("ExaoneMoeForCausalLM", {"is_moe_layer": [True], "mlp_layer_types": None}, "is_moe_layer"),
    ],
)
def test_keys_of_published_files_are_honoured(architecture, changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        ModelConfig.from_dict(config_of(architecture) | changes, {})


def test_older_keys_of_published_files():
    raw = config_of("ExaoneMoeForCausalLM") | {"architectures": ["ExaoneMoEForCausalLM"]}
    del raw["mlp_layer_types"]
    changes = {"first_last_k_dense_replace": 2}, {"is_moe_layer": [True, False, True]}
    found = [ModelConfig.from_dict(raw | each, {}).experts.layers for each in changes]
    assert found == [{2}, {0, 2}]
    raw = config_of("NemotronHForCausalLM") | {"mamba_n_groups": 2, "mamba_d_conv": 3}
    assert ModelConfig.from_dict(raw, {}).recurrent.kind.num_groups == 2
    assert ModelConfig.from_dict(raw, {}).recurrent.kind.kernel_size == 3


def test_the_error_names_the_file(tmp_path):
    raw = config_of("Qwen3ForCausalLM") | {"attention_bias": "no"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModelError) as refused:
        ModelConfig.from_directory(tmp_path)
    expected = "attention_bias in config.json is 'no'; it must be true or false"
    assert str(refused.value) == f"{tmp_path}: {expected}"
