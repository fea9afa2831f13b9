"""The process that measures drafters: its result, its failures, and reports while it runs."""

import io
import json
import subprocess
import sys
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from specdec.config.llm import LLMConfig
from specdec.config.model_aliases import ShippedDrafter
from specdec.config.speculative_keys import AUTO
from specdec.llm import drafter_measurement, drafter_speeds, drafter_trial
from specdec.llm.drafter_measurement import LOADED, TrialError, measure_in_process
from specdec.models.drafters.card import SuiteAcceptance
from tests.specdec.llm.shipped import DRAFTERS, measured_speeds

ACCEPTANCE = {each.name: [SuiteAcceptance("a", 0.0, 1.0, (0.5, 0.2))] for each in DRAFTERS}


def measure(config):
    return measure_in_process(config, DRAFTERS, ACCEPTANCE, lambda _: None)


def torch_config(directory):
    values = {"model": str(directory), "kernels": "torch", "speculative_config": AUTO}
    return LLMConfig.from_mapping(values)


def test_an_order_is_understood(tiny_model_dir, monkeypatch, capsys):
    def run_here(order, progress):
        monkeypatch.setattr(sys, "stdin", io.StringIO(order))
        drafter_trial.main()
        return capsys.readouterr().out

    monkeypatch.setattr(drafter_measurement, "_run", run_here)
    monkeypatch.setattr(drafter_speeds, "_BUDGET_S", 0.0)
    speeds = measure(torch_config(tiny_model_dir))
    assert speeds.gains.keys() == {each.name for each in DRAFTERS}
    assert len(speeds.plain) == 3


@pytest.mark.slow  # a process that imports torch
def test_a_process_measures_each_kind_of_drafter(tiny_model_dir, monkeypatch):
    keys = {"num_speculative_tokens": 2}

    def own_keys(each, _):
        own = {"model": str(tiny_model_dir)} if each.has_weights else {}
        return {**keys, **own, "method": each.method}

    monkeypatch.setattr(ShippedDrafter, "keys", own_keys)
    drafters = (*DRAFTERS, ShippedDrafter("tiny-draft", "colocated_draft_model", 2))
    acceptance = {each.name: ACCEPTANCE["tiny-ngram"] for each in drafters}
    config = torch_config(tiny_model_dir)
    speeds = measure_in_process(config, drafters, acceptance, lambda _: None)
    assert speeds.gains.keys() == acceptance.keys()


def test_a_process_that_fails_is_one_line(tmp_path):
    with pytest.raises(TrialError, match=r"could not be measured: .*not found") as caught:
        measure(LLMConfig(model=str(tmp_path / "none")))
    assert "\n" not in str(caught.value)


@pytest.fixture
def program(monkeypatch):
    """Return a function that lets a program run in place of the measurement."""

    def replace(text):
        def popen(command, **options):
            return real([sys.executable, "-S", "-c", text], **options)

        monkeypatch.setattr(drafter_measurement.subprocess, "Popen", popen)

    real = drafter_measurement.subprocess.Popen
    return replace


def test_the_last_line_is_the_result(program):
    result = json.dumps(asdict(measured_speeds(None, DRAFTERS, ACCEPTANCE, print)))
    program(f"print('dnnl_verbose'); print({result!r})")
    assert measure(LLMConfig()).gains["tiny-ngram"] == pytest.approx([1.2] * 5)


@pytest.mark.parametrize("output", ["dnnl_verbose", "[1]", '{"a": {}}', ""])
def test_a_process_with_another_output_has_failed(output, program):
    program(f"print({output!r})")
    with pytest.raises(TrialError, match="could not be measured"):
        measure(LLMConfig())


@pytest.mark.parametrize(
    ("output", "limit", "fault"),
    [
        ("dnnl_verbose", "_LOADING_TIMEOUT_S", r"models and kernels were not loaded within 0\.5 s"),
        (LOADED, "_TIMEOUT_S", r"the drafters were not measured within 0\.5 s"),
    ],
)
def test_a_process_that_hangs_is_ended(output, limit, fault, program, monkeypatch):
    monkeypatch.setattr(drafter_measurement, limit, 0.5)
    monkeypatch.setattr(drafter_measurement, "_REMINDER_S", 0.2)
    program(f"import signal; print({output!r}, flush=True); signal.pause()")
    with pytest.raises(TrialError, match=fault):
        measure(LLMConfig())


def test_minutes_of_compilation_do_not_count_as_measurement(monkeypatch):
    def communicate(given, timeout):
        clock.now_s += timeout
        if clock.now_s >= 630.0:
            return "result", ""
        loaded = f"{LOADED}\n".encode() if clock.now_s >= 600.0 else None
        raise subprocess.TimeoutExpired("trial", timeout, loaded)

    clock = SimpleNamespace(now_s=0.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr(drafter_measurement, "time", clock)
    process, lines = SimpleNamespace(communicate=communicate), []
    assert drafter_measurement._communicate(process, "order", lines.append) == ("result", "")
    loading = "  still loading models, and loading or compiling kernels, "
    assert lines[:85] == [f"{loading}{elapsed_s} s" for elapsed_s in range(7, 600, 7)]
    assert lines[85:] == [f"  still measuring, {elapsed_s} s" for elapsed_s in (602, 609, 616, 623)]
