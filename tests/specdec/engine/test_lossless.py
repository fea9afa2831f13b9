"""The real engine on the tiny model: speculation, batching and ranks change no token."""

from functools import lru_cache

import pytest
import torch
from transformers import LlamaForCausalLM

from specdec.config.quantization import CPU_QUANTIZATION_METHODS
from specdec.kernels.cpu import native_library
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.types.sampling.sampling_params import SpeculationOptions
from specdec.worker import LocalTarget, RankModel, load_target
from tests.combinations import every_value
from tests.specdec.engines import engine_config, local_engine, make_engine, request, run
from tests.specdec.fakes import run_ranks

NUM_TOKENS = 24
OFF = SpeculationOptions(enabled=False)
QUANTIZED = CPU_QUANTIZATION_METHODS if native_library() else ("int8",)


def prompts(count):
    """Return repetitive prompts, so that lookups find matches; some exceed a prefill chunk."""
    generator = torch.Generator().manual_seed(5)
    pieces = torch.randint(3, 383, (count, 6), generator=generator).tolist()
    return {f"r{i}": piece * (2 + 2 * i) for i, piece in enumerate(pieces)}


@pytest.fixture(scope="module")
def greedy_reference(tiny_model_dir):
    """Return a function to the greedy tokens of transformers."""
    model = LlamaForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()

    @lru_cache
    def generate(prompt):
        with torch.inference_mode():
            output = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=NUM_TOKENS,
                min_new_tokens=NUM_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return output[0, len(prompt) :].tolist()

    return generate


def tokens_by(directory, config, requests, group=None):
    transcripts = run(local_engine(directory, config, group), requests)
    return {name: transcript.token_ids for name, transcript in transcripts.items()}


@pytest.mark.parametrize(("num_draft_tokens", "size"), every_value([0, 1, 3, 7], [1, 2, 3]))
def test_greedy_equals_transformers(tiny_model_dir, greedy_reference, size, num_draft_tokens):
    config = engine_config(num_draft_tokens)
    requests = [request(name, prompt) for name, prompt in prompts(8).items()]
    ranks = run_ranks(size, lambda group: tokens_by(tiny_model_dir, config, requests, group))
    assert all(rank == ranks[0] for rank in ranks), "ranks disagree"
    for name, prompt in prompts(8).items():
        assert ranks[0][name] == greedy_reference(tuple(prompt))


TRUNCATED = {"temperature": 1.0, "top_k": 40, "top_p": 0.8}
SAMPLINGS = [
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 5},
    TRUNCATED,
]


@pytest.mark.parametrize(
    ("sampling", "size", "lengths"),
    [
        # The greedy test has every length on several ranks.
        *zip(SAMPLINGS, (1, 1, 1, 2), ((1, 3), (7,), (3,), (7,)), strict=True),
        *(
            pytest.param(sampling, size, (1, 3, 7), marks=pytest.mark.slow)
            for sampling in SAMPLINGS
            for size in (1, 2)
        ),
    ],
    ids=str,
)
def test_tokens_depend_on_the_seed_alone(tiny_model_dir, size, sampling, lengths):
    def requests(options=None):
        speculation = options or SpeculationOptions()
        return [
            request(name, prompt, seed=70 + i, speculation=speculation, **sampling)
            for i, (name, prompt) in enumerate(prompts(8).items())
        ]

    reference = tokens_by(tiny_model_dir, engine_config(0), requests())
    assert len({tuple(tokens) for tokens in reference.values()}) == 8

    def variants(group):
        for k in lengths:
            yield tokens_by(tiny_model_dir, engine_config(k), requests(), group)
        yield tokens_by(tiny_model_dir, engine_config(3), requests(OFF), group)
        yield tokens_by(tiny_model_dir, engine_config(3, num_blocks=48), requests(), group)
        alone = [
            tokens_by(tiny_model_dir, engine_config(7), [each], group) for each in requests()[:3]
        ]
        yield reference | {name: tokens for each in alone for name, tokens in each.items()}

    for generated in run_ranks(size, lambda group: list(variants(group)))[0]:
        assert generated == reference


def test_drafts_are_accepted_and_sequences_preempted(tiny_model_dir):
    """The tests above rely on it."""
    engine = local_engine(tiny_model_dir, engine_config(3, num_blocks=48))
    run(engine, [request(name, prompt) for name, prompt in prompts(8).items()])
    stats = engine.stats()
    assert stats.counts.num_preemptions > 0
    assert stats.counts.speculation.num_accepted_tokens > 0
    assert stats.counts.speculation.num_accepted_tokens < stats.counts.speculation.num_draft_tokens


def test_another_seed_gives_other_tokens(tiny_model_dir):
    def generated(seed):
        requests = [request("r", [5, 6, 7], seed=seed, temperature=1.0)]
        return tokens_by(tiny_model_dir, engine_config(0), requests)["r"]

    assert generated(1) == generated(1)
    assert generated(1) != generated(2)


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_a_quantized_target_generates_the_same_in_any_batch_with_any_drafts(
    tiny_model_dir, quantization
):
    requests = [
        request(name, prompt, seed=index, temperature=0.8 * (index % 2))
        for index, (name, prompt) in enumerate(prompts(6).items())
    ]

    def generated(num_draft_tokens, batches):
        config = engine_config(num_draft_tokens)
        engine = local_engine(tiny_model_dir, config, quantization=quantization)
        parts = [run(engine, batch) for batch in batches]
        return {name: each.token_ids for part in parts for name, each in part.items()}

    alone = generated(0, [[each] for each in requests])
    for num_draft_tokens in (0, 1, 3, 7):
        assert generated(num_draft_tokens, [requests]) == alone


@pytest.mark.skipif(native_library() is None, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_kernels_are_batch_invariant(tiny_model_dir, dtype):
    """Log-probabilities have the same bits with any drafts and chunks."""
    requests = [
        request(name, prompt, seed=index, temperature=0.8 * (index % 2), logprobs=2)
        for index, (name, prompt) in enumerate(prompts(6).items())
    ]

    def generated(num_draft_tokens, batches, **changes):
        config = engine_config(num_draft_tokens, **changes)
        runner = load_target(RankModel(tiny_model_dir, dtype, config), TensorParallelGroup())
        engine = make_engine(tiny_model_dir, config, LocalTarget(runner))
        parts = [run(engine, batch) for batch in batches]
        return {
            name: [row for step in each.logprobs for row in step.logprobs.tolist()]
            for part in parts
            for name, each in part.items()
        }

    alone = generated(0, [[each] for each in requests])
    assert all(len(each) == NUM_TOKENS for each in alone.values())
    assert generated(0, [requests]) == alone
    assert generated(7, [requests], max_num_batched_tokens=24) == alone
    assert generated(3, [requests], num_blocks=48) == alone
