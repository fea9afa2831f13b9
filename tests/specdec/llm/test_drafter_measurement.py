"""The process that measures drafters: its result, its failures, and reports while it runs."""

import io
import json
import sys
from dataclasses import asdict

import pytest

from specdec.config.llm import LLMConfig
from specdec.config.model_aliases import ShippedDrafter
from specdec.config.speculative_keys import AUTO
from specdec.llm import drafter_measurement, drafter_speeds, drafter_trial
from specdec.llm.drafter_measurement import TrialError, measure_in_process
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
    lines = []
    config = torch_config(tiny_model_dir)
    speeds = measure_in_process(config, drafters, acceptance, lines.append)
    assert speeds.gains.keys() == acceptance.keys()
    # The target drafts for itself, so that no draft pays.
    assert max(speeds.gains["tiny-draft"]) < max(speeds.gains["tiny-ngram"])


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


def test_a_process_that_hangs_is_reported_and_ended(program, monkeypatch):
    monkeypatch.setattr(drafter_measurement, "_TIMEOUT_S", 0.5)
    monkeypatch.setattr(drafter_measurement, "_REMINDER_S", 0.2)
    program("import time; time.sleep(60)")
    lines = []
    with pytest.raises(TrialError, match=r"not measured within 0\.5 s"):
        measure_in_process(LLMConfig(), DRAFTERS, ACCEPTANCE, lines.append)
    assert lines == ["  still measuring, 0 s"] * 2
