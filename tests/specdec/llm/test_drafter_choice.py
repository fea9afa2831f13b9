"""The fastest drafter: measured once, stored for machine and load, and never for other weights."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from specdec.config.hardware import LoadOfOthers
from specdec.config.llm import LLMConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.llm import drafter_choice
from specdec.llm.drafter_choice import speeds_of_alias, with_fastest_drafter
from specdec.llm.drafter_measurement import TrialError
from specdec.types.errors import InvalidValueError
from tests.specdec.llm.shipped import DRAFTERS, HEAD, measured_speeds, shipped_aliases


@pytest.fixture
def alias(tiny_model_dir, tmp_path, monkeypatch):
    return shipped_aliases(tiny_model_dir, tmp_path, monkeypatch)


@pytest.fixture
def measured():
    """Return a measurement, and the configurations that it was called with."""
    calls = []

    def measure(config, *arguments):
        calls.append(config)
        return measured_speeds(config, *arguments)

    return measure, calls


def test_auto_takes_the_fastest_and_measures_once(alias, measured):
    measure, calls = measured
    lines = []
    config = LLMConfig(model="tiny")
    assert config.speculative_config.method == "suffix"
    for _ in range(2):
        found = with_fastest_drafter(config, lines.append, measure)
        expected = SpeculativeConfig.of("ngram", num_speculative_tokens=2)
        assert found.speculative_config == expected
        assert not found.speculative_config.is_auto
    assert len(calls) == 1
    line = "drafter tiny-ngram: 1.20 times the speed without drafts, 120 tokens/s expected"
    assert lines == [
        "measuring the drafters of tiny (once for this machine, load and precision)",
        f"{line} of one stream",
        f"{line} of one stream",
    ]
    with_fastest_drafter(replace(config, quantization="int8"), lines.append, measure)
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("version", lambda _: "0.0.0"),
        ("processor_name", lambda: "another one"),
        ("available_cpus", lambda: 777),
        ("LoadOfOthers", lambda: SimpleNamespace(share=lambda: 0.3)),
    ],
)
def test_another_version_machine_or_load_is_measured_again(
    alias, measured, monkeypatch, name, value
):
    measure, calls = measured
    config = LLMConfig(model="tiny")
    with_fastest_drafter(config, lambda _: None, measure)
    with monkeypatch.context() as changed:
        changed.setattr(drafter_choice, name, value)
        for _ in range(2):
            with_fastest_drafter(config, lambda _: None, measure)
    with_fastest_drafter(config, lambda _: None, measure)
    assert len(calls) == 2


def test_a_little_load_changes_nothing(alias, measured, monkeypatch):
    measure, calls = measured
    for share in (0.0, 0.2):
        monkeypatch.setattr(LoadOfOthers, "share", lambda self, share=share: share)
        with_fastest_drafter(LLMConfig(model="tiny"), lambda _: None, measure)
    assert len(calls) == 1


def test_speeds_that_differ_between_rounds_are_not_stored(alias):
    calls, lines = [], []

    def measure(*arguments):
        calls.append(arguments)
        found = measured_speeds(*arguments)
        return replace(found, gains={**found.gains, "tiny-ngram": (1.0, 1.1, 1.2, 1.3, 1.4)})

    for _ in range(2):
        found = with_fastest_drafter(LLMConfig(model="tiny"), lines.append, measure)
        assert found.speculative_config.method == "suffix"  # the default
    assert len(calls) == 2
    assert lines[-1].startswith("drafter tiny-lookup, the default: speeds differ by 17%")


@pytest.mark.parametrize("content", ["", "{}", '{"name": "tiny-ngram", "speedups": {}}', "[1]"])
def test_a_stored_file_that_is_not_understood_is_measured_again(alias, measured, content, tmp_path):
    measure, calls = measured
    with_fastest_drafter(LLMConfig(model="tiny"), lambda _: None, measure)
    [stored] = (tmp_path / "cache" / "drafters").iterdir()
    stored.write_text(content)
    for _ in range(2):
        with_fastest_drafter(LLMConfig(model="tiny"), lambda _: None, measure)
    assert len(calls) == 2
    assert json.loads(stored.read_text())["gains"]["tiny-ngram"] == [1.2] * 5


def test_a_card_that_changed_is_measured_again(alias, measured, tmp_path):
    measure, calls = measured
    with_fastest_drafter(LLMConfig(model="tiny"), lambda _: None, measure)
    card = tmp_path / DRAFTERS[1].name / "card.json"
    card.write_text(card.read_text().replace("[60, 40]", "[1, 0]"))
    with_fastest_drafter(LLMConfig(model="tiny"), lambda _: None, measure)
    assert len(calls) == 2


@pytest.mark.parametrize("given", [None, {"method": "lookahead"}, {"num_speculative_tokens": 2}])
def test_a_given_configuration_is_kept(given, alias):
    config = LLMConfig.from_mapping({"model": "tiny", "speculative_config": given})
    assert with_fastest_drafter(config, pytest.fail, pytest.fail) is config


def test_other_weights_get_no_drafter(alias, measured):
    alias["tiny"] = replace(alias["tiny"], weights_sha256="0" * 64)
    lines = []
    found = with_fastest_drafter(LLMConfig(model="tiny"), lines.append, measured[0])
    assert found.speculative_config == SpeculativeConfig.of("ngram")
    assert "are not those that the drafters of tiny were made for" in lines[0]
    assert not measured[1]


def test_without_a_measurement_the_first_one_drafts(alias):
    def fail(*_):
        raise TrialError("the drafters could not be measured: no memory")

    lines = []
    config = LLMConfig(model="tiny")
    assert with_fastest_drafter(config, lines.append, fail) is config
    assert lines[-1].endswith("no memory; drafting with tiny-lookup, the default")
    assert config.speculative_config.method == "suffix"


def test_a_cache_that_cannot_be_written_is_reported(alias, measured, tmp_path):
    (tmp_path / "cache").write_text("a file")
    lines = []
    found = with_fastest_drafter(LLMConfig(model="tiny"), lines.append, measured[0])
    assert found.speculative_config.method == "ngram"
    assert "will be measured again" in lines[1]


def test_lookups_alone_are_not_measured(alias):
    config = LLMConfig(model="tiny")
    assert with_fastest_drafter(config, pytest.fail) is config


def test_without_a_gpu_device_cuda_is_refused_before_anything_is_measured(alias, monkeypatch):
    monkeypatch.setattr("specdec.config.hardware.num_gpus", lambda: 0)
    with pytest.raises(InvalidValueError, match="device is 'cuda'; it must be cpu or auto"):
        with_fastest_drafter(LLMConfig(model="tiny", device="cuda"), print, pytest.fail)


def test_the_speeds_of_an_alias(tiny_model_dir, tmp_path, monkeypatch):
    aliases = shipped_aliases(tiny_model_dir, tmp_path, monkeypatch, (*DRAFTERS, HEAD))
    monkeypatch.setattr(drafter_choice, "measure_in_process", measured_speeds)
    speeds = speeds_of_alias(LLMConfig(model="tiny"), lambda _: None)
    assert speeds.gains["tiny-head"] == pytest.approx([1.3] * 5)
    aliases["tiny"] = replace(aliases["tiny"], weights_sha256="0" * 64)
    with pytest.raises(TrialError, match="not those that the drafters of tiny were made for"):
        speeds_of_alias(LLMConfig(model="tiny"), lambda _: None)
    with pytest.raises(InvalidValueError, match=r"must be an alias with drafters \(tiny\)"):
        speeds_of_alias(LLMConfig(model=str(tiny_model_dir)), lambda _: None)
