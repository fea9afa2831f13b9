"""Where the files of a model describe their quantization."""

import json

import pytest

from specdec.models.config.model_config import ModelConfig
from specdec.models.weights.quantization_config import described_by, read_quantization
from specdec.types.errors import UnsupportedModelError

GPTQ = {"bits": 4, "group_size": 128, "desc_act": False}
AWQ = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}


def modelopt(algorithm, **others):
    producer = {"name": "modelopt", "version": "0.40"}
    return {"producer": producer, "quantization": {"quant_algo": algorithm, **others}}


def test_config_json_wins(tmp_path):
    (tmp_path / "quantize_config.json").write_text(json.dumps(GPTQ))
    for raw in (
        {"quantization_config": AWQ},
        {"compression_config": AWQ},
        {"text_config": {"quantization_config": AWQ}},
    ):
        assert read_quantization(tmp_path, raw) == AWQ
        assert described_by(tmp_path, raw) == "config.json"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("quantize_config.json", GPTQ, GPTQ | {"quant_method": "gptq"}),
        ("quantize_config.json", GPTQ | {"quant_method": "awq"}, GPTQ | {"quant_method": "awq"}),
        ("quant_config.json", AWQ, AWQ | {"quant_method": "awq"}),
        (
            "hf_quant_config.json",
            modelopt("FP8", exclude_modules=["lm_head"]),
            {"quant_method": "fp8", "quant_algo": "FP8", "ignored_layers": ["lm_head"]},
        ),
        (
            "hf_quant_config.json",
            modelopt("NVFP4"),
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        ),
        ("hf_quant_config.json", modelopt(None, kv_cache_quant_algo="FP8"), None),
    ],
)
def test_files_of_their_own(tmp_path, name, content, expected):
    (tmp_path / name).write_text(json.dumps(content))
    assert read_quantization(tmp_path, {}) == expected
    assert described_by(tmp_path, {}) == name


def test_modelopt_in_config_json():
    found = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
    expected = {"quant_method": "fp8", "quant_algo": "FP8", "ignored_layers": ["lm_head"]}
    assert read_quantization(None, {"quantization_config": found}) == expected


@pytest.mark.parametrize("content", ["[1]", "{"])
def test_an_invalid_file_is_refused(tmp_path, content):
    (tmp_path / "hf_quant_config.json").write_text(content)
    with pytest.raises(UnsupportedModelError, match=r"hf_quant_config\.json is not"):
        read_quantization(tmp_path, {})


def test_a_model_knows_the_quantization_of_its_files(tiny_model_dir, tmp_path):
    for path in tiny_model_dir.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(modelopt("FP8")))
    assert ModelConfig.from_directory(tmp_path).stored_quantization == ("fp8", "modelopt")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(modelopt("W4A16_AWQ")))
    with pytest.raises(UnsupportedModelError, match="quantized by modelopt W4A16_AWQ"):
        ModelConfig.from_directory(tmp_path)
