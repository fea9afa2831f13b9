"""Every tensor is made on the device of the model, never on the default device.

No GPU is needed: the default device is `meta`, whose tensors have no data, so that a tensor made
there by mistake cannot be read or combined with others.
"""

import pytest
import torch

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.loading import load_model
from specdec.types.errors import UnsupportedModelError
from tests.specdec.engines import engine_config, local_engine, request, run
from tests.specdec.tiny import tiny_llama_dir

PROMPTS = [[11, 12, 13, 11, 12], [40 + i % 3 for i in range(30)], [7]]
SAMPLING = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 20},
]


def load(directory, **options):
    config = ModelConfig.from_directory(directory)
    return load_model(
        directory,
        config,
        TensorParallelGroup(),
        dtype=torch.float32,
        max_model_len=64,
        block_size=4,
        **options,
    )


def outputs(engine):
    requests = [request(f"r{i}", prompt, seed=i, **SAMPLING[i]) for i, prompt in enumerate(PROMPTS)]
    transcripts = run(engine, requests)
    assert engine.stats().counts.speculation.num_drafts > 0
    return {name: transcript.token_ids for name, transcript in transcripts.items()}


@pytest.mark.parametrize("tied", [True, False])
def test_no_tensor_is_made_on_the_default_device(tmp_path, tied):
    directory = tiny_llama_dir(tmp_path, tied=tied)
    expected = outputs(local_engine(directory, engine_config(3)))
    engine = local_engine(directory, engine_config(3))  # safetensors itself goes by the default
    with torch.device("meta"):
        assert outputs(engine) == expected


def test_a_model_is_on_the_requested_device(tiny_model_dir):
    model = load(tiny_model_dir, device=torch.device("meta"))
    assert model.device.type == "meta"
    assert model.new_kv_cache(8).device.type == "meta"
    assert model.norm.weight.device.type == "meta"
    assert model.lm_head.matrix.weight.device.type == "meta"
    assert model.rotary.rotation(torch.zeros(1, dtype=torch.int64)).cos.device.type == "meta"


def test_a_quantization_that_the_device_lacks_is_rejected(tiny_model_dir):
    with pytest.raises(UnsupportedModelError, match="int8 on cuda"):
        load(tiny_model_dir, quantization="int8", device=torch.device("cuda"))
