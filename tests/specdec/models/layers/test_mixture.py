"""Mixtures of experts: how many experts the rows of a step read."""

import random
import time

import pytest
import torch
import transformers

from specdec.kernels.reference.experts import route
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.layers import mixture
from specdec.models.layers.mixture import SparseMLP
from specdec.speculation.policy.cost_profiler import CostProfiler
from specdec.speculation.policy.sample_text import SAMPLE_TEXT
from specdec.types.messages import VerifyOutput
from tests.specdec.engines import engine_config
from tests.specdec.models.families import save_family
from tests.specdec.models.passes import BLOCK_SIZE, batch_of, load, weights_of
from tests.specdec.tiny import TEXT, random_model, train_tokenizer

NUM_EXPERTS, PER_TOKEN = 16, 4


@pytest.fixture(scope="module")
def num_experts_read():
    """A function to the experts that the last tokens of texts read in a layer, on average."""
    config = transformers.Qwen3MoeConfig(
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=383,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=PER_TOKEN,
        moe_intermediate_size=32,
        experts_implementation="eager",
    )
    model, chosen = random_model(transformers.Qwen3MoeForCausalLM, config, seed=1), []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, output: chosen.append(output[2]))

    @torch.inference_mode()
    def count(texts, num_rows):
        chosen.clear()
        model(torch.tensor(texts))
        by_layer = [each.view(len(texts), -1, PER_TOKEN)[:, -num_rows:] for each in chosen]
        return sum(len(each.unique()) for each in by_layer) / len(by_layer)

    return count


@pytest.mark.parametrize(("num_sequences", "num_rows"), [(1, 4), (1, 8), (4, 4), (8, 1), (8, 4)])
def test_profiled_steps_read_as_many_experts_as_text(num_experts_read, num_sequences, num_rows):
    token_ids, generator = train_tokenizer(383)(TEXT)["input_ids"], random.Random(1)

    def text():
        start = generator.randrange(len(token_ids) - 80)
        return token_ids[start : start + 64 + num_rows]

    of_text = [num_experts_read([text() for _ in range(num_sequences)], num_rows) for _ in range(8)]
    profiled = num_experts_read(profiled_texts(num_sequences, num_rows), num_rows)
    assert profiled == pytest.approx(sum(of_text) / len(of_text), rel=0.15)
    assert num_experts_read([[1] * num_rows] * num_sequences, num_rows) == PER_TOKEN


@pytest.mark.parametrize("family", ["deepseek-v3", "gpt-oss"])
def test_experts_are_chosen_by_float32_logits(tmp_path, monkeypatch, family):
    """As on the native kernels, and in DeepSeek's own code: 16 bits have ties."""
    save_family(tmp_path, family)
    model = weights_of(load(tmp_path, TensorParallelGroup(), torch.bfloat16, kernels="torch"))
    mlp = next(each for each in model.modules() if isinstance(each, SparseMLP))
    x, logits = torch.randn(5, model.config.hidden_size).bfloat16(), []
    spied = lambda given, *rest: logits.append(given) or route(given, *rest)  # noqa: E731
    monkeypatch.setattr(mixture, "route", spied)
    mlp(x, None)
    bias = 0 if mlp.router.bias is None else mlp.router.bias.float()
    expected = x.float() @ mlp.router.matrix.weight.float() + bias
    torch.testing.assert_close(logits[0], expected)


@torch.inference_mode()
def test_native_and_torch_layers_choose_the_same_experts(tmp_path):
    """In bfloat16, in a family whose logits transformers rounds.

    Attention adds nothing, so that the routers of both have equal inputs. Equal experts leave
    errors of 0.008; with rounded logits 5 of 300 rows have errors of 0.05 to 0.5.
    """
    config = transformers.Qwen3MoeConfig(
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=383,
        num_experts=128,
        num_experts_per_tok=PER_TOKEN,
        moe_intermediate_size=32,
    )
    model = random_model(transformers.Qwen3MoeForCausalLM, config, seed=0)
    model.model.layers[0].self_attn.o_proj.weight.zero_()
    model.bfloat16().save_pretrained(tmp_path)
    starts = range(0, 75, 25)
    parts = [(list(range(4 * s, 4 * s + 100)), 0, list(range(s, s + 25))) for s in starts]
    hidden = []
    for kernels in ("auto", "torch"):
        loaded = load(tmp_path, TensorParallelGroup(), torch.bfloat16, kernels=kernels)
        cache = loaded.new_kv_cache(75 * BLOCK_SIZE)
        hidden.append(loaded.forward(batch_of(parts), cache).float())
    native, torchs = hidden
    errors = (native - torchs).norm(dim=1) / torchs.norm(dim=1)
    assert errors.max() < 0.03


def profiled_texts(num_sequences, num_rows):
    """Return the whole texts of the sequences of a profiled step."""
    texts, steps = {}, []

    class Recorder:
        def begin(self, step):
            for row in step.rows:
                texts[row.seq_id] = (
                    texts.get(row.seq_id, ())[: row.num_computed_tokens] + row.token_ids
                )
            if step.rows:
                steps.append([list(texts[row.seq_id]) for row in step.rows])

        def collect(self):
            return VerifyOutput(0, ())

    config = engine_config(
        max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64 + 16, num_blocks=200
    )
    tokens = tuple(train_tokenizer(383)(SAMPLE_TEXT)["input_ids"])
    profiler = CostProfiler(config, 7, time.perf_counter, text=tokens)
    profiler.verification(Recorder(), budget_s=100)
    return next(
        step
        for step in steps
        if len(step) == num_sequences and {len(each) for each in step} == {64 + num_rows}
    )
