"""Bytes and times of passes, limits, and the parts of the reports."""

from dataclasses import replace

import pytest

from benchmarks import load, memory, overhead, single_stream, verification_cost
from benchmarks.bandwidth import read_bandwidth
from benchmarks.bytes_moved import kv_bytes, pass_bytes, weight_bytes
from benchmarks.machine import describe_machine
from benchmarks.step_bench import PRECISIONS, Shape, ShapeTime, StepBench, measure_shapes
from benchmarks.verification_cost import CostRow, VerificationReport
from benchmarks.workloads import Measurement, StreamRecord
from specdec.config.engine import EngineConfig
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.weights.checkpoint import CPU
from specdec.worker import load_runner


def test_bytes_of_a_pass_are_those_of_the_loaded_matrices(tiny_model_dir):
    config = ModelConfig.from_directory(tiny_model_dir)
    limits = EngineConfig(max_model_len=32, num_blocks=2)
    runner = load_runner(tiny_model_dir, "float32", limits, TensorParallelGroup(), None, CPU)
    in_layers = sum(
        parameter.numel()
        for name, parameter in _matrices(tiny_model_dir).items()
        if parameter.dim() == 2 and "embed" not in name
    )
    head = 0 if "lm_head.weight" in _matrices(tiny_model_dir) else 1
    expected = in_layers + head * config.vocab_size * config.hidden_size
    assert weight_bytes(config, "fp32") == 4 * expected
    for quantized in ("int8", "int8-bf16", "w8a8", "w8a8-bf16"):
        assert weight_bytes(config, quantized) == expected
    short = replace(config, checkpoint_dtype="bfloat16")
    assert [weight_bytes(short, each) / expected for each in ("fp32", "bf16", "int8")] == [2, 2, 1]
    assert kv_bytes(config, "fp32", 32) == runner.kv_cache.nbytes
    assert kv_bytes(config, "w8a8-bf16", 32) == runner.kv_cache.nbytes // 2
    assert pass_bytes(config, "fp32", 2, 16) == 4 * expected + runner.kv_cache.nbytes


def _matrices(directory):
    from safetensors.torch import load_file

    return {
        name: tensor
        for path in directory.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


@pytest.mark.parametrize("precision", PRECISIONS)
def test_measured_steps_do_not_change_the_sequences(tiny_model_dir, precision):
    bench = StepBench(tiny_model_dir, PRECISIONS[precision], num_seqs=3, max_tokens=48)
    for seq_id in range(3):
        bench.extend(seq_id, 32)
    times = measure_shapes(bench, [Shape(1, 7), Shape(3), Shape(2, 3)], 2, "shapes")
    assert [each.shape.num_rows for each in times] == [8, 3, 8]
    for each in times:
        assert 0 < each.forward_ms < each.best_ms <= each.median_ms
    bench.extend(0, 40)  # continues at the positions of the drafts


def test_read_bandwidth_is_positive():
    assert read_bandwidth(2**22) > 1e6


def cost_row(precision, num_rows, ratio, roofline, kind="drafts"):
    time = ShapeTime(Shape(1, num_rows - 1), 10.0 * ratio, 11.0 * ratio, 9.0 * ratio)
    return CostRow(precision, kind, num_rows, time, ratio, roofline, time.outside_forward)


def test_bars_of_verification():
    rows = [
        cost_row("fp32", 1, 1.0, 0.8),
        cost_row("fp32", 8, 1.7, 0.4),
        cost_row("fp32", 8, 3.0, 0.4, "sequences"),
        cost_row("int8", 1, 1.0, 0.3),
        cost_row("int8", 8, 1.5, 0.2),
        cost_row("bf16", 8, 9.0, 0.2),
    ]
    assert [(bar.figure, bar.is_met) for bar in verification_cost.bars(rows)] == [
        (0.8, True),
        (1.7, False),
        (1.5, True),
    ]
    report = VerificationReport("", describe_machine(), "m", 1e9, (), tuple(rows[:3]), ())
    assert verification_cost.charts(report).count('<g id="m: a step by its number of rows') == 2 * 2


def test_latencies_of_a_load():
    streams = (StreamRecord((1, 2), (0.1, 0.2)), StreamRecord((1,), (0.3,)))
    row = load.load_row("engine", 2, [Measurement(0.5, streams)])
    assert row.tokens_per_s == 6.0
    assert row.first_token.p50_ms == pytest.approx(200)
    assert row.gap.p95_ms == pytest.approx(100)
    assert load.latency([]).p99_ms == 0


def test_a_load_runs_more_requests_than_are_open():
    cases = load.make_cases(["engine"], [(1,), (2,), (3,)], [4], 8, "none")
    [workload] = cases["engine", 4].workloads
    assert (len(workload.prompts), workload.num_open) == (8, 4)


def test_the_stream_interval_is_set_only_if_given():
    assert "stream_interval" not in overhead.service_settings(PRECISIONS["int8"], None)
    settings = overhead.service_settings(PRECISIONS["int8"], 4)
    assert (settings["stream_interval"], settings["quantization"]) == (4, "int8")


def test_overhead_is_compared_where_it_was_measured():
    measured = {
        name: [Measurement(seconds, (StreamRecord((1,), (0.1,)),))]
        for name, seconds in (("engine fp32 1", 1.0), ("service fp32 1", 1.04))
    }
    [ratio] = overhead.ratios(measured)
    assert ratio.is_met
    assert ratio.median == pytest.approx(1 / 1.04)


def test_memory_of_processes_that_hold_a_model():
    assert memory.parse_peak("Name:\tx\nVmPeak:\t 9 kB\nVmHWM:\t    2048 kB\n") == 2**21
    processes = [
        memory.ProcessMemory("ray::TargetWorker", 800, 0),
        memory.ProcessMemory("ray::ServeReplica:specdec:Router", 400, 0),
        memory.ProcessMemory("raylet", 9000, 0),
    ]
    peak, start = memory.bars(processes, 1000, [30.0, 20.0])
    assert (peak.figure, peak.is_met) == (1.2, True)
    assert (start.figure, start.is_met) == (20.0, True)


def test_aims_of_single_streams():
    aims = {
        each.name: each.aim
        for each in single_stream.comparisons(
            ["edit", "gsm8k"], ["none", "ngram", "draft_model", "auto"]
        )
    }
    assert aims == {
        "ngram / none, edit": 1.3,
        "draft_model / none, edit": None,
        "auto / none, edit": 0.97,
        "ngram / none, gsm8k": None,
        "draft_model / none, gsm8k": None,
        "auto / none, gsm8k": 0.97,
    }
