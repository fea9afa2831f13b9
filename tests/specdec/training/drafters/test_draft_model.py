# Modules: specdec.training.drafters.layers
"""A draft model in training: what it computes, and that it is the model that is served."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from specdec.kernels.reference.forward_batch import HiddenStates
from specdec.models.resolve import resolve
from specdec.training.data.batches import Batch
from specdec.training.data.config import TrainingConfig
from specdec.training.data.corpus import Sample
from specdec.training.data.target import Target, TargetPrecision
from specdec.training.drafters.draft_model import DraftModelDrafter, kept_layers
from specdec.training.export import export
from specdec.training.objective import Objective
from specdec.types.sampling.sampling_spec import SamplingRules
from tests.specdec.engines import draft_model
from tests.specdec.models.heads.driver import KERNELS
from tests.specdec.speculation.proposers.sequences import drafts, sequence
from tests.specdec.tiny import random_model, train_tokenizer

VOCAB, DEPTH = 383, 3
DRAFTED = torch.arange(1, VOCAB, 2)
TEXTS = [
    Sample(tuple((29 * i) % 380 + 1 for i in range(20)), num_prompt_tokens=4, temperature=0.0),
    Sample(tuple((31 * i) % 380 + 2 for i in range(9)), num_prompt_tokens=2, temperature=0.8),
]
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama, untied, with biases": (
        LlamaForCausalLM,
        LlamaConfig,
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
}


@pytest.fixture(scope="module", params=FAMILIES)
def target(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("target")
    model_class, config_class, changes = FAMILIES[request.param]
    sizes = {
        "hidden_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 80,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    }
    tokenizer = train_tokenizer(VOCAB)
    tokenizer.save_pretrained(directory)
    config = config_class(**{**sizes, **changes}, eos_token_id=tokenizer.eos_token_id)
    random_model(model_class, config, 0).save_pretrained(directory)
    return Target(directory, 64, TargetPrecision(kernels="torch"))


def config(num_layers):
    return TrainingConfig(method="draft_model", depth=DEPTH, num_layers=num_layers)


def disturbed(target, num_layers=2):
    """Return a drafter whose weights differ from the target's, norms and biases included."""
    torch.manual_seed(1)
    drafter = DraftModelDrafter(target, DRAFTED, config(num_layers))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return drafter


@torch.no_grad()
def trained_draft(drafter, text, count):
    """Return the module's greedy draft after a text."""
    tokens = list(text)
    for _ in range(count):
        # The last token of a sample is run by no pass: it is only predicted.
        batch = Batch.of([Sample((*tokens, 0), len(tokens) - 1, 0.0)])
        logits = drafter.logits(drafter.states(batch, None))[0, -1]
        tokens.append(int(DRAFTED[logits.argmax()]))
    return tuple(tokens[len(text) :])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("layout", ["published", "packed"])
def test_served_drafts_are_those_of_the_trained_module(layout, kernels, target, tmp_path):
    drafter, head = disturbed(target), tmp_path / "head"
    export(drafter, head, "float32", {}, layout)
    directory = resolve(str(head), tmp_path / "cache", lambda _: None)
    if layout == "packed":
        stored = load_file(directory / "model.safetensors")
        own = {name: stored[f"model.{name}"] for name in drafter.state_dict()}
        for name, weight in drafter.state_dict().items():
            limit = weight.abs().amax(-1, keepdim=True) / 254 + 1e-6 if weight.ndim == 2 else 0
            assert ((weight - own[name]).abs() <= limit).all(), name
        drafter.load_state_dict(own)
    for length in (3, 12, 40):
        text = [(29 * i) % 380 + 3 for i in range(length)]
        seq = sequence(1, text)
        seq.rules = SamplingRules(temperature=0)
        proposer = draft_model(directory, kernels=kernels)
        made = next(each for _ in range(9) if (each := drafts(proposer, seq, count=6)[0]))
        assert made == trained_draft(drafter, text, 6)


def test_the_published_layout_is_a_model_of_transformers(target, tmp_path):
    drafter = disturbed(target)
    export(drafter, tmp_path, "float32", {"target": "tiny"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    batch = Batch.of(TEXTS[:1])
    with torch.no_grad():
        expected = model(batch.token_ids[None]).logits[0]
        found = drafter.logits(drafter.states(batch, None))
    torch.testing.assert_close(found[0], expected[batch.bases][:, DRAFTED], rtol=1e-4, atol=1e-4)
    assert json.loads((tmp_path / "card.json").read_text()) == {"target": "tiny"}
    assert json.loads((tmp_path / "token_map.json").read_text()) == DRAFTED.tolist()


def test_all_layers_are_the_target(target):
    """The states after each base are the target's hidden states, for every draft token."""
    drafter = DraftModelDrafter(target, DRAFTED, config(num_layers=64))
    assert len(drafter.layers) == 4
    batch = Batch.of(TEXTS)
    final = target.hidden_states(batch, ()).final
    with torch.no_grad():
        states = drafter.states(batch, None)
    for index in range(DEPTH):
        torch.testing.assert_close(states[index], final[batch.after(index)], rtol=1e-4, atol=1e-4)


def test_a_loss_trains_the_layers_alone(target):
    config = TrainingConfig(method="draft_model", depth=DEPTH, loss="kl")
    gradients, losses, batch = [], [], Batch.of(TEXTS)
    hidden = target.hidden_states(batch, ())
    embedding = target.embedding.clone()
    for depth in (1, DEPTH):
        drafter = disturbed(target)
        own = dataclasses.replace(config, depth=depth)
        losses.append(Objective(own, target, DRAFTED).backward(drafter, batch, hidden).item())
        gradients.append({name: each.grad for name, each in drafter.named_parameters()})
    assert losses[0] == losses[1] > 0
    for name, gradient in gradients[0].items():
        assert gradient.abs().sum() > 0, name
        assert torch.equal(gradient, gradients[1][name])
    assert torch.equal(embedding, target.embedding)


def test_a_gradient_is_the_slope_of_the_loss(target):
    config, batch = TrainingConfig(method="draft_model", loss="kl"), Batch.of(TEXTS)
    hidden, drafter = target.hidden_states(batch, ()), disturbed(target)
    objective = Objective(config, target, DRAFTED)
    objective.backward(drafter, batch, hidden)
    slope = sum(each.grad.square().sum().item() for each in drafter.parameters())
    step = 1e-3 / slope
    losses = []
    for sign in (1, -1):
        moved = disturbed(target)
        with torch.no_grad():
            pairs = zip(moved.parameters(), drafter.parameters(), strict=True)
            for parameter, known in pairs:
                parameter.add_(sign * step * known.grad)
        losses.append(objective.backward(moved, batch, hidden))
    assert losses[0] - losses[1] == pytest.approx(2 * step * slope, rel=0.05)


def test_a_sample_learns_nothing_from_its_neighbour(target):
    drafter, both, alone = disturbed(target), Batch.of(TEXTS), Batch.of(TEXTS[1:])
    none = HiddenStates(torch.empty(0), torch.empty(0))
    with torch.no_grad():
        found = drafter.states(both, none)[:, both.spans[1].bases]
        expected = drafter.states(alone, none)
    exists = alone.exists(DEPTH)
    torch.testing.assert_close(found[exists], expected[exists], rtol=1e-4, atol=1e-4)


def test_the_first_layers_and_the_last_are_kept():
    assert kept_layers(30, 1) == (29,)
    assert kept_layers(30, 3) == (0, 1, 29)
    assert kept_layers(2, 2) == (0, 1)
