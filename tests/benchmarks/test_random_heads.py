"""Random heads load as what they are meant to be."""

from benchmarks.random_heads import DRAFT_VOCAB, write_dspark, write_eagle3, write_medusa
from specdec.models.config.model_config import ModelConfig
from specdec.models.heads.config import HeadConfig

SIZES = ModelConfig.from_dict(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 2 * DRAFT_VOCAB,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
    },
    {},
)


def test_random_eagle3(tmp_path):
    found = HeadConfig.from_directory(write_eagle3(tmp_path / "head", SIZES), SIZES)
    assert found.method == "eagle3"
    assert found.draft_vocab_size == DRAFT_VOCAB
    assert found.taps == (2, 3)  # of three defaults in 6 layers, two are equal


def test_random_medusa(tmp_path):
    found = HeadConfig.from_directory(write_medusa(tmp_path / "head", SIZES), SIZES)
    assert (found.method, found.max_draft_tokens) == ("medusa", 5)
    assert found.shape.lm_heads == "own"
    assert found.draft_vocab_size == DRAFT_VOCAB


def test_random_dspark(tmp_path):
    found = HeadConfig.from_directory(write_dspark(tmp_path / "head", SIZES), SIZES)
    assert (found.method, found.max_draft_tokens) == ("dspark", 7)
    assert (found.shape.decoder.num_layers, found.shape.markov_rank) == (2, 256)
    assert found.draft_vocab_size == DRAFT_VOCAB
