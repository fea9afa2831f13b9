"""The helper process of trial compilations, its restart and its end."""

import json
import sys
import threading
from pathlib import Path

import pytest

from specdec.text.grammar.trial import TrialProcess
from specdec.text.grammar.vocabulary import GrammarVocabulary
from specdec.types.errors import OverloadedError
from specdec.types.sampling.sampling_params import StructuredOutput
from tests.specdec.text.grammar.vocabulary import EOS, VOCAB_SIZE

BOMB = StructuredOutput(json_schema=json.dumps({"type": "integer", "multipleOf": 99_999_999}))
NOT_READY = (
    "structured_output was not compiled, since the process that tries grammars is still starting; "
    "retry later"
)
ORDINARY = StructuredOutput(regex="[a-z]+")


@pytest.fixture
def trial(tokenizer):
    trial = TrialProcess(GrammarVocabulary.of(tokenizer, VOCAB_SIZE, EOS).to_json())
    yield trial
    trial.close()


def _wait_for_the_restart():
    for thread in threading.enumerate():
        if thread.name == "grammar trial":
            thread.join(30)


def test_a_killed_process_restarts_before_the_next_grammar(trial):
    trial.prepare()
    assert "its compilation exceeds 1 s" in trial.fault(BOMB)
    _wait_for_the_restart()
    assert trial._is_ready
    assert trial.fault(ORDINARY) is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_has_no_secrets(tokenizer, monkeypatch):
    monkeypatch.setenv("SPECDEC_API_KEYS", "sk-not-for-the-grammar")
    trial = TrialProcess(GrammarVocabulary.of(tokenizer, VOCAB_SIZE, EOS).to_json())
    try:
        trial.prepare()
        environment = Path(f"/proc/{trial._process.pid}/environ").read_bytes()
        assert b"PYTHONPATH=" in environment
        assert b"sk-not-for-the-grammar" not in environment
        assert trial.fault(ORDINARY) is None
    finally:
        trial.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_starts_without_numpy(trial):
    """Its import would double the time of the start."""
    trial.prepare()
    loaded = Path(f"/proc/{trial._process.pid}/maps").read_bytes()
    assert b"llguidance" in loaded
    assert b"numpy" not in loaded


def test_grammars_are_compiled_during_a_restart(trial):
    trial.fault(BOMB)
    assert trial.fault(ORDINARY) is None


def test_a_process_that_is_not_ready_in_time_is_kept(trial, monkeypatch):
    """The late answer to the vocabulary passes for none to a grammar."""
    with monkeypatch.context() as slow:
        slow.setattr(trial, "_receive", lambda timeout_s: None)
        trial.prepare()
        with pytest.raises(OverloadedError) as raised:
            trial.fault(ORDINARY)
    assert str(raised.value) == NOT_READY
    process = trial._process
    assert "its compilation" not in trial.fault(StructuredOutput(regex="("))
    assert trial.fault(ORDINARY) is None
    assert trial._process is process


def test_a_process_that_ends_before_it_is_ready_restarts(trial):
    trial._process.kill()
    trial.prepare()
    with pytest.raises(OverloadedError) as raised:
        trial.fault(ORDINARY)
    assert str(raised.value) == NOT_READY
    _wait_for_the_restart()
    assert trial.fault(ORDINARY) is None


def test_a_process_is_closed_during_its_restart(trial):
    trial.fault(BOMB)
    trial.close()
    _wait_for_the_restart()
    assert trial._process.returncode is not None
