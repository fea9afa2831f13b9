"""The real engine on tiny models of each family: no drafting method changes a token."""

from functools import cache
from itertools import product

import pytest
import torch

from specdec.config.engine import ModelOptions
from specdec.config.quantization import CPU_QUANTIZATION_METHODS
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.kernels.cpu import native_library
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.speculation.proposers import make_proposer
from specdec.worker import HeadFiles, LocalTarget, RankModel, load_target
from tests.specdec.engines import (
    draft_model,
    engine_config,
    local_engine,
    make_engine,
    request,
    run,
    tokens_by,
)
from tests.specdec.fakes import run_ranks
from tests.specdec.heads import HEADS
from tests.specdec.models.families import (
    BY_TORCH,
    BY_TRANSFORMERS,
    FAMILIES,
    LLAMA_LIKE,
    WITH_ALL_TRAITS,
    in_make_test,
    reference_model,
    save_family,
)
from tests.specdec.models.foreign import FOREIGN, save_foreign
from tests.specdec.models.recent_families import RECENT
from tests.specdec.tiny import disturbed_llama_dir, train_tokenizer

NAMES = [name for name in FAMILIES if name not in LLAMA_LIKE]
NATIVE = [name for name in NAMES if name not in BY_TORCH]
QUICK = [name for name in WITH_ALL_TRAITS if name not in RECENT or name == "gemma4"]
NATIVE_ONLY = pytest.mark.skipif(native_library() is None, reason="no C++ compiler")
NUM_TOKENS = 200
SAMPLED = {"temperature": 0.8}


@pytest.fixture(scope="module")
def directory(request, tmp_path_factory):
    """A model with its tokenizer; the parameter is the name of its family."""
    name = request.param
    directory = tmp_path_factory.mktemp(name)
    (save_family if name in FAMILIES else save_foreign)(directory, name)
    train_tokenizer(383).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def draft_dir(directory, tmp_path_factory):
    """A draft model that mostly agrees with the target."""
    return disturbed_llama_dir(directory, tmp_path_factory.mktemp("draft"), share=0.05)


def requests(**params):
    prompts = [[(29 * i + 31 * j) % 380 + 3 for j in range(6)] * (2 + 2 * i) for i in range(4)]
    return [request(f"r{i}", prompt, seed=i, **params) for i, prompt in enumerate(prompts)]


@cache
def reference(directory, quantization=None, **params):
    engine = local_engine(directory, engine_config(0), quantization=quantization)
    return tokens_by(engine, requests(**params))


def engine_with(directory, method, group=None, model=None, head=None, **options):
    """An engine with room for few of the requests. options: of `local_engine`."""
    keys = {"method": method}
    if method == "ngram":
        keys["prompt_lookup_min"] = 1
    elif model is not None or head is not None:
        keys["model"] = "given"
    speculation = SpeculativeConfig.of(num_speculative_tokens=3, **keys)
    config = engine_config(speculation=speculation, num_blocks=40)
    drafting = None if model is None else draft_model(model, group, max_model_len=90)
    proposer = make_proposer(speculation, drafting)
    files = None if head is None else HeadFiles(head)
    return local_engine(directory, config, group, proposer, head=files, **options)


def check(engine, expected, **params):
    """Run the requests twice; the second time prompts are in the prefix cache."""
    for order in (1, -1):
        assert tokens_by(engine, requests(**params)[::order]) == expected
    counts = engine.stats().counts
    assert counts.num_preemptions > 0
    assert counts.num_cached_tokens > 0
    assert counts.speculation.num_draft_tokens > 0
    return counts.speculation.num_accepted_tokens


@pytest.mark.parametrize("directory", in_make_test(QUICK), indirect=True)
@pytest.mark.parametrize("method", ["draft_model", pytest.param("ngram", marks=pytest.mark.slow)])
def test_lookups_and_a_draft_model_change_no_token(directory, draft_dir, method):
    model = draft_dir if method == "draft_model" else None
    engine = engine_with(directory, method, model=model)
    num_accepted = check(engine, reference(directory, **SAMPLED), **SAMPLED)
    assert num_accepted > 0 or method == "ngram"


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("directory", FAMILIES, indirect=True)
def test_ranks_change_no_token(directory, draft_dir, method, params, size):
    expected = reference(directory, **params)
    model = draft_dir if method == "draft_model" else None
    run_ranks(
        size,
        lambda group: check(engine_with(directory, method, group, model), expected, **params),
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["medusa", "mlp_speculator", "eagle", "eagle3", "dflash"])
@pytest.mark.parametrize("directory", NAMES, indirect=True)
def test_heads_change_no_token(directory, tmp_path, method):
    expected = reference(directory, **SAMPLED)
    texts = [[*each.prompt, *expected[each.request_id]] for each in requests()]
    head = HEADS[method](directory, tmp_path / "head", texts)
    assert check(engine_with(directory, method, head=head), expected, **SAMPLED) > 0


@pytest.mark.parametrize(
    ("directory", "size", "kernels"),
    [
        ("deepseek-v3", 1, "auto"),
        pytest.param("deepseek-v3", 2, "torch", marks=pytest.mark.slow),
        pytest.param("deepseek-v2-groups", 2, "auto", marks=pytest.mark.slow),
        pytest.param("qwen3-moe", 2, "auto", marks=pytest.mark.slow),
    ],
    indirect=["directory"],
)
def test_own_layers_with_experts_change_no_token(directory, tmp_path, size, kernels):
    expected = reference(directory, **SAMPLED)
    texts = [[*each.prompt, *expected[each.request_id]] for each in requests()]
    head = HEADS["mtp"](directory, tmp_path / "head", texts)

    def accepted(group):
        engine = engine_with(directory, "mtp", group, head=head, kernels=kernels)
        return check(engine, expected, **SAMPLED)

    assert min(run_ranks(size, accepted)) > 0


@pytest.mark.slow
@NATIVE_ONLY
@pytest.mark.parametrize("quantization", CPU_QUANTIZATION_METHODS)
@pytest.mark.parametrize("directory", NATIVE, indirect=True)
def test_drafts_change_no_token_of_a_quantized_target(directory, quantization):
    expected = reference(directory, quantization, **SAMPLED)
    assert expected != reference(directory, **SAMPLED)
    check(engine_with(directory, "ngram", quantization=quantization), expected, **SAMPLED)


@pytest.mark.slow
@NATIVE_ONLY
@pytest.mark.parametrize("directory", NATIVE, indirect=True)
def test_drafts_change_no_token_in_bfloat16(directory):
    def generated(num_draft_tokens, **changes):
        config = engine_config(num_draft_tokens, **changes)
        runner = load_target(RankModel(directory, "bfloat16", config), TensorParallelGroup())
        return tokens_by(make_engine(directory, config, LocalTarget(runner)), requests(**SAMPLED))

    assert generated(3, num_blocks=60) == generated(0)


def decoders():
    """Yield families with each decoder that runs them: native, torch, and transformers' code."""
    yield from product(FAMILIES, ("auto", "torch"))
    yield from product((*BY_TRANSFORMERS, *FOREIGN), ("transformers",))


@pytest.mark.slow
@pytest.mark.parametrize(("directory", "decoder"), list(decoders()), indirect=["directory"])
def test_long_greedy_texts_equal_transformers(directory, decoder):
    """With drafts, chunked prefill, preemption and a second run on the prefix cache."""
    is_foreign = decoder == "transformers"
    options = ModelOptions("transformers" if is_foreign else "specdec")
    model = ModelConfig.from_directory(directory, options)
    assert (model.transformers is not None) == is_foreign
    assert model.max_position_embeddings > NUM_TOKENS + 40
    config = engine_config(3, max_model_len=250, num_blocks=100, max_num_batched_tokens=32)
    kernels = "torch" if is_foreign else decoder
    engine = local_engine(directory, config, kernels=kernels, options=options)
    prompts = {"a": [5, 6, 7, 8] * 10, "b": [21, 22, 23] * 3, "c": [301, 77] * 16}
    for _ in range(2):
        given = [request(name, each, max_tokens=NUM_TOKENS) for name, each in prompts.items()]
        transcripts = run(engine, given)
        for name, prompt in prompts.items():
            tokens = transcripts[name].token_ids
            assert len(tokens) == NUM_TOKENS
            assert distance_from_best(directory, prompt, tokens) < 1e-3  # else they are ties
    counts = engine.stats().counts
    assert counts.num_preemptions > 0
    assert counts.num_cached_tokens > 0
    assert counts.speculation.num_accepted_tokens > 0


cached_model = cache(reference_model)


@torch.inference_mode()
def distance_from_best(directory, prompt, tokens):
    """Return by how much the logit of a chosen token is below the largest, at most."""
    logits = cached_model(directory)(torch.tensor([[*prompt, *tokens]])).logits[0]
    steps = logits[len(prompt) - 1 : -1]
    chosen = steps.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return float((steps.amax(1) - chosen).max())
