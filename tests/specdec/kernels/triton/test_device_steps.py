"""Steps on the device on Triton's kernels: the tokens of torch's, in few launches."""

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from specdec.config.gpu.graph_sizes import num_ragged_graphs
from specdec.kernels.triton import attention_plan
from specdec.sampling.device.device_sampler import SamplingKind
from specdec.sampling.row_ops import RowOps, TritonRowOps
from specdec.sampling.sampler import sample_on_device
from specdec.sampling.vocab_shard import VocabShard
from specdec.types.messages import BlockTableDelta, SequenceAdmission, StepInput, StepRow
from specdec.types.sampling.sampling_spec import SamplingRules
from tests.specdec.engines import engine_config, make_engine, request, run
from tests.specdec.fakes import run_ranks
from tests.specdec.sampling.device.test_device_sampler import ALONE, VOCAB, rows, rules_of
from tests.specdec.tiny import tiny_llama_dir
from tests.specdec.worker.device.runners import FakeGraphs, device_runner, device_target
from tests.specdec.worker.operators import Operators

CONFIG = engine_config(3)
MAX_LAUNCHES, LAUNCHES = 12, 9


@pytest.fixture
def launches(monkeypatch):
    """Return a list with an entry for each launch of a kernel."""
    launched, call = [], GridExecutor.__call__

    def counted(self, *arguments, **options):
        launched.append(self.fn.__name__)
        return call(self, *arguments, **options)

    monkeypatch.setattr(GridExecutor, "__call__", counted)
    return launched


def begun(directory, num_drafts, launches):
    """Return the operators of the begin of a step after a prompt, and its kernels."""
    runner = device_runner(directory, CONFIG, kernels="triton")
    table = BlockTableDelta(0, 0, (0, 1, 2, 3))
    prompt = StepRow(0, 0, (5, 6, 7), 0, True)
    admission = SequenceAdmission(0, 3, SamplingRules(temperature=0.0))
    runner.execute(StepInput(0, (), (admission,), (table,), (prompt,)))
    row = StepRow(0, 3, (3,) * (1 + num_drafts), num_drafts, True)
    launches.clear()
    with Operators() as operators:
        assert runner.begin(StepInput(1, (), (), (), (row,)))
    return operators, list(launches)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_layer_is_at_most_twelve_launches(tmp_path, launches, num_drafts):
    """Products, which are operators of torch, and kernels together."""
    counts = []
    for num_layers in (1, 2):
        directory = tmp_path / str(num_layers)
        directory.mkdir()
        operators, kernels = begun(
            tiny_llama_dir(directory, layers=num_layers), num_drafts, launches
        )
        products = [name for name, _ in operators.calls if "mm" in name or "matmul" in name]
        assert len(products) == 4 * num_layers + 1
        counts.append(len(kernels) + _launched_by_torch(operators))
    assert counts[1] - counts[0] == LAUNCHES <= MAX_LAUNCHES


def _launched_by_torch(operators):
    """Count torch's operators; the interpreter copies tensors of a kernel, which a GPU does not."""
    return sum(
        count
        for name, count in operators.counts.items()
        if not name.startswith(("aten._to_copy", "aten.clone", "aten.copy_", "aten.set_"))
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_the_tokens_are_those_of_torch(tiny_model_dir, num_drafts):
    config = engine_config(num_drafts)
    given = [
        request("a", [11, 12, 13, 11, 12], max_tokens=6),
        request("b", [7], seed=3, temperature=0.9, top_p=0.9, max_tokens=6),
    ]

    def tokens(**options):
        target = device_target(tiny_model_dir, config, graphs=None, **options)
        engine = make_engine(tiny_model_dir, config, target)
        return {name: each.token_ids for name, each in run(engine, given).items()}

    assert tokens(kernels="triton") == tokens()


def test_one_program_merges_segments_where_there_are_enough(tiny_model_dir, monkeypatch):
    """The results are those of parts, which a second kernel merges."""

    def hidden():
        runner = device_runner(tiny_model_dir, engine_config(0, block_size=16), kernels="triton")
        pool = torch.randn(runner.kv_cache.shape, generator=torch.Generator().manual_seed(0))
        runner.kv_cache.copy_(pool)
        batch = attention_plan.DeviceBatch(
            input_ids=torch.tensor([5, 6, 7, 8]),
            positions=torch.tensor([130, 131, 20, 21]),
            slot_mapping=torch.tensor([130, 131, 420, 421]),
            block_tables=torch.stack([torch.arange(20), 25 + torch.arange(20)]),
            context_lens=torch.tensor([132, 22]),
            query_len=2,
        )
        return runner.model.forward_on_device(batch, runner.kv_cache)

    by_parts = hidden()
    monkeypatch.setattr(attention_plan, "enough_programs", lambda used_rows: 1)
    assert torch.equal(hidden(), by_parts)


@pytest.mark.parametrize("kind", [SamplingKind.GREEDY, SamplingKind.TRUNCATED])
def test_kernels_sample_the_tokens_of_the_reference(kind):
    logits, batch = rows(6, seed=1)
    shard = VocabShard(ALONE, 0, VOCAB, TritonRowOps())
    rules = rules_of(batch, kind)
    expected = logits.argmax(1) if rules is None else RowOps().sample_batch(logits, batch)
    sampled = sample_on_device(logits, rules, shard)
    assert sampled.token_ids.tolist() == expected.tolist()
    assert not sampled.is_invalid.any()


@pytest.mark.usefixtures("one_launch_at_a_time")
@pytest.mark.parametrize("kind", [SamplingKind.GREEDY, SamplingKind.SAMPLED])
def test_ranks_sample_the_tokens_of_one(kind):
    """Each samples a share of the rows by the kernels; of four rows one of three ranks has none."""
    logits, batch = rows(4, seed=2)
    rules = rules_of(batch, kind)
    expected = sample_on_device(logits, rules, VocabShard(ALONE, 0, VOCAB, TritonRowOps()))

    def on_rank(group):
        tokens = group.share_of(VOCAB)
        shard = VocabShard(group, tokens.start, VOCAB, TritonRowOps())
        found = sample_on_device(logits[:, tokens.start : tokens.stop], rules, shard)
        return found.token_ids.tolist()

    assert run_ranks(3, on_rank) == [expected.token_ids.tolist()] * 3


@pytest.mark.parametrize("kind", [SamplingKind.GREEDY, SamplingKind.SAMPLED])
def test_kernels_find_rows_without_a_token(kind):
    logits, batch = rows(4, seed=1)
    logits[0, 7], logits[1, 9], logits[2] = torch.nan, torch.inf, -torch.inf
    rules = rules_of(batch, kind)
    sampled = sample_on_device(logits, rules, VocabShard(ALONE, 0, VOCAB, TritonRowOps()))
    assert sampled.is_invalid.tolist() == [True, True, True, False]


def test_graphs_hold_steps_on_kernels(tiny_model_dir):
    graphs = FakeGraphs()
    limits = {"max_model_len": 32, "num_blocks": 8, "max_num_batched_tokens": 32}
    config = engine_config(0, max_num_seqs=1, **limits)
    runner = device_runner(tiny_model_dir, config, graphs, kernels="triton")
    assert runner.model.fits_graphs
    with_prompts = num_ragged_graphs(1, config.max_num_batched_tokens, runner.model.hidden_size)
    assert with_prompts > 1
    assert graphs.num_captured == 4 + with_prompts
