# Modules: specdec.models.layers.recurrences.recurrent_layer
# Modules: specdec.models.layers.recurrences.recurrent
# Modules: specdec.models.layers.recurrences.gated_delta
# Modules: specdec.models.layers.recurrences.short_convolution
# Modules: specdec.models.layers.recurrences.state_space
# Modules: specdec.models.layers.recurrences.kimi_delta, specdec.models.layers.one_block
# Modules: specdec.models.layers.recurrences.selective_scan, specdec.kernels.cpu.recurrence
"""Reference tests: each family with recurrent layers against transformers."""

from functools import cache
from math import prod

import pytest
import torch
import transformers

from specdec.config.engine import ModelOptions
from specdec.kernels.cpu import native_library
from specdec.kernels.reference.forward_batch import Chunk, ForwardBatch
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.decoder_tensors import decoder_tensors
from specdec.models.config.families.native_recurrence import recurrence_fault
from specdec.models.config.model_config import ModelConfig
from specdec.models.config.recurrent import SelectiveScan
from specdec.models.cpu_decoder import NativeHybridDecoder
from specdec.models.hybrid import HybridDecoder
from specdec.models.weights.checkpoint import open_checkpoint
from specdec.models.weights.checks import check_tensors
from specdec.types.errors import InvalidValueError
from tests.specdec.engines import engine_config, local_engine, request, tokens_by
from tests.specdec.fakes import run_ranks
from tests.specdec.models.families import SIZES, config_class, reference_model, save_family
from tests.specdec.models.hybrid_families import HYBRIDS, QUICK, SCALES
from tests.specdec.models.passes import BLOCK_SIZE, in_pass_order, load, mixed_logits, weights_of
from tests.specdec.threads import num_threads
from tests.specdec.tiny import random_model, train_tokenizer

TOLERANCE = 1e-4
NUM_TOKENS = 100
"""More than a chunk of the gated delta rule."""

COMPILED = pytest.mark.skipif(native_library() is None, reason="no C++ compiler")
KERNELS = pytest.mark.parametrize("kernels", ["torch", pytest.param("auto", marks=COMPILED)])

NATIVE = (
    "Lfm2ForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "GraniteMoeHybridForCausalLM",
)
"""Architectures that native kernels run."""


@cache
def reference(directory):
    return reference_model(directory)


def reference_logits(directory, ids):
    with torch.inference_mode():
        return reference(directory)(torch.tensor([ids])).logits[0]


FAMILIES = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in HYBRIDS
]


def families_and_kernels():
    """Yield directories and kernels; slow are those that run on torch's whatever is given."""
    for name in HYBRIDS:
        is_native = f"{HYBRIDS[name][0]}ForCausalLM" in NATIVE
        yield pytest.param(name, "torch", marks=[] if name in QUICK else pytest.mark.slow)
        marks = [] if name in QUICK and is_native else [pytest.mark.slow]
        yield pytest.param(name, "auto", marks=[*marks, COMPILED])


WITH_KERNELS = pytest.mark.parametrize(
    ("directory", "kernels"), list(families_and_kernels()), indirect=["directory"]
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function that writes each family once, for all tests."""

    @cache
    def save(name):
        directory = tmp_path_factory.mktemp(name)
        save_family(directory, name)
        return directory

    return save


@pytest.fixture(params=FAMILIES)
def directory(request, saved):
    return saved(request.param)


def text(length=NUM_TOKENS, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 383, (length,), generator=generator).tolist()


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


class Passes:
    """Passes of one sequence, in slot 1 of two."""

    def __init__(self, directory, kernels="auto", max_guesses=8, **how):
        self.model = load(directory, TensorParallelGroup(), kernels=kernels, **how)
        self.cache = self.model.new_kv_cache(128)
        self.states = weights_of(self.model).enable_states(2, max_guesses)
        self.table = list(range(128 // BLOCK_SIZE))

    def run(self, token_ids, start, num_guesses=0):
        return self.run_beside(token_ids, start, num_guesses=num_guesses)

    @torch.inference_mode()
    def run_beside(self, token_ids, start, *others, num_guesses=0):
        """Run a row after those of other sequences, and return its logits."""
        chunk = Chunk(token_ids, start, self.table, num_guesses=num_guesses, state_slot=1)
        hidden = self.model(ForwardBatch([*others, chunk], BLOCK_SIZE), self.cache)
        return self.model.compute_logits(hidden)[-len(token_ids) :].clone()


@WITH_KERNELS
@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_logits_equal_transformers(directory, size, kernels):
    ids = [text(40), text(40, seed=2)]
    parts = run_ranks(size, lambda group: mixed_logits(directory, ids, group, kernels=kernels))
    expected = in_pass_order([reference_logits(directory, each) for each in ids])
    assert_close(torch.cat(parts, dim=1), expected)


@pytest.mark.slow
def test_ranks_may_have_whole_experts(directory):
    if ModelConfig.from_directory(directory).experts is None:
        pytest.skip("no experts")
    ids, options = [text(40), text(40, seed=2)], ModelOptions(divides_by_expert=True)
    parts = run_ranks(2, lambda group: mixed_logits(directory, ids, group, options=options))
    expected = in_pass_order([reference_logits(directory, each) for each in ids])
    assert_close(torch.cat(parts, dim=1), expected)


@WITH_KERNELS
@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_a_prompt_may_be_chunked_anywhere(directory, step, kernels):
    ids, passes = text(), Passes(directory, kernels)
    expected = reference_logits(directory, ids)
    for border in range(1, NUM_TOKENS, step):
        passes.states.reset(1)
        logits = torch.cat((passes.run(ids[:border], 0), passes.run(ids[border:], border)))
        assert_close(logits, expected)


@WITH_KERNELS
def test_guesses_leave_no_state(directory, kernels):
    """Whatever number of guesses is accepted, and whatever the others were."""
    ids, plain, passes = text(60), Passes(directory, kernels), Passes(directory, kernels)
    plain.run(ids[:40], 0)
    passes.run(ids[:40], 0)
    expected = torch.cat([plain.run([token], 40 + index) for index, token in enumerate(ids[40:])])
    start = 40
    for num_accepted in (0, 3, 5, 1, 0, 4):
        guesses = [*ids[start + 1 : start + 1 + num_accepted], *[7] * (5 - num_accepted)]
        logits = passes.run([ids[start], *guesses], start, num_guesses=5)
        own = slice(start - 40, start - 40 + num_accepted + 1)
        assert_close(logits[: num_accepted + 1], expected[own])
        start += num_accepted + 1
    passes.run([ids[start]], start)
    assert start + 1 == 60
    assert_close(passes.states.memory[:, 1], plain.states.memory[:, 1])
    window = slice(passes.states.window)
    assert_close(passes.states.inputs[:, 1, window], plain.states.inputs[:, 1, window])


def native_passes(directory, **how):
    config = ModelConfig.from_directory(directory)
    if config.architecture not in NATIVE and recurrence_fault(config.recurrent) is not None:
        pytest.skip("torch runs it")
    passes = Passes(directory, **how)
    assert isinstance(passes.model, NativeHybridDecoder)
    return passes


@COMPILED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_native_rows_are_the_same_bits_however_they_run(directory, dtype):
    """In any batch, with any chunks and threads, and after any number of accepted guesses."""
    ids, plain, passes = text(60), *(native_passes(directory, dtype=dtype) for _ in range(2))
    expected = plain.run(ids, 0)
    expected = torch.cat((expected, plain.run([9], 60)))
    other = Chunk(text(23, seed=5), 0, list(range(16, 24)), num_guesses=6)
    poisoned = Chunk([5], 23, list(range(16, 24)))
    found = [passes.run_beside(ids[:20], 0, other), passes.run(ids[20:37], 20)]
    passes.states.memory[:, 0] = passes.states.inputs[:, 0] = torch.nan
    found.append(passes.run_beside([*ids[37:41], 7, 8], 37, poisoned, num_guesses=5)[:4])
    with num_threads(3):
        found += [passes.run([*ids[41:60], 9, 1], 41, num_guesses=1)[:-1]]
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(passes.states.memory[:, 1], plain.states.memory[:, 1])


@COMPILED
@pytest.mark.parametrize(
    ("how", "limit"),
    [
        ({"dtype": torch.bfloat16}, 0.03),
        ({"dtype": torch.float16}, 0.004),
        ({"quantization": "int8"}, 0.05),
        ({"quantization": "w8a8"}, 0.07),
    ],
    ids=["bf16", "fp16", "int8", "w8a8"],
)
def test_native_formats_are_close_to_float32(directory, how, limit):
    """In most rows: in some a rounding error selects another expert."""
    ids, passes = text(), native_passes(directory, **how)
    expected = reference_logits(directory, ids)
    error = torch.cat((passes.run(ids[:50], 0), passes.run(ids[50:], 50))) - expected
    assert (error.norm(dim=1) / expected.norm(dim=1)).median() < limit


def test_a_row_outside_of_the_accepted_tokens_is_an_error(directory):
    passes = Passes(directory)
    passes.run(text(20), 0)
    passes.run(text(4), 20, num_guesses=3)
    for start in (20, 25):
        with pytest.raises(AssertionError, match="outside the accepted tokens"):
            passes.run([5], start)
    with pytest.raises(AssertionError, match="beside a tree"):
        passes.states.plan(ForwardBatch([Chunk([5, 6], 21, passes.table, (-1, -1))], BLOCK_SIZE))


def test_every_parameter_is_read_and_counted(directory):
    config = ModelConfig.from_directory(directory)
    reader = open_checkpoint(directory, torch.float32)
    HybridDecoder(config, reader, TensorParallelGroup(), 128, BLOCK_SIZE)
    expected = reference(directory)
    biases = {name: each for name, each in expected.named_buffers() if name.endswith("_bias")}
    num_expected = expected.num_parameters() + sum(map(torch.numel, biases.values()))
    assert config.num_parameters == reader.num_elements_read == num_expected
    tensors = decoder_tensors(config, reader.tensors)
    found = check_tensors(reader.tensors, reader.weight_format, tensors)
    assert (found.faults, found.unused, found.known_unused) == ((), "", "")
    assert sum(map(prod, tensors.values())) == config.num_parameters


@pytest.mark.slow
@WITH_KERNELS
def test_greedy_text_equals_transformers(directory, kernels):
    """200 tokens, with drafts."""
    train_tokenizer(383).save_pretrained(directory)
    prompt = text(30)
    config = engine_config(4, max_model_len=240, keeps_guesses=True, enable_prefix_caching=False)
    engine = local_engine(directory, config, kernels=kernels)
    found = tokens_by(engine, [request("a", prompt, max_tokens=200)])["a"]
    with torch.inference_mode():
        expected = reference(directory).generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=200,
            min_new_tokens=200,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    assert found == expected[0, 30:].tolist()


def test_states_are_divided_over_ranks(directory):
    recurrent = ModelConfig.from_directory(directory).recurrent
    assert recurrent is not None
    whole = recurrent.state_bytes("float32", 1, num_guesses=8)
    shared = getattr(recurrent.kind, "group_channels", 0)  # that every rank has, per input
    copies = len(recurrent.layers) * (recurrent.kind.kernel_size - 1 + 8) * 2 * shared * 4
    # One rank of Jamba keeps hidden states of guesses, more ranks have inputs, twice as many.
    inputs = 0
    if isinstance(recurrent.kind, SelectiveScan):
        inputs = len(recurrent.layers) * 8 * recurrent.kind.hidden_size * 4
    for size in (2, 3):
        found = recurrent.state_bytes("float32", size, num_guesses=8)
        assert found == whole + (size - 1) * copies + inputs
    pool = Passes(directory).states
    tensors = (pool.inputs[:, 0], pool.tails[:, 0], pool.memory[:, 0])
    assert sum(each.numel() for each in tensors) * 4 == whole
    too_many = recurrent.kind.num_units + 1
    with pytest.raises(InvalidValueError, match=f"tensor_parallel_size.*{too_many}"):
        recurrent.units(0, too_many)


@pytest.mark.parametrize("name", ["qwen3.5", pytest.param("qwen3.5-moe", marks=pytest.mark.slow)])
def test_the_text_model_of_a_multimodal_checkpoint(tmp_path, name):
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    family, changes = HYBRIDS[name]
    text_config = config_class(family)(**{**SIZES, **changes})
    config = getattr(transformers, f"{family}Config")(
        text_config=text_config,
        vision_config=vision | {"out_hidden_size": SIZES["hidden_size"]},
        tie_word_embeddings=False,
    )
    whole_class = getattr(transformers, f"{family}ForConditionalGeneration")
    whole = random_model(whole_class, config, seed=3)
    for weight in whole.model.language_model.layers.parameters():
        weight.data *= SCALES[family] / 2 if weight.ndim >= 2 else 1.0
    whole.set_attn_implementation("eager")
    whole.set_experts_implementation("eager")
    whole.save_pretrained(tmp_path, save_original_format=False)  # the published one
    ids = [text(40), text(40, seed=2)]
    with torch.inference_mode():
        expected = [whole(input_ids=torch.tensor([each])).logits[0] for each in ids]
    assert_close(mixed_logits(tmp_path, ids, TensorParallelGroup()), in_pass_order(expected))
    assert ModelConfig.from_directory(tmp_path).text_part_of == type(whole).__name__
