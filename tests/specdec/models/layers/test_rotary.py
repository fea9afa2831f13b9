"""Reference tests: rotary frequencies against transformers, for common RoPE parameters."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec.models.config.rope import YarnRope, read_rope
from specdec.models.layers.rotary import RotaryEmbedding, frequencies
from specdec.models.weights.checkpoint import CPU

LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}


def config_of(rope_parameters, **changes):
    sizes = {"hidden_size": 512, "num_attention_heads": 4, "max_position_embeddings": 8192}
    return LlamaConfig(**sizes, **changes, rope_parameters=rope_parameters)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"factor": 8.0, "original_max_position_embeddings": 2048, **LLAMA3},
        {"factor": 32.0, "original_max_position_embeddings": 1024, "rope_theta": 5e5, **LLAMA3},
        {"factor": 32.0, "rope_theta": 5e5, **LLAMA3},
        {"original_max_position_embeddings": 2048, **YARN},
        {"original_max_position_embeddings": 2048, **YARN, "factor": None},
        {"original_max_position_embeddings": 4096, "rope_theta": 1e6, **YARN, "truncate": False},
        {"original_max_position_embeddings": 64, **YARN, "beta_fast": 4, "beta_slow": 2},
        {"original_max_position_embeddings": 2048, **YARN, "attention_factor": 0.75},
        {"original_max_position_embeddings": 2048, **YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
        {"original_max_position_embeddings": 2048, **YARN, "mscale": 0.7},
        # Every turn is beyond the last dimension, so the ramp's end comes before its beginning.
        {"original_max_position_embeddings": 2**23, "rope_theta": 10.0, **YARN},
    ],
    ids=lambda parameters: f"{parameters['rope_type']}-{len(parameters)}",
)
def test_frequencies_and_scale_equal_transformers(parameters):
    config = config_of({"rope_theta": 10_000.0, **parameters})
    expected, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
    rope = read_rope(config.to_dict())
    torch.testing.assert_close(frequencies(rope, 128, 8192), expected, rtol=1e-5, atol=0)
    assert getattr(rope, "attention_factor", 1.0) == pytest.approx(scale, rel=1e-9)
    assert isinstance(rope, YarnRope) or scale == 1.0


def test_rotation_includes_the_attention_factor():
    config = config_of({"rope_theta": 1e4, "original_max_position_embeddings": 512, **YARN})
    positions = torch.tensor([[0, 7, 600, 8191]])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    embedding = RotaryEmbedding(128, 8192, read_rope(config.to_dict()), torch.float32, CPU)
    rotation = embedding.rotation(positions[0])
    signs = torch.tensor([-1.0, 1.0]).repeat_interleave(64)
    # At position 8191 the last bit of a frequency is 5e-4 radians.
    torch.testing.assert_close(rotation.cos[:, 0], cos[0], atol=1e-3, rtol=0)
    torch.testing.assert_close(rotation.sin[:, 0], sin[0] * signs, atol=1e-3, rtol=0)
    assert rotation.cos.max() > 1.1
