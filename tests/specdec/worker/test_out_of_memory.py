# Modules: specdec.worker.batch.verification, specdec.worker.local
# Modules: specdec.worker.target_model_runner
"""A failed allocation in a step ends in smaller steps, whose tokens are the same."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.types.messages import StepRow
from specdec.types.sampling.sampling_params import SpeculationOptions
from specdec.worker import LocalTarget, RankModel, load_target, load_warm, loading
from specdec.worker.batch.step_rows import split_rows
from specdec.worker.device.queue import DeviceQueue
from specdec.worker.device.step_graphs import GraphCaptureError
from tests.specdec.engines import (
    engine_config,
    local_engine,
    make_engine,
    request,
    run,
    tokens_by,
)
from tests.specdec.fakes import run_ranks
from tests.specdec.models.families import save_family
from tests.specdec.tiny import train_tokenizer
from tests.specdec.worker.device.runners import device_runner


class SmallMemory:
    """A decoder whose passes of more than `limit` tokens find no memory."""

    def __init__(self, model, limit):
        self._model, self._limit = model, limit
        self.num_failures = 0

    def __getattr__(self, name):
        return getattr(self._model, name)

    def __call__(self, batch, kv_cache):
        self._require(batch.num_tokens)
        return self._model(batch, kv_cache)

    def forward_on_device(self, batch, kv_cache):
        self._require(len(batch.input_ids))
        return self._model.forward_on_device(batch, kv_cache)

    def _require(self, num_tokens):
        if num_tokens > self._limit:
            self.num_failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory")


def requests():
    sampling = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 0.7, "presence_penalty": 0.4},
        {"logprobs": 1},
    ]
    return [
        request(f"r{i}", [5 + i, 6, 7] * (3 + 4 * i), seed=i, **each)
        for i, each in enumerate(sampling)
    ]


def tokens(engine):
    transcripts = run(engine, requests())
    assert all(each.error is None for each in transcripts.values())
    return {name: each.token_ids for name, each in transcripts.items()}


@pytest.mark.parametrize("limit", [1, 5, 20])
def test_a_step_runs_in_parts_that_fit(tiny_model_dir, limit):
    config = engine_config(0)
    runner = load_target(RankModel(tiny_model_dir, "float32", config), TensorParallelGroup())
    runner.model = model = SmallMemory(runner.model, limit)
    engine = make_engine(tiny_model_dir, config, LocalTarget(runner))
    assert tokens(engine) == tokens(local_engine(tiny_model_dir, config))
    assert model.num_failures > 0


@pytest.mark.parametrize("limit", [4, 12])
def test_a_device_step_without_memory_runs_on_the_host(tiny_model_dir, limit):
    config = engine_config(3, async_scheduling=True)
    runner = device_runner(tiny_model_dir, config)
    runner.model = model = SmallMemory(runner.model, limit)
    runner.device_steps._launcher._model = model
    engine = make_engine(tiny_model_dir, config, LocalTarget(runner))
    assert tokens(engine) == tokens(local_engine(tiny_model_dir, config, kernels="torch"))
    assert model.num_failures > 0


class SmallLogits(SmallMemory):
    """A decoder that finds no memory for more than `limit` rows of logits for the host."""

    def compute_logits_and_argmax(self, hidden, argmax):
        self._require(len(hidden))
        return self._model.compute_logits_and_argmax(hidden, argmax)

    def __call__(self, batch, kv_cache):
        raise AssertionError("a pass of the host")

    def forward_on_device(self, batch, kv_cache):
        return self._model.forward_on_device(batch, kv_cache)


def test_rows_of_a_device_step_are_verified_on_the_host_in_parts_that_fit(tiny_model_dir):
    config = engine_config(3)
    given = [
        request(
            f"r{i}",
            [7, 8, 9] * (2 + i),
            seed=i,
            temperature=0.9,
            presence_penalty=0.3 * i,
            speculation=SpeculationOptions(verifier=verifier),
        )
        for i, verifier in enumerate(["rejection", "block", "rejection", "typical", "coupled"])
    ]
    runner = device_runner(tiny_model_dir, config)
    runner.model = model = SmallLogits(runner.model, 4)
    engine = make_engine(tiny_model_dir, config, LocalTarget(runner))
    expected = tokens_by(local_engine(tiny_model_dir, config, kernels="torch"), given)
    assert tokens_by(engine, given) == expected
    assert model.num_failures > 0


def test_a_pass_that_has_changed_states_is_not_run_again(tmp_path):
    save_family(tmp_path, "lfm2-plain")
    train_tokenizer(383).save_pretrained(tmp_path)
    runner = load_target(RankModel(tmp_path, "float32", engine_config(0)), TensorParallelGroup())
    runner.model = model = SmallMemory(runner.model, 5)
    with pytest.raises(torch.OutOfMemoryError):
        run(make_engine(tmp_path, engine_config(0), LocalTarget(runner)), requests())
    assert model.num_failures == 1


@pytest.mark.parametrize("has_states", [False, True])
def test_a_device_step_that_has_changed_states_is_not_left_to_the_host(has_states):
    def begin(columns, states):
        raise torch.OutOfMemoryError

    eligibility = SimpleNamespace(reason=lambda *arguments: None)
    steps = SimpleNamespace(has_states=has_states, eligibility=eligibility, begin=begin)
    queue = DeviceQueue(steps, None, TensorParallelGroup())
    raised = pytest.raises(torch.OutOfMemoryError) if has_states else nullcontext()
    with raised:
        assert not queue.begin(0, [StepRow(0, 0, (1,), 0, True)], [])


def test_a_token_that_does_not_fit_is_an_error(tiny_model_dir):
    config = engine_config(0)
    runner = load_target(RankModel(tiny_model_dir, "float32", config), TensorParallelGroup())
    runner.model = SmallMemory(runner.model, 0)
    with pytest.raises(torch.OutOfMemoryError):
        tokens(make_engine(tiny_model_dir, config, LocalTarget(runner)))


def test_several_ranks_fail_together(tiny_model_dir):
    """The others wait for the rank in a collective operation, which nothing can undo."""
    config = engine_config(0)

    def on_rank(group):
        runner = load_target(RankModel(tiny_model_dir, "float32", config), group)
        runner.model = SmallMemory(runner.model, 5)
        with pytest.raises(torch.OutOfMemoryError):
            tokens(make_engine(tiny_model_dir, config, LocalTarget(runner)))
        return True

    assert run_ranks(2, on_rank) == [True, True]


def test_a_chunk_is_split_before_its_guesses():
    row = StepRow(1, 10, (1, 2, 3, 4, 5), 2, True)
    (first,), (second,) = split_rows([row])
    assert first == StepRow(1, 10, (1,), 0, False)
    assert second == StepRow(1, 11, (2, 3, 4, 5), 2, True)
    assert split_rows([second._replace(token_ids=(2, 4, 5))]) == ()


@pytest.mark.parametrize("in_capture", [False, True])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has"),
            "CUDA out of memory",
        ),
        (
            torch.AcceleratorError("CUDA error: out of memory\nFor debugging"),
            "CUDA error: out of memory",
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `create`"),
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `create`",
        ),
    ],
)
def test_a_gpu_that_is_too_small_for_the_plan_is_reported_with_settings(
    tmp_path, monkeypatch, error, reason, in_capture
):
    """It is none of the errors that refuse a start: another process may end."""

    def fails(spec, group):
        if in_capture:
            raise GraphCaptureError(f"no graph: {error}; --enforce-eager runs") from error
        raise error

    monkeypatch.setattr(loading, "load_target", fails)
    spec = RankModel(tmp_path, "float32", engine_config(0), memory_settings="max_num_seqs (7)")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        load_warm(spec, TensorParallelGroup())
    shown = f"no graph: {reason}; --enforce-eager runs" if in_capture else reason
    assert str(caught.value) == (
        f"the GPU has too little memory to load: {shown}; lower max_num_seqs (7)"
    )


def test_a_graph_that_cannot_be_captured_for_another_reason_is_no_lack_of_memory(
    tmp_path, monkeypatch
):
    def fails(spec, group):
        raise GraphCaptureError("a graph could not be captured")

    monkeypatch.setattr(loading, "load_target", fails)
    with pytest.raises(GraphCaptureError):
        load_warm(RankModel(tmp_path, "float32", engine_config(0)), TensorParallelGroup())
