"""The fastest drafter: by cards and step times; stored, and never for other weights."""

import subprocess
from dataclasses import replace

import pytest

from specdec.config.llm import LLMConfig
from specdec.config.model_aliases import ShippedDrafter
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.config.speculative_keys import AUTO
from specdec.llm.drafter_choice import (
    DrafterChoice,
    TrialError,
    best_speedup,
    measure_in_process,
    with_fastest_drafter,
)
from specdec.models.drafters.card import SuiteAcceptance
from specdec.speculation.policy.cost_model import CostTable
from specdec.types.errors import InvalidValueError
from tests.specdec.llm.shipped import DRAFTERS, shipped_aliases

LOOKUP = (SuiteAcceptance("a", 0.0, 0.5, (0.4, 0.2)), SuiteAcceptance("b", 0.0, 1.0, (0.1, 0.0)))
NGRAM = (SuiteAcceptance("a", 0.0, 1.0, (0.9, 0.8)), SuiteAcceptance("b", 0.0, 1.0, (0.8, 0.7)))


def table(*seconds):
    return CostTable((1,), tuple(range(len(seconds))), (seconds,))


def test_the_best_number_of_draft_tokens_counts():
    costs = table(0.010, 0.012, 0.020)
    # Half of the steps have a draft: 1.4 tokens in 11 ms, or 1.6 in 15 ms, instead of 1 in 10 ms.
    assert best_speedup(costs, LOOKUP[0]) == pytest.approx(1.4 / 1.1)
    assert best_speedup(costs, LOOKUP[1]) == 1  # no draft pays


def test_suites_count_by_the_time_that_they_take():
    costs = {"one": table(0.01, 0.01, 0.01)}
    choice = DrafterChoice.of({"one": NGRAM}, costs)
    assert choice.tokens_per_s == pytest.approx(100)
    assert choice.speedups["one"] == pytest.approx(2 / (1 / 2.7 + 1 / 2.5))


def test_load_that_slows_a_whole_table_does_not_count():
    costs = {"first": table(0.01, 0.011, 0.012), "second": table(0.03, 0.033, 0.036)}
    assert DrafterChoice.of({"first": LOOKUP, "second": NGRAM}, costs).name == "second"


@pytest.mark.parametrize(("seconds", "expected"), [(0.01, "second"), (0.0262, "first")])
def test_a_drafter_has_to_be_faster_by_a_margin(seconds, expected):
    costs = {"first": table(0.01, 0.01, 0.01), "second": table(0.01, seconds, seconds)}
    found = DrafterChoice.of({"first": (LOOKUP[0],), "second": (NGRAM[0],)}, costs)
    assert found.name == expected
    assert found.describe().startswith(f"drafter {expected}; expected tokens/s of one stream: ")


def test_the_choice_is_described_by_speeds():
    described = DrafterChoice("b", 100.0, {"a": 1.5, "b": 1.1}).describe()
    speeds = "drafter b; expected tokens/s of one stream: a 150, b 110, no drafts 100"
    assert described == f"{speeds} (a is not ahead by the required margin)"
    assert DrafterChoice("a", 100.0, {"b": 1.1, "a": 1.5}).describe() == (
        "drafter a; expected tokens/s of one stream: a 150, b 110, no drafts 100"
    )


def test_a_draft_model_has_to_be_faster_by_more_than_the_cost_of_its_process():
    costs = dict.fromkeys(("first", "second"), table(0.01, 0.01, 0.01))
    first = (SuiteAcceptance("a", 0.0, 1.0, (0.8, 0.5)),)  # 2.3 tokens a step, and 2.7
    acceptance = {"first": first, "second": (NGRAM[0],)}
    assert DrafterChoice.of(acceptance, costs).name == "second"
    assert DrafterChoice.of(acceptance, costs, ["second"]).name == "first"


def test_only_suites_that_all_cards_have_are_compared():
    costs = dict.fromkeys(("first", "second"), table(0.01, 0.01, 0.01))
    other = SuiteAcceptance("edit", 0.0, 1.0, (1.0, 1.0))
    found = DrafterChoice.of({"first": (LOOKUP[1], other), "second": NGRAM}, costs)
    assert found.name == "second"
    assert found.speedups["first"] == pytest.approx(1.1)


@pytest.fixture
def alias(tiny_model_dir, tmp_path, monkeypatch):
    return shipped_aliases(tiny_model_dir, tmp_path, monkeypatch)


@pytest.fixture
def measured():
    """Return a measurement, and the configurations that it was called with."""
    calls = []

    def measure(config, drafters):
        calls.append(config)
        return {each.name: table(0.01, 0.011, 0.012) for each in drafters}

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
    assert [each.split(";")[0] for each in lines] == [
        "measuring the drafters of tiny (once for this machine and precision)",
        "drafter tiny-ngram",
        "drafter tiny-ngram",
    ]
    with_fastest_drafter(replace(config, quantization="int8"), lines.append, measure)
    assert len(calls) == 2


def test_a_draft_model_in_the_same_process_has_to_be_a_little_faster(
    tiny_model_dir, tmp_path, monkeypatch
):
    drafters = (DRAFTERS[0], ShippedDrafter("tiny-draft", "draft_model", 2))
    shipped_aliases(tiny_model_dir, tmp_path, monkeypatch, drafters)

    def measure(config, drafters):
        return {each.name: table(0.01, 0.018, 0.02) for each in drafters}  # 1.0 and 1.125

    config = LLMConfig(model="tiny")
    for in_process, method in ((True, "draft_model"), (False, "suffix")):
        found = with_fastest_drafter(config, lambda _: None, measure, in_process=in_process)
        assert found.speculative_config.method == method


def test_a_card_that_changed_is_measured_again(alias, measured, tmp_path):
    measure, calls = measured
    with_fastest_drafter(LLMConfig(model="tiny"), lambda _: None, measure)
    card = tmp_path / DRAFTERS[1].name / "card.json"
    card.write_text(card.read_text().replace("[60, 40]", "[1, 0]"))
    found = with_fastest_drafter(LLMConfig(model="tiny"), lambda _: None, measure)
    assert found.speculative_config.method == "suffix"
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
    def fail(config, drafters):
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


def test_a_process_measures_the_steps(tiny_model_dir):
    values = {"model": str(tiny_model_dir), "kernels": "torch", "speculative_config": AUTO}
    tables = measure_in_process(LLMConfig.from_mapping(values), DRAFTERS)
    assert tables.keys() == {each.name for each in DRAFTERS}
    for each in tables.values():
        assert each.batch_sizes == (1,)
        assert each.draft_tokens[0] == 0
        assert each.draft_tokens[-1] == 2
        assert each.step_s(1, 0) > 0


def test_a_process_that_fails_is_one_line(tmp_path):
    with pytest.raises(TrialError, match=r"could not be measured: .*not found") as caught:
        measure_in_process(LLMConfig(model=str(tmp_path / "none")), DRAFTERS)
    assert "\n" not in str(caught.value)


def test_lookups_alone_are_not_measured(alias):
    config = LLMConfig(model="tiny")
    assert with_fastest_drafter(config, pytest.fail) is config


@pytest.mark.parametrize("output", ["dnnl_verbose", "{}\n[1]", '{"a": {}}'])
def test_a_process_with_another_output_has_failed(output, tiny_model_dir, monkeypatch):
    ended = subprocess.CompletedProcess((), 0, output, "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(TrialError, match="could not be measured"):
        measure_in_process(LLMConfig(model=str(tiny_model_dir)), DRAFTERS)


def test_a_process_that_hangs_is_ended(tiny_model_dir, monkeypatch):
    monkeypatch.setattr("specdec.llm.drafter_choice._TIMEOUT_S", 0.1)
    with pytest.raises(TrialError, match=r"not measured within 0\.1 s"):
        measure_in_process(LLMConfig(model=str(tiny_model_dir)), DRAFTERS)


def test_without_a_gpu_device_cuda_is_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr("specdec.config.hardware.num_gpus", lambda: 0)
    with pytest.raises(InvalidValueError, match="device is 'cuda'; it must be cpu or auto"):
        measure_in_process(LLMConfig(model="smollm2-135m-instruct", device="cuda"), DRAFTERS)
