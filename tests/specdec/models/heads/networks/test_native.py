# Modules: specdec.kernels.cpu.medusa, specdec.models.heads.networks.native_dflash
# Modules: specdec.models.heads.networks.native_medusa
"""Heads with attention on native kernels: whole drafts, on one rank and on several."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.kernels.cpu import native_library
from specdec.models.heads.networks.native import NativeHead
from specdec.models.heads.networks.native_dflash import NativeDFlashHead
from specdec.models.heads.networks.native_medusa import NativeMedusaHeads
from specdec.sampling.row_ops import RowOps
from specdec.sampling.sampling_batch import SamplingBatch
from specdec.types.drafts.draft_tree import TreeSize
from specdec.worker.head.path_tree import PathTrees
from specdec.worker.head.sampler import PartialDraft
from tests.specdec.fakes import run_ranks
from tests.specdec.models.heads import driver
from tests.specdec.models.heads.driver import VOCAB, Drafting, save, sequences
from tests.specdec.models.heads.formats.test_eagle import CONFIG as EAGLE_CONFIG
from tests.specdec.models.heads.formats.test_eagle import eagle_weights
from tests.specdec.models.heads.native_drafts import (
    COUNTS,
    WholeDrafts,
    make_head,
    params,
    rank_drafts,
)
from tests.specdec.models.heads.networks.test_dflash import (
    LAYERS,
    MARKOV,
    WINDOWED,
    block_weights,
    save_dspark,
    speculators,
)
from tests.specdec.models.heads.networks.test_eagle3 import CONFIG as EAGLE3_CONFIG
from tests.specdec.models.heads.networks.test_eagle3 import eagle3_weights
from tests.specdec.models.heads.networks.test_medusa import medusa_weights, original
from tests.specdec.processes import results, run_processes

pytestmark = pytest.mark.skipif(native_library() is None, reason="no C++ compiler")

NUM_NODES = 24


def save_eagle(directory):
    return save(directory, EAGLE_CONFIG, eagle_weights())


def save_eagle3(directory):
    return save(directory, EAGLE3_CONFIG | {"draft_vocab_size": 120}, eagle3_weights())


def save_dflash(directory):
    """Write a head with a window and a reduced vocabulary, whose blocks are causal in one layer."""
    made = block_weights(vocab=100) | {"d2t": torch.arange(100) * 2}
    layers = speculators(
        "dflash",
        draft_vocab_size=100,
        transformer_layer_config=LAYERS | WINDOWED,
        sliding_window_non_causal=False,
    )
    return save(directory, layers, made)


KINDS = {
    "eagle": (save_eagle, NativeHead),
    "eagle3": (save_eagle3, NativeHead),
    "dflash": (save_dflash, NativeDFlashHead),
    **{f"dspark-{kind}": (partial(save_dspark, kind=kind), NativeDFlashHead) for kind in MARKOV},
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def directory(kind, tmp_path_factory):
    path = tmp_path_factory.mktemp(kind)
    KINDS[kind][0](path)
    return path


def drafts_by_steps(head, parts, temperature):
    """Draft token by token from the logits, in torch."""
    own = WholeDrafts(head, parts)
    state = own.begin([1] * len(parts), [len(part.tokens) for part in parts], max(COUNTS))
    ids = torch.arange(VOCAB) if head.target_ids is None else head.target_ids
    drafts = []
    for index in range(max(COUNTS)):
        logits = torch.full((len(parts), VOCAB), -torch.inf)
        logits[:, ids] = head.logits(state, index)
        rows = params(temperature)
        rows["position"] += index
        drafts.append(
            RowOps().sample_batch(logits, SamplingBatch.from_params(rows, "cpu")).tolist()
        )
        if index + 1 < max(COUNTS):
            state = head.advance(state, drafts[-1], index)
    by_sequence = zip(*drafts, strict=True)
    return [list(tokens[:count]) for tokens, count in zip(by_sequence, COUNTS, strict=True)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_whole_drafts_equal_those_of_steps(kind, directory, target_dir, temperature):
    head = make_head(directory, target_dir)
    assert isinstance(head, KINDS[kind][1])
    assert head.capabilities.drafts_whole
    found = WholeDrafts(head, sequences()).draft(temperature)
    assert found == drafts_by_steps(head, sequences(), temperature)


def trees_by_levels(head, parts, temperature, sizes):
    """Draft trees level by level from the logits, in torch."""
    own = WholeDrafts(head, parts)
    state = own.begin([1] * len(parts), [len(part.tokens) for part in parts], max(COUNTS))
    ids = torch.arange(VOCAB) if head.target_ids is None else head.target_ids
    drafts = [PartialDraft(row, 9, *size) for row, size in enumerate(sizes)]
    trees, index = PathTrees(drafts), 0
    while trees.num_rows:
        logits = torch.full((trees.num_rows, VOCAB), -torch.inf)
        logits[:, ids] = head.logits(state, index)
        own_params = params(temperature)[[end.seq_id for end in trees.ends()]]
        own_params["position"] += index
        batch = SamplingBatch.from_params(own_params, "cpu")
        children = RowOps().children(logits, batch, trees.num_ranks, on_host=True)
        trees.add_level(*(column.numpy() for column in children))
        if trees.num_rows:
            rows, tokens = trees.frontier
            state, index = head.advance(head.select(state, rows), tokens, index), index + 1
    trees.finish()
    return [(draft.token_ids, list(draft.parents or range(-1, 4))) for draft in drafts]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("markov", MARKOV)
def test_whole_trees_equal_those_of_levels(markov, temperature, target_dir, tmp_path):
    """The last of them is a chain. The path decides more than the slot of the block."""
    made = save_dspark(tmp_path / "head", markov)
    for name in ("markov_w2", "joint_proj"):
        if (tensor := made.get(f"markov_head.{name}.weight")) is not None:
            tensor *= 6
    save(tmp_path / "head", None, made)
    head = make_head(tmp_path / "head", target_dir)
    assert head.capabilities.drafts_whole_trees
    sizes = [TreeSize(NUM_NODES, 4), TreeSize(11, 2), TreeSize(5, 5)]
    expected = trees_by_levels(head, sequences(), temperature, sizes)
    assert [len(tokens) for tokens, _ in expected] == [NUM_NODES, 11, 5]
    assert WholeDrafts(head, sequences()).draft_trees(temperature, sizes) == expected
    chain = WholeDrafts(head, sequences()).draft(temperature)[0][:4]
    assert expected[0][0][:4] == chain


@pytest.mark.parametrize("kind", ["eagle3", "dspark-rnn"])
def test_ranks_that_share_memory_draft_the_same(kind, target_dir, tmp_path):
    directory = tmp_path / "head"
    KINDS[kind][0](directory)
    found = results(run_processes(2, rank_drafts, directory, target_dir, tmp_path / "address"))
    head = make_head(directory, target_dir)
    expected = [WholeDrafts(head, sequences()).draft(each) for each in (0.0, 0.8)]
    assert found == [expected, expected]


@pytest.mark.parametrize("save_head", [save_eagle3, save_dflash])
def test_ranks_agree_on_whole_drafts_where_tokens_do_not_ascend(save_head, target_dir, tmp_path):
    """Also where those of one rank do: another one would call other collectives."""
    save_head(tmp_path / "head")
    path = tmp_path / "head" / "model.safetensors"
    tensors = load_file(path)
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    tensors["d2t"][:2] += ids[[1, 0]] - ids[:2]
    save_file(tensors, path)

    def load(group):
        head = make_head(tmp_path / "head", target_dir, group)
        head._kernel.can_draft = True  # as with ranks that share memory
        return head.capabilities.drafts_whole

    assert run_ranks(2, load) == [False, False]


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_blocks_depend_neither_on_the_batch_nor_on_chunks(
    tmp_path, target_dir, quantization, block_size, monkeypatch
):
    monkeypatch.setattr(driver, "BLOCK_SIZE", block_size)
    save_dspark(tmp_path / "head", "rnn")
    head, parts = make_head(tmp_path / "head", target_dir, quantization=quantization), sequences()
    together = Drafting(head, parts).run()
    assert torch.equal(Drafting(head, parts).run(borders=(5, 12)), together)
    for index, part in enumerate(parts):
        assert torch.equal(Drafting(head, [part]).run()[0], together[index])
    assert torch.equal(Drafting(head, parts).run(num_drafts=2), together[:, :2])


def test_a_block_draft_ends_where_logits_are_not_numbers(tmp_path, target_dir):
    made = save_dspark(tmp_path / "head", "vanilla")
    head = make_head(tmp_path / "head", target_dir)
    before = WholeDrafts(head, sequences()).draft(0.0)
    made["markov_head.markov_w1.weight"][before[0][1]] = float("nan")
    save(tmp_path / "head", None, made)
    found = WholeDrafts(make_head(tmp_path / "head", target_dir), sequences()).draft(0.0)
    assert found[0] == before[0][:2]
    assert found[1] == before[1]


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_rows_of_medusa_heads_do_not_depend_on_the_batch(tmp_path, target_dir, quantization):
    save(tmp_path / "head", None, original(medusa_weights()), "medusa_lm_head.pt")
    head = make_head(tmp_path / "head", target_dir, quantization=quantization)
    assert isinstance(head, NativeMedusaHeads)
    parts = sequences()
    together = Drafting(head, parts).run()
    for index, part in enumerate(parts):
        assert torch.equal(Drafting(head, [part]).run()[0], together[index])
    assert torch.equal(Drafting(head, parts).run(num_drafts=2), together[:, :2])


def test_whole_drafts_need_shared_memory(directory, target_dir):
    def drafts_whole(group):
        return make_head(directory, target_dir, group).capabilities.drafts_whole

    assert run_ranks(2, drafts_whole) == [False, False]
