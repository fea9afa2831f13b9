# Modules: specdec.kernels.cpu.lora, specdec.models.lora.native_adapters
# Modules: specdec.models.lora.torch_adapters, specdec.models.lora.updated_matrix
"""Passes with adapters: each row equals its adapter merged, and has the bits that it has alone."""

from itertools import cycle

import pytest
import torch

from specdec.kernels.cpu import native_library
from specdec.kernels.cpu.lora import LoraArrays, LoraLayerStruct, run_structs
from specdec.kernels.reference.forward_batch import AdapterRun, Chunk, ForwardBatch
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.cpu_decoder import NativeDecoder
from specdec.models.hybrid import HybridDecoder
from specdec.models.lora.peft import AdapterFiles
from specdec.models.lora.updates import load_adapter
from tests.specdec.adapters import ALL_LINEAR, ATTENTION, adapter_dir, merged_dir
from tests.specdec.fakes import run_ranks
from tests.specdec.models.families import save_family
from tests.specdec.models.passes import load, weights_of
from tests.specdec.threads import num_threads
from tests.specdec.tiny import tiny_llama_dir

KERNELS = ["torch", "native"] if native_library() else ["torch"]
NATIVE_ONLY = pytest.mark.skipif(native_library() is None, reason="no C++ compiler")
BLOCK_SIZE, NUM_BLOCKS = 4, 20
NUM_ADAPTERS = 8


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tiny_llama_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapters(model_dir, tmp_path_factory):
    """Return eight adapters that differ in all that adapters can differ in."""
    root = tmp_path_factory.mktemp("adapters")
    variants = [
        {},
        {"rank": 1, "modules": ("q_proj", "v_proj")},
        {"rank": 8, "modules": ATTENTION, "use_rslora": True},
        {"rank": 16, "layers": [1], "lora_alpha": 3.5},
        {"rank": 5, "modules": ("down_proj",)},
        {"rank": 3, "dtype": torch.bfloat16},
        {"rank": 20, "modules": ("k_proj", "up_proj", "o_proj")},
        {"rank": 2, "alpha_pattern": {"q_proj": 9, "down_proj": 1}},
    ]
    return [
        adapter_dir(root / str(index), model_dir, seed=index, **each)
        for index, each in enumerate(variants)
    ]


def load_with(directory, adapters, group=None, **options):
    """Load a model, and adapters under the ids from 1 on."""
    model = load(directory, group or TensorParallelGroup(), **options)
    store = model.enable_adapters()
    for adapter_id, path in enumerate(adapters, start=1):
        load_adapter(store, adapter_id, AdapterFiles.read(path, 64))
    return model


def texts(count, length=11):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, 383, (count, length), generator=generator).tolist()


class Passes:
    """Runs chunks of sequences, each with an adapter, and keeps their logits."""

    def __init__(self, model):
        self.model = model
        self.cache = model.new_kv_cache(NUM_BLOCKS * 40 * BLOCK_SIZE)
        self.starts = {}
        if isinstance(decoder := weights_of(model), HybridDecoder):
            decoder.enable_states(40, max_guesses=8)

    @torch.inference_mode()
    def run(self, *parts, num_guesses=0, num_accepted=0):
        """Run parts (sequence, token_ids, adapter id); return the logits of each.

        num_guesses: last tokens of each part, of which the next part of a sequence follows after
        num_accepted.
        """
        chunks = []
        for index, ids, adapter_id in parts:
            start = self.starts.get(index, 0)
            table = list(range(index * NUM_BLOCKS, (index + 1) * NUM_BLOCKS))
            how = {"adapter_id": adapter_id, "num_guesses": num_guesses, "state_slot": index}
            chunks.append(Chunk(ids, start, table, **how))
            self.starts[index] = start + len(ids) - num_guesses + num_accepted
        hidden = self.model(ForwardBatch(chunks, BLOCK_SIZE), self.cache)
        logits = self.model.compute_logits(hidden)
        return [each.clone() for each in logits.split([len(ids) for _, ids, _ in parts])]


def mixed(model, prompts):
    """Run one sequence for each adapter and one without, in chunks; return logits by adapter."""
    passes, pieces = Passes(model), {}
    plan = [[(i, 0, 6) for i in range(len(prompts))], [(i, 6, 10) for i in range(len(prompts))]]
    plan.append([(i, 10, 11) for i in reversed(range(len(prompts)))])
    for step in plan:
        parts = [(i, prompts[i][begin:end], i) for i, begin, end in step]
        for (i, _, _), logits in zip(step, passes.run(*parts), strict=True):
            pieces.setdefault(i, []).append(logits)
    return [torch.cat(pieces[i]) for i in range(len(prompts))]


def merged_logits(directory, prompt):
    model = load(directory, TensorParallelGroup(), kernels="torch")
    return Passes(model).run((0, prompt, 0))[0]


@pytest.fixture(scope="module")
def expected(model_dir, adapters, tmp_path_factory):
    """Return the logits of the model, then those with each adapter merged into its weights."""
    root, prompts = tmp_path_factory.mktemp("merged"), texts(NUM_ADAPTERS + 1)
    merged = [merged_dir(root / each.name, model_dir, each) for each in adapters]
    pairs = zip([model_dir, *merged], prompts, strict=True)
    return [merged_logits(directory, prompt) for directory, prompt in pairs]


@pytest.mark.parametrize(
    ("kernels", "size"),
    [
        pytest.param(kernels, size, marks=() if size in quick else pytest.mark.slow)
        for kernels, quick in zip(KERNELS[::-1], ((1, 3), (2,)), strict=False)
        for size in (1, 2, 3)
    ],
)
def test_rows_of_a_batch_equal_their_adapters_merged(model_dir, adapters, expected, kernels, size):
    def logits(group):
        return mixed(load_with(model_dir, adapters, group, kernels=kernels), texts(9))

    ranks = run_ranks(size, logits)
    found = [torch.cat(parts, dim=1) for parts in zip(*ranks, strict=True)]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    distances = [(ours - expected[0]).abs().max() for ours in found[1:]]
    assert min(distances) > 0.1, "an adapter changes nothing, so the test cannot fail"


@NATIVE_ONLY
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.float16, None),
        (torch.float32, "int8"),
        (torch.bfloat16, "w8a8"),
    ],
)
def test_row_has_the_bits_that_it_has_alone(model_dir, adapters, dtype, quantization):
    options = {"kernels": "native", "dtype": dtype, "quantization": quantization}
    model, prompts = load_with(model_dir, adapters, **options), texts(9)
    assert isinstance(model, NativeDecoder)
    together = mixed(model, prompts)
    for index, prompt in enumerate(prompts):
        alone = Passes(model).run((index, prompt, index))[0]
        assert torch.equal(alone, together[index])
        if index % 4:
            continue  # a load takes most of the time
        only = load_with(model_dir, adapters[:index], **options)
        assert torch.equal(Passes(only).run((0, prompt, index))[0], alone)


@NATIVE_ONLY
@pytest.mark.parametrize("count", [2, 3, 5])
def test_bits_do_not_depend_on_threads(model_dir, adapters, count):
    model, prompts = load_with(model_dir, adapters, kernels="native"), texts(9)
    with num_threads(1):
        alone = mixed(model, prompts)
    with num_threads(count):
        assert all(map(torch.equal, mixed(model, prompts), alone))


@NATIVE_ONLY
def test_a_row_without_an_adapter_has_the_bits_of_a_model_without_adapters(model_dir, adapters):
    prompts = texts(9)
    plain = load(model_dir, TensorParallelGroup(), kernels="native")
    expected = Passes(plain).run((0, prompts[0], 0))[0]
    assert torch.equal(mixed(load_with(model_dir, adapters), prompts)[0], expected)


FAMILIES = (
    "llama-biases",
    "qwen3",
    "phi3",  # one tensor for queries, keys and values, and one for gate and up projection
    "gemma2",
    "glm4",  # heads in another order, and norms after projections
    "olmo3",
    "starcoder2",  # no gate
    "cohere",  # parallel layers
    "granite",  # scaled projections
)


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        pytest.param(family, kernels, marks=() if kernels == quick else pytest.mark.slow)
        for family, quick in zip(FAMILIES, cycle(KERNELS), strict=False)
        for kernels in KERNELS
    ],
)
def test_other_families_take_adapters(tmp_path, kernels, family):
    save_family(tmp_path / "model", family)
    adapter = adapter_dir(tmp_path / "adapter", tmp_path / "model", rank=6, modules=None, gain=0.3)
    merged = merged_dir(tmp_path / "merged", tmp_path / "model", adapter)
    (prompt,) = texts(1)
    expected, plain = merged_logits(merged, prompt), merged_logits(tmp_path / "model", prompt)
    assert (expected - plain).abs().max() > 0.05

    def logits(group):
        model = load_with(tmp_path / "model", [adapter], group, kernels=kernels)
        return Passes(model).run((0, prompt, 1))[0]

    found = torch.cat(run_ranks(2, logits), dim=1)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_rank_reads_only_its_part(model_dir, adapters, kernels):
    """Layers that divide their outputs have all of A, the others all of B."""

    def sizes(group):
        model = load(model_dir, group, kernels=kernels)
        store, seen = model.enable_adapters(), {}
        store.set = lambda _, updates: seen.update(updates)
        load_adapter(store, 1, AdapterFiles.read(adapters[0], 64))
        return [
            (tuple(each.shrink.shape), [tuple(part.weight.shape) for part in each.expansions])
            for each in list(seen.values())[:4]
        ]

    first, second = run_ranks(2, sizes)
    qkv, output, gate_up, down = first
    assert qkv == ((12, 144), [(64, 4), (32, 4), (32, 4)])
    assert output == ((4, 64), [(144, 4)])
    assert gate_up == ((8, 144), [(100, 4), (100, 4)])
    assert down == ((4, 100), [(144, 4)])
    assert second[1] == ((4, 80), [(144, 4)])


@pytest.mark.parametrize("kernels", KERNELS)
def test_an_id_is_free_after_it_is_dropped(model_dir, adapters, kernels):
    model = load_with(model_dir, adapters[:1], kernels=kernels)
    store = model.enable_adapters() if kernels == "native" else model._adapters
    (prompt,) = texts(1)
    before = Passes(model).run((0, prompt, 1))[0]
    load_adapter(store, 2, AdapterFiles.read(adapters[3], 64))
    store.drop(1)
    store.drop(77)
    with pytest.raises((KeyError, AssertionError)):
        Passes(model).run((0, prompt, 1))
    assert not torch.equal(Passes(model).run((0, prompt, 2))[0], before)


def test_a_pass_leaves_no_adapter_selected(model_dir, adapters):
    """Passes of fixed shape on a device follow it, and have none."""
    model = load_with(model_dir, adapters[:1], kernels="torch")
    (prompt,) = texts(1)
    Passes(model).run((0, prompt, 1))
    matrix = model.layers[0].mlp.down_proj.matrix
    x = torch.randn(len(prompt), 200)
    assert torch.equal(matrix.multiply(x), matrix.base.multiply(x))


@NATIVE_ONLY
def test_a_pass_of_a_model_without_adapters_looks_for_none(model_dir, monkeypatch):
    def fail(batch):
        raise AssertionError("adapters are off")

    monkeypatch.setattr(ForwardBatch, "adapter_runs", property(fail))
    (prompt,) = texts(1)
    Passes(load(model_dir, TensorParallelGroup(), kernels="native")).run((0, prompt, 0))


def test_runs_join_neighbours_of_the_same_adapter():
    chunks = [Chunk([1] * n, 0, [0], adapter_id=a) for n, a in ((2, 0), (3, 1), (1, 1), (2, 2))]
    chunks += [Chunk([1], 0, [0]), Chunk([1], 0, [0], adapter_id=2)]
    runs = ForwardBatch(chunks, BLOCK_SIZE).adapter_runs
    assert runs == [AdapterRun(1, 2, 6), AdapterRun(2, 6, 8), AdapterRun(2, 9, 10)]


def test_all_linear_layers_are_covered(adapters):
    files = AdapterFiles.read(adapters[0], 64)
    assert {module.split(".", 3)[3] for module in files.ranks} == set(ALL_LINEAR)


def test_kernels_get_no_runs_of_adapters_that_update_no_layer():
    layers = (LoraLayerStruct * 1)()
    runs = [AdapterRun(1, 0, 2), AdapterRun(2, 2, 5)]
    found = run_structs(runs, {1: LoraArrays(layers, 0), 2: LoraArrays(layers, 8)})
    assert [(each.width, each.begin, each.end) for each in found] == [(8, 2, 5)]
