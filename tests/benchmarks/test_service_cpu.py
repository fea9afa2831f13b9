"""The arithmetic of the service's CPU time, and the queue of its clocked device."""

import asyncio
import json
import os
import threading
from dataclasses import replace

import pytest

from benchmarks.service_cpu import cpu
from benchmarks.service_cpu.cpu import ENGINE, FRONT_ENDS, OTHERS, PARTS, RANK, ServiceThreads
from benchmarks.service_cpu.device import (
    INSTANT,
    LINE_FILE,
    ClockedRunner,
    DeviceSpeed,
    DeviceUse,
    StepQueue,
    StepRecord,
    read_steps,
    write_clocked_model,
)
from benchmarks.service_cpu.load import Load, Times
from benchmarks.service_cpu.page import page
from benchmarks.service_cpu.replica import StartLine
from benchmarks.service_cpu.results import Latencies, Repetition, make_row
from specdec.types.messages import StepInput, StepRow
from tests.specdec.engines import HashTarget, engine_config, make_engine, request

LOAD = Load("sse", streams=2, num_requests=4, max_tokens=5)
THREADS = ServiceThreads(1, 20, {21: ENGINE}, 30, frozenset({40}))


def test_a_step_begins_when_the_one_before_has_ended():
    queue = StepQueue(DeviceSpeed(4, 1, 0.5))
    queue.add(10.0, 0, 0, was_ahead=False)
    second = queue.add(10.001, 2, 0, was_ahead=True)
    assert (second.begun_at_s, second.idle_s) == (pytest.approx(10.004), 0)
    third = queue.add(10.02, 1, 10, was_ahead=False)
    assert third.idle_s == pytest.approx(0.01)  # the second step ended at 10.01
    assert third.seconds == pytest.approx(0.01)


def step(step_id: int, *rows: StepRow) -> StepInput:
    return StepInput(step_id, (), (), (), rows)


def test_the_device_runs_two_steps_in_order_and_logs_them(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source/config.json").write_text("{}")
    directory = write_clocked_model(tmp_path / "model", tmp_path / "source", INSTANT)
    assert (directory / "config.json").read_text() == "{}"
    runner = ClockedRunner(directory, clock=lambda: 5.0)
    prompt = StepRow(7, 0, (1, 2, 3), 0, samples=True)
    chunk = StepRow(8, 0, (1, 2), 0, samples=False)
    assert runner.begin(step(0, prompt, chunk))
    assert runner.begin(step(1, StepRow(7, 3, (-1,), 0, samples=True)))
    assert not runner.begin(step(2, prompt))
    assert runner.is_step_done
    first = runner.collect()
    assert [row.seq_id for row in first.rows] == [7]
    assert runner.collect().step_id == 1
    assert runner.execute(step(3)).rows == ()
    runner.close()
    assert [each[3:] for each in read_steps(directory, 5.0, 5.0)] == [(0, 5, 0), (1, 0, 1)]
    assert read_steps(directory, 5.1, 6.0) == []


def test_use_of_the_device_is_split_by_decodes_and_steps_with_prompts():
    steps = [
        StepRecord(0.0, 100.0, 0.010, 0, 128, 0),  # before it the device waits for the load
        StepRecord(0.012, 0.002, 0.008, 4, 0, 0),
        StepRecord(0.020, 0.0, 0.008, 4, 0, 1),
        StepRecord(0.032, 0.004, 0.008, 4, 256, 0),
    ]
    use = DeviceUse.of(steps)
    assert use.idle_share == pytest.approx(0.006 / 0.040)
    assert (use.decode_idle_ms, use.decode_ahead_share) == (pytest.approx(1.0), 0.5)
    assert (use.prompt_idle_ms, use.prompt_ahead_share) == (pytest.approx(4.0), 0.0)
    assert (use.prompt_tokens_per_step, use.num_steps) == (256, 4)
    assert DeviceUse.of([]) == DeviceUse(0.0, None, None, None, None, None)


async def test_steps_wait_until_all_streams_of_a_load_have_a_request(tiny_model_dir, tmp_path):
    (tmp_path / LINE_FILE).write_text(json.dumps((2, 3)))
    target = HashTarget(block_size=4, vocab_size=383)
    thread = StartLine(make_engine(tiny_model_dir, engine_config(), target))
    thread.directory = tmp_path

    async def answer(name):
        return [each async for each in thread.generate(request(name, (5, 6, 7), max_tokens=2))]

    first = asyncio.create_task(answer("a"))
    await asyncio.sleep(0.05)
    assert (first.done(), thread.last_stats.counts.num_steps) == (False, 0)
    second = asyncio.create_task(answer("b"))
    await asyncio.wait((first, second), return_when=asyncio.FIRST_COMPLETED)
    assert await answer("c"), "the last request waits for no other"
    assert all(await asyncio.gather(first, second))
    await thread.close()


def test_cpu_time_is_counted_by_part_of_the_service():
    before = {(20, 21): 1_000, (30, 30): 5_000, (40, 41): 0}
    after = {(20, 21): 4_000, (30, 30): 5_000, (40, 41): 2_000, (50, 51): 7_000}
    used = THREADS.used_us(before, after)
    assert used == dict.fromkeys(PARTS, 0.0) | {ENGINE: 3.0, FRONT_ENDS: 2.0, OTHERS: 7.0}
    assert THREADS.part_of(30, 31) == RANK


def test_the_time_of_a_thread_is_read_from_proc():
    threads = ServiceThreads(os.getpid(), os.getpid(), {threading.get_native_id(): ENGINE}, 0)
    before = threads.times()
    microseconds = sum(cpu.loop_us() for _ in range(3)) * 100_000
    used = threads.used_us(before, threads.times())[ENGINE]
    assert 0.8 * microseconds < used < 2 * microseconds + 20_000


def test_a_slow_machine_does_not_change_normalized_times():
    assert cpu.normalized(20.0, 2 * cpu.REFERENCE_LOOP_US) == 10.0


def repetition(rate: float, engine_us: float, loop_us: float) -> Repetition:
    latencies = Latencies.of([Times(0.0, 0.010, 0.050), Times(0.0, 0.020, 0.060)], LOAD)
    used = dict.fromkeys(PARTS, 0.0) | {ENGINE: engine_us}
    return Repetition(rate, loop_us, used, latencies, DeviceUse(0.1, 1.0, 0.5, None, None, None, 8))


def test_a_row_has_the_medians_of_its_repetitions():
    slow = cpu.REFERENCE_LOOP_US * 2
    repetitions = [repetition(90, 400, slow), repetition(100, 300, slow), repetition(50, 900, slow)]
    row = make_row("clocked", LOAD, repetitions, [100, 100, 100])
    assert (row.tokens_per_s, row.over_engine) == (90, 0.9)
    assert (row.raw_cpu_us[ENGINE], row.cpu_us[ENGINE]) == (20.0, 10.0)  # 20 tokens
    assert row.latencies.first_token_p50_ms == pytest.approx(15.0)
    assert row.latencies.per_token_p99_ms == pytest.approx(10.0)
    assert row.device.prompt_idle_ms is None
    assert "| 90 | 2.5 |" in page("", 3, [row]), "20 tokens in 8 steps"
    assert "| sse, 2 | 90 | 0.90 | 10.0 | 1.00 (50) |  | 15 / 20 | 10.00 / 10.00 |" in page(
        "", 3, [row]
    )


def test_prompts_depend_on_load_and_seed():
    assert LOAD.prompts(1) == LOAD.prompts(1) != LOAD.prompts(2)
    assert [len(prompt) for prompt in LOAD.prompts(1)] == [128] * 4
    assert LOAD.prompts(1) != replace(LOAD, api="grpc").prompts(1)
