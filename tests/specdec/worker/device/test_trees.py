"""Draft trees in steps on the device: the tokens of the host's path, and nothing read between."""

import pytest
import torch

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.kernels.moves import AcceptedPaths, path_moves
from specdec.kernels.reference.device_batch import DeviceBatch, RaggedBatch, TreeNodes
from specdec.kernels.reference.forward_batch import Chunk, ForwardBatch
from specdec.models.llama import CausalDecoder
from specdec.sampling.device.device_sampler import SamplingKind
from specdec.sampling.device.device_trees import verify_trees
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.types.control import SpeculationControl
from specdec.types.drafts.draft_tree import ancestors, depths, signed_words
from specdec.types.messages import (
    BlockTableDelta,
    Logprobs,
    RowDrafting,
    SequenceAdmission,
    StepInput,
    StepRow,
)
from specdec.types.sampling.sampling_params import SpeculationOptions
from specdec.types.sampling.sampling_spec import SamplingRules
from specdec.worker.batch.batch_state import BatchState
from specdec.worker.device.plan import StepPlan
from specdec.worker.device.step_graphs import RaggedShape, StepShape
from tests.specdec.engines import engine_config, local_engine, make_engine, request, run
from tests.specdec.fakes import run_ranks
from tests.specdec.models.families import save_family
from tests.specdec.trees import TreeProposer
from tests.specdec.walks import device_trees, random_drafts, sample_of
from tests.specdec.worker.device.runners import (
    FakeGraphs,
    device_runner,
    device_target,
    recorded_device_steps,
)
from tests.specdec.worker.device.test_extras import requests as shaped_requests
from tests.specdec.worker.operators import assert_host_reads_nothing

DEPTH, NUM_NODES = 4, 12
SPECULATION = SpeculativeConfig.of("ngram", DEPTH, num_draft_tree_tokens=NUM_NODES)
PLAIN = [{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.9, "top_p": 0.9}]
CHAIN = {"temperature": 0.8, "speculation": SpeculationOptions(num_speculative_tokens=2)}
BY_HOST = {"temperature": 0.8, "speculation": SpeculationOptions(verifier="typical")}


def requests(kinds=PLAIN, count=6, **params):
    generator = torch.Generator().manual_seed(5)
    pieces = torch.randint(3, 383, (count, 6), generator=generator).tolist()
    return [
        request(f"r{i}", piece * (1 + i), seed=i, **{**kinds[i % len(kinds)], **params})
        for i, piece in enumerate(pieces)
    ]


def results(engine, asked):
    """Return the tokens of each request, and its log-probabilities in one piece."""
    return {
        name: (each.token_ids, Logprobs.join(each.logprobs) if each.logprobs else None)
        for name, each in run(engine, asked).items()
    }


def config_of(**changes):
    return engine_config(speculation=SPECULATION, **changes)


def tree_engine(directory, target, config, answers):
    policy = SpeculationPolicy(
        SpeculationControl("on", 32, DEPTH), clock=lambda: 0.0, num_tree_tokens=NUM_NODES
    )
    return make_engine(directory, config, target, TreeProposer(answers, NUM_NODES), policy)


class Runs:
    """Results without drafts, and those of trees on the device."""

    def __init__(self, directory):
        self._directory = directory
        self._expected = {}

    def expected(self, asked):
        keys = {each.request_id: repr(vars(each)) for each in asked}
        if lacking := [each for each in asked if keys[each.request_id] not in self._expected]:
            engine = local_engine(self._directory, engine_config(0), kernels="torch")
            found = results(engine, lacking)
            self._expected |= {keys[name]: result for name, result in found.items()}
        return {name: self._expected[key] for name, key in keys.items()}

    def on_device(self, asked, group=None, graphs=None, **changes):
        """Return the results, and the counts of the engine."""
        config, expected = config_of(**changes), self.expected(asked)
        answers = {
            each.prompt_token_ids: (*each.prompt_token_ids, *expected[each.request_id][0])
            for each in asked
        }
        target = device_target(self._directory, config, group=group, graphs=graphs)
        engine = tree_engine(self._directory, target, config, answers)
        return results(engine, asked), engine.stats().counts


@pytest.fixture(scope="module")
def runs(tiny_model_dir):
    return Runs(tiny_model_dir)


@pytest.fixture
def on_device(monkeypatch):
    """Return a list with an entry for each step that ran on the device: its rows."""
    return recorded_device_steps(monkeypatch)


def num_with_trees(steps):
    return sum(any(row.drafting.parents for row in rows) for rows in steps)


@pytest.mark.parametrize("has_graphs", [False, True])
def test_trees_change_no_token(runs, on_device, has_graphs):
    """Beside chains and prompts, and also where sequences are preempted."""
    asked = requests([*PLAIN, CHAIN])
    graphs = FakeGraphs() if has_graphs else None
    few = {"num_blocks": 40, "max_num_seqs": 6}
    found, counts = runs.on_device(asked, graphs=graphs, async_scheduling=True, **few)
    assert found == runs.expected(asked)
    assert len(on_device) == counts.num_steps
    assert counts.num_preemptions > 0
    assert num_with_trees(on_device) > 5
    assert 0 < counts.speculation.num_accepted_tokens < counts.speculation.num_draft_tokens
    kinds = [{_kind(row) for row in rows} for rows in on_device]
    assert {"tree", "chain"} in kinds
    assert any(each > {"tree", "prompt"} or each == {"tree", "prompt"} for each in kinds)


def _kind(row):
    if row.num_known_tokens > 1:
        return "prompt"
    return "tree" if row.drafting.parents else "chain" if row.num_draft_tokens else "decode"


def test_rows_beside_trees_may_need_the_host(runs, on_device):
    """A row with another verifier has a chain, and is verified there after the same pass."""
    asked = requests([*PLAIN, CHAIN], 4)
    given = [*asked, request("host", [7, 8, 9] * 4, seed=3, max_tokens=9, **BY_HOST)]
    found, counts = runs.on_device(given)
    del found["host"]  # which is lossy
    assert found == runs.expected(asked)
    assert len(on_device) == counts.num_steps
    mixed = [rows for rows in on_device if any(row.seq_id == 4 for row in rows)]
    assert any(row.num_draft_tokens for rows in mixed for row in rows if row.seq_id == 4)
    assert num_with_trees(mixed) > 2


def test_logits_of_nodes_are_changed_by_their_paths(tiny_model_dir, runs, on_device):
    """Penalties, bad words, grammars and log-probabilities follow the drafts before."""
    names = ("penalties", "words", "allowed", "ends", "both", "plain", "grammar")
    asked = shaped_requests(tiny_model_dir, names)
    found, counts = runs.on_device(asked, max_num_seqs=len(asked))
    expected = runs.expected(asked)
    assert {name: tokens for name, (tokens, _) in found.items()} == {
        name: tokens for name, (tokens, _) in expected.items()
    }
    for name, (_, logprobs) in expected.items():
        own = found[name][1]
        assert (own is None) == (logprobs is None)
        if logprobs is not None:
            assert (own.token_ids == logprobs.token_ids).all()
            assert (own.ranks == logprobs.ranks).all()
            assert abs(own.logprobs - logprobs.logprobs).max() < 1e-4
    assert len(on_device) == counts.num_steps
    assert num_with_trees(on_device) > 5
    assert counts.speculation.num_accepted_tokens > 0


def test_ranks_agree(runs):
    asked = requests(count=3)
    expected = runs.expected(asked)
    found = run_ranks(2, lambda group: runs.on_device(asked, group)[0])
    assert found == [expected] * 2


def test_a_step_begins_after_one_with_trees(tiny_model_dir, runs, on_device):
    """The token and position that follow the accepted path are on the device."""
    [asked] = requests(count=1, max_tokens=40)
    [(tokens, _)] = runs.expected([asked]).values()
    text, config = [*asked.prompt, *tokens], config_of()
    runner = device_runner(tiny_model_dir, config)
    num_prompt, base = len(asked.prompt), len(asked.prompt) + 1
    rules = SamplingRules(temperature=0.0)
    table = BlockTableDelta(0, 0, tuple(range(10)))
    admission = SequenceAdmission(0, num_prompt, rules)
    prompt = StepRow(0, 0, tuple(text[:base]), 0, True)
    runner.execute(StepInput(0, (), (admission,), (table,), (prompt,)))
    drafts = (3, text[base + 1], 4, text[base + 2], 5, text[base + 3])
    parents = (-1, -1, 1, 1, 3, 3)
    row = StepRow(0, base, (text[base], *drafts), len(drafts), True, RowDrafting(parents=parents))
    assert runner.begin(StepInput(1, (), (), (), (row,)))
    pending = StepRow(0, base + len(drafts) + 1, (-1,), 0, True)
    assert runner.begin(StepInput(2, (), (), (), (pending,)))
    assert runner.num_in_flight == 2
    found = [runner.collect().rows[0].token_ids for _ in range(2)]
    assert found == [tuple(text[base + 1 : base + 5]), (text[base + 5],)]
    after = StepRow(0, base + 5, (text[base + 5],), 0, True)
    assert runner.begin(StepInput(3, (), (), (), (after,)))
    assert runner.collect().rows[0].token_ids == (text[base + 6],)
    assert len(on_device) == 4


def test_many_sequences_with_large_trees_are_left_to_the_host(runs, on_device, monkeypatch):
    monkeypatch.setattr("specdec.worker.device.state.MAX_GRAPH_TOKENS", 50)
    asked = requests([{"temperature": 0.8, "max_tokens": count} for count in (5, 40)])
    found, counts = runs.on_device(asked, max_num_batched_tokens=160)
    assert found == runs.expected(asked)
    sizes = [len(rows) * (1 + max(row.num_draft_tokens for row in rows)) for rows in on_device]
    assert 13 < max(sizes) <= 50
    assert 0 < num_with_trees(on_device) < len(on_device) < counts.num_steps


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", ["batch", "ragged"])
def test_a_pass_on_the_device_is_that_of_the_host(tmp_path, window, kind):
    """A tree, a chain and a decode after contexts of several blocks."""
    family = {} if window is None else {"sliding_window": window}
    save_family(tmp_path, "mistral", **family)
    runner = device_runner(tmp_path, engine_config(0))
    parents, size = (-1, -1, 1, 2, 3, 0), 4
    tables = [[7, 3, 9, 1, 2], [5, 6, 8, 0, 4], [10, 11, 12, 13, 14]]
    chunks = [
        Chunk([11, 12, 13, 14, 15, 16, 17], 6, tables[0], parents),
        Chunk([21, 22, 23], 5, tables[1]),
        Chunk([31], 9, tables[2]),
    ]
    generator = torch.Generator().manual_seed(0)
    runner.kv_cache.copy_(torch.randn(runner.kv_cache.shape, generator=generator))
    batch = ForwardBatch(chunks, size)
    expected = runner.model(batch, runner.kv_cache.clone())
    positions = torch.from_numpy(batch.positions).long()
    rows = torch.tensor([0] * 7 + [1] * 3 + [2])
    words = torch.zeros(11, dtype=torch.int64)
    words[1:7] = torch.tensor(signed_words(ancestors(parents)))
    contexts = torch.tensor([13, 8, 10])
    first_nodes = torch.tensor([7, 8, 10])
    nodes = torch.full((3, 6), 99)
    nodes[0] = 6 + torch.tensor(depths(parents))
    trees = TreeNodes(words, first_nodes, nodes)
    flat = (torch.from_numpy(batch.input_ids).long(), positions)
    slots = torch.from_numpy(batch.slot_mapping).long()
    own = torch.tensor(tables)
    if kind == "ragged":
        bounds = torch.tensor([0, 7, 10, 11]).int()
        made = RaggedBatch(*flat, slots, rows, bounds, own, contexts, 7, trees=trees)
        found = runner.model.forward_on_device(made, runner.kv_cache)
    else:
        places = torch.tensor([[*range(7)], [7, 8, 9, 9, 9, 9, 9], [10] * 7]).flatten()
        is_padding = torch.cat([torch.tensor([False]), places[1:] == places[:-1]])
        padded = trees.words[places].masked_fill(is_padding, 0)
        made = DeviceBatch(
            *(each[places] for each in flat),
            slots[places].masked_fill(is_padding, 200 * size),
            own,
            contexts,
            7,
            trees=TreeNodes(padded, first_nodes, nodes),
        )
        found = runner.model.forward_on_device(made, runner.kv_cache)[~is_padding]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_step_with_trees_has_one_pass(runs, on_device, monkeypatch):
    """Also where its rows are not padded to the largest tree."""
    monkeypatch.setattr("specdec.worker.device.plan.most_padding_tokens", lambda size: 14)
    batches, forward = [], CausalDecoder.forward_on_device

    def recorded(self, batch, kv_cache):
        batches.append(batch)
        return forward(self, batch, kv_cache)

    monkeypatch.setattr(CausalDecoder, "forward_on_device", recorded)
    asked = requests([*PLAIN, CHAIN], max_tokens=12)
    found, counts = runs.on_device(asked, max_num_batched_tokens=160)
    assert {name: each[0] for name, each in found.items()} == {
        name: each[0][:12] for name, each in runs.expected(requests([*PLAIN, CHAIN])).items()
    }
    assert len(batches) == len(on_device) == counts.num_steps
    with_trees = [batch for batch in batches if batch.trees is not None]
    assert {type(batch) for batch in with_trees} == {DeviceBatch, RaggedBatch}


def test_the_host_reads_nothing_of_a_step_with_prompts(tiny_model_dir):
    launch = device_runner(tiny_model_dir, config_of()).device_steps._launcher.launch
    shape = StepShape(2, 1 + NUM_NODES, 5, has_trees=True)
    ragged = RaggedShape(40, 2, 5, has_trees=True)
    assert_host_reads_nothing(lambda: launch(StepPlan(shape, SamplingKind.SAMPLED, 0, ragged)))


@pytest.mark.parametrize("seed", range(3))
def test_moves_are_those_of_the_host(seed):
    """They are between slots of block tables, as in `BatchState.compaction`."""
    drafts, sampled = random_drafts(seed, num_tokens=2)
    verified = verify_trees(sample_of(sampled), device_trees(drafts))
    state = BatchState(4, torch.device("cpu"), range(50))
    tables = torch.randperm(6 * len(drafts), generator=torch.Generator().manual_seed(seed))
    tables = tables.view(len(drafts), 6)
    rules, ids = SamplingRules(), range(len(drafts))
    admitted = tuple(SequenceAdmission(seq, 2, rules) for seq in ids)
    deltas = tuple(BlockTableDelta(seq, 0, tuple(tables[seq].tolist())) for seq in ids)
    state.update(StepInput(0, (), admitted, deltas, ()))
    rows = [
        StepRow(
            seq,
            3 + seq,
            (0, *tokens),
            len(tokens),
            True,
            drafting=RowDrafting(parents=tuple(parents)),
        )
        for seq, (tokens, parents) in enumerate(drafts)
    ]
    counts = verified.counts.tolist()
    tokens = {seq: tuple(verified.token_ids[seq, : counts[seq]].tolist()) for seq in ids}
    expected = state.compaction(rows, tokens)
    bases = torch.tensor([row.num_computed_tokens for row in rows])
    paths = AcceptedPaths(verified.places, verified.counts, bases, tables, torch.tensor(ids), 4)
    found = path_moves(paths)
    pairs = zip(found.sources.flatten().tolist(), found.targets.flatten().tolist(), strict=True)
    assert [pair for pair in pairs if pair[0] >= 0] == [tuple(move) for move in expected]
    assert expected
