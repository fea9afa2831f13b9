"""Step times of drafters: a head costs more than a lookup, and a draft model too."""

import io
import json
from contextlib import contextmanager
from dataclasses import asdict
from types import SimpleNamespace

from specdec.config.llm import LLMConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.llm import drafter_trial
from specdec.llm.drafter_measurement import LOADED
from specdec.models.llama import CausalDecoder
from specdec.speculation.policy import factory
from tests.specdec.heads import fitted_medusa_dir
from tests.specdec.llm.shipped import DRAFTERS, measured_speeds

LIMITS = {"max_num_seqs": 1, "max_num_batched_tokens": 128, "max_model_len": 128}


def drafters(target, directory):
    head = fitted_medusa_dir(target, directory, [list(range(3, 30))])
    return {
        "short": SpeculativeConfig.of("ngram", 1),
        "head": SpeculativeConfig.of("medusa", 3, model=str(head)),
        "model": SpeculativeConfig.of("colocated_draft_model", 2, model=str(target)),
        "long": SpeculativeConfig.of("suffix", 4),
    }


def config_of(directory):
    return LLMConfig(str(directory), kernels="torch", speculative_config=None, **LIMITS)


def count_passes_as_seconds(monkeypatch):
    """Let a second of the profiler be a forward pass of a decoder."""
    passes = []
    forward = CausalDecoder.forward

    def counted(*args, **keys):
        passes.append(None)
        return forward(*args, **keys)

    monkeypatch.setattr(CausalDecoder, "forward", counted)
    monkeypatch.setattr(factory, "time", SimpleNamespace(perf_counter=lambda: len(passes)))


def test_each_kind_of_drafter_is_measured(tiny_model_dir, tmp_path, monkeypatch):
    count_passes_as_seconds(monkeypatch)
    found = drafters(tiny_model_dir, tmp_path)
    with drafter_trial.loaded(config_of(tiny_model_dir), found) as candidates:
        tables = {tuple(each.names): each.measure() for each in candidates}
    assert list(tables) == [("head",), ("model",), ("short", "long")]
    counts = [each.draft_tokens for each in tables.values()]
    assert counts == [(0, 1, 3), (0, 1, 2), (0, 1, 2, 4)]
    own = tables["model",]
    passes = [round(own.step_s(1, count)) for count in (0, 1, 2)]
    assert passes == [1, 2, 3], "the model drafts for itself, one token after the other"


def test_lookups_alone_have_a_target(tiny_model_dir, tmp_path):
    found = {"short": SpeculativeConfig.of("ngram", 1), "long": SpeculativeConfig.of("suffix", 4)}
    with drafter_trial.loaded(config_of(tiny_model_dir), found) as [candidate]:
        assert candidate.names == ["short", "long"]
        assert candidate.measure().draft_tokens == (0, 1, 2, 4)


def test_the_end_of_loading_is_reported_before_the_measurement(monkeypatch, capsys):
    @contextmanager
    def loaded(*_):
        print("loads")
        yield []

    def measure(*_):
        print("measures")
        return speeds

    speeds = measured_speeds(None, DRAFTERS, {}, print)
    monkeypatch.setattr(drafter_trial, "loaded", loaded)
    monkeypatch.setattr(drafter_trial, "measure_rounds", measure)
    monkeypatch.setattr(
        "sys.stdin", io.StringIO('{"config": {}, "drafters": {}, "acceptance": {}}')
    )
    drafter_trial.main()
    *lines, result = capsys.readouterr().out.splitlines()
    assert lines == ["loads", LOADED, "measures"]
    assert json.loads(result).keys() == asdict(speeds).keys()
