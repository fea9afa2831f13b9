# Modules: specdec.worker.model_runner
"""The attention window of a draft model: the same as a sliding window in its layers."""

import pytest
import torch
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM

from specdec.models.config.model_config import ModelConfig
from specdec.types.sampling.sampling_spec import SamplingRules
from tests.specdec.engines import draft_model, engine_config, local_engine, request, run, tokens_by
from tests.specdec.fakes import run_ranks
from tests.specdec.speculation.proposers.sequences import drafts, sequence
from tests.specdec.tiny import disturbed_llama_dir

WINDOW = 5
TEXT = [(29 * i) % 380 + 3 for i in range(40)]


@pytest.fixture(scope="module")
def near_dir(tiny_model_dir, tmp_path_factory):
    return disturbed_llama_dir(tiny_model_dir, tmp_path_factory.mktemp("near"))


def windowed(directory):
    """Return transformers' Mistral with the weights of a Llama and a sliding window."""
    llama = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    raw = llama.config.to_dict()
    names = ("architectures", "model_type", "attention_bias", "mlp_bias", "pretraining_tp")
    kept = {name: value for name, value in raw.items() if name not in names}
    config = MistralConfig(**kept, sliding_window=WINDOW, attn_implementation="eager")
    mistral = MistralForCausalLM(config).float().eval()
    mistral.load_state_dict(llama.state_dict())
    return mistral


def greedy(model, text, count):
    tokens = list(text)
    for _ in range(count):
        with torch.inference_mode():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tuple(tokens[len(text) :])


@pytest.mark.parametrize("length", [3, 12, 40])
def test_drafts_are_those_of_a_model_with_a_sliding_window(near_dir, length):
    """40 tokens are run in chunks before the draft, and cross blocks of 4."""
    proposer = draft_model(near_dir, draft_window=WINDOW)
    seq, wide = sequence(1, TEXT[:length]), sequence(2, TEXT[:length])
    seq.rules = wide.rules = SamplingRules(temperature=0)
    expected = greedy(windowed(near_dir), TEXT[:length], 6)
    made = next(each for _ in range(9) if (each := drafts(proposer, seq, count=6)[0]))
    assert made == expected
    plain = draft_model(near_dir)
    unlimited = next(each for _ in range(9) if (each := drafts(plain, wide, count=6)[0]))
    assert (unlimited == expected) == (length + 5 <= WINDOW)


def test_a_window_narrows_wider_ones_only():
    raw = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 10,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
    }
    config = ModelConfig.from_dict(raw, {})
    assert config.sliding_windows == (None, 7, 7)
    assert config.with_window(9).sliding_windows == (9, 7, 7)
    assert config.with_window(4).sliding_windows == (4, 4, 4)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_are_those_without_speculation(tiny_model_dir, near_dir, temperature):
    asked = [request(str(i), TEXT[: 9 + 5 * i], seed=i, temperature=temperature) for i in range(6)]
    plain = run(local_engine(tiny_model_dir, engine_config(0)), asked)

    def check(group):
        proposer = draft_model(near_dir, group, draft_window=12)
        engine = local_engine(tiny_model_dir, engine_config(3), group, proposer)
        tokens = tokens_by(engine, asked)
        assert tokens == {name: each.token_ids for name, each in plain.items()}
        assert engine.stats().counts.speculation.num_accepted_tokens > 0

    run_ranks(2, check)
