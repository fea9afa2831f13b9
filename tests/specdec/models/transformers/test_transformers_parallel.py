"""Models of transformers on several ranks, by its own plan: the logits and tokens of one rank."""

import threading

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPTNeoXConfig

from specdec.models.config.extra_weights import copied_bytes
from specdec.models.config.model_config import ModelConfig
from specdec.models.transformers import transformers_parallel
from specdec.types.errors import UnsupportedModelError
from tests.specdec.engines import engine_config, local_engine, request, tokens_by
from tests.specdec.fakes import run_ranks
from tests.specdec.models.foreign import reference_logits, save_foreign
from tests.specdec.models.passes import in_pass_order
from tests.specdec.models.transformers.test_transformers_decoder import (
    TOLERANCE,
    load,
    mixed_logits,
    sequences,
)
from tests.specdec.tiny import train_tokenizer

PLANNED = ["phi", "nemotron", "vault-gemma", "ministral", "helium", "apertus"]
MIXTURES = [
    "qwen2-moe",
    pytest.param("solar-open", marks=pytest.mark.slow),
    pytest.param("aria-text", marks=pytest.mark.slow),  # two projections packed as inputs
]


@pytest.fixture(autouse=True)
def one_load_at_a_time(monkeypatch):
    """Ranks are threads here, and transformers changes global state while it loads."""
    lock, load_one = threading.Lock(), AutoModelForCausalLM.from_pretrained

    def load_alone(*arguments, **options):
        with lock:
            return load_one(*arguments, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load_alone)


def assert_logits_of_one_rank(directory, size, **options):
    ids = sequences()
    expected = in_pass_order(reference_logits(directory, ids))
    parts = run_ranks(
        size,
        lambda group: mixed_logits(load(directory, "transformers", group=group, **options), ids),
    )
    found = torch.cat(parts, 1)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("size", [2, 3])
def test_logits_equal_transformers(tmp_path, size):
    """Biases after sums, fused projections, and hidden units that ranks divide unevenly."""
    save_foreign(tmp_path, "gpt-neox")
    assert_logits_of_one_rank(tmp_path, size)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANNED)
def test_other_plans_have_the_same_logits(tmp_path, name):
    save_foreign(tmp_path, name)
    assert_logits_of_one_rank(tmp_path, 3)


@pytest.mark.parametrize("divides_by_expert", [False, True])
@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_have_the_same_logits(tmp_path, name, divides_by_expert):
    """With a share of each of four experts on three ranks, or with one or two whole ones."""
    save_foreign(tmp_path, name)
    assert_logits_of_one_rank(tmp_path, 3, divides_by_expert=divides_by_expert)


def test_a_rank_without_an_expert_adds_nothing(tmp_path):
    save_foreign(tmp_path, "qwen2-moe", num_experts=2, num_experts_per_tok=1)
    assert_logits_of_one_rank(tmp_path, 3, divides_by_expert=True)


@pytest.mark.parametrize("divides_by_expert", [False, True])
def test_a_rank_keeps_its_part_of_experts_alone(tmp_path, divides_by_expert):
    save_foreign(tmp_path, "qwen2-moe", moe_intermediate_size=34)

    def shapes(group):
        model = load(tmp_path, "transformers", group=group, divides_by_expert=divides_by_expert)
        experts = model._body.layers[0].mlp.experts
        tensors = experts.gate_up_proj, experts.down_proj
        assert all(each.untyped_storage().nbytes() == 4 * each.numel() for each in tensors)
        return tuple(map(tuple, (each.shape for each in tensors)))

    found = run_ranks(3, shapes)
    if divides_by_expert:
        assert found == [((n, 68, 96), (n, 96, 34)) for n in (1, 1, 2)]
    else:
        assert found == [((4, 2 * n, 96), (4, 96, n)) for n in (11, 11, 12)]


@pytest.mark.slow
def test_a_tied_embedding_is_divided_in_the_head_alone(tmp_path):
    save_foreign(tmp_path, "gpt-neox", tie_word_embeddings=True)
    assert_logits_of_one_rank(tmp_path, 2)


def test_a_rank_keeps_its_part_alone(tmp_path):
    save_foreign(tmp_path, "gpt-neox")

    def sizes(group):
        model = load(tmp_path, group=group)
        first = model._body.layers[0]
        layers = (first.attention.query_key_value, first.attention.dense, first.mlp.dense_4h_to_h)
        weights = [tuple(layer.weight.shape) for layer in layers]
        assert all(
            layer.weight.untyped_storage().nbytes() == 4 * layer.weight.numel() for layer in layers
        )
        return *weights, model.vocab_slice, model.new_kv_cache(4).shape[3]

    first, second = run_ranks(2, sizes)
    assert first[:2] == second[:2] == ((144, 96), (96, 48))
    assert (first[2], second[2]) in [((96, 51), (96, 50)), ((96, 50), (96, 51))]
    assert (len(first[3]) + len(second[3]), first[4], second[4]) == (383, 3, 3)


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_memory_of_the_ranks_is_that_of_the_plan(tmp_path, is_tied):
    """But for norms and biases, of which each rank has a copy."""
    save_foreign(tmp_path, "gpt-neox", tie_word_embeddings=is_tied)

    def num_bytes(group):
        model = load(tmp_path, group=group)
        layers = [*model._body.parameters(), model._head._whole.get_output_embeddings().weight]
        return sum({each.data_ptr(): each.nbytes for each in layers}.values())

    config = ModelConfig.from_directory(tmp_path)
    planned = config.weight_bytes("float32")
    for size in (1, 2):
        found = sum(run_ranks(size, num_bytes))
        expected = planned + copied_bytes(config, "float32", size)
        assert 0.99 * expected <= found <= 1.01 * expected


def test_speculation_and_preemption_change_no_token_on_two_ranks(tmp_path):
    save_foreign(tmp_path, "gpt-neox")
    train_tokenizer(383).save_pretrained(tmp_path)
    given = [
        request(f"r{i}", [(29 * i + 31 * j) % 380 + 3 for j in range(6)] * 3, seed=i, **params)
        for i, params in enumerate([{}, {"temperature": 0.8}, {"temperature": 0.8, "top_k": 20}])
    ]

    def tokens(group, num_drafts):
        config = engine_config(num_drafts, num_blocks=40)
        return tokens_by(local_engine(tmp_path, config, group), given)

    [expected] = run_ranks(1, lambda group: tokens(group, 0))
    assert run_ranks(2, lambda group: tokens(group, 3)) == [expected] * 2


def test_a_plan_that_does_not_fit_the_model_is_refused(tmp_path, monkeypatch):
    save_foreign(tmp_path, "gpt-neox")
    plan = dict(GPTNeoXConfig.base_model_tp_plan)

    def refusals(changed):
        monkeypatch.setattr(GPTNeoXConfig, "base_model_tp_plan", changed)

        def refusal(group):
            with pytest.raises(UnsupportedModelError) as refused:
                load(tmp_path, group=group)
            return str(refused.value)

        return set(run_ranks(2, refusal))

    without = {name: style for name, style in plan.items() if "4h_to_h" not in name}
    assert any("transformers' plan does not fit" in each for each in refusals(without))
    [wrong] = refusals(plan | {"layers.*.input_layernorm": "colwise"})
    assert "divides layers.0.input_layernorm, a LayerNorm, as colwise, which is not" in wrong
    [wrong] = refusals(plan | {"layers.*.mlp.dense_h_to_4h": "packed_colwise"})
    assert "divides layers.0.mlp.dense_h_to_4h, a Linear, as packed_colwise" in wrong
    monkeypatch.setattr(
        transformers_parallel, "_add_ranks", lambda group, layer, _, part: part * torch.nan
    )
    other = {"GPTNeoXForCausalLM has other logits by transformers' plan; use one rank"}
    assert refusals(plan) == other
    monkeypatch.setattr(nn.Linear, "register_forward_hook", lambda *_: None)  # no sums
    assert refusals(plan) == other
