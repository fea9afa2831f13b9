# Modules: specdec.text.grammar.compiler
"""The copies of a grammar, each of which a limited number of sequences shares."""

import time

import pytest

from specdec.text.grammar.compiler import MAX_WAITING, MAX_WAITING_COPIES, NUM_THREADS
from specdec.text.grammar.matcher import MAX_SHARING
from specdec.types.errors import InvalidValueError, OverloadedError
from specdec.types.request import Caller
from specdec.types.sampling.sampling_params import StructuredOutput


def test_sequences_per_copy_are_limited(counted):
    compiler, gate, calls = counted
    gate.set()
    spec = StructuredOutput(regex="a*")
    for _ in range(2 * MAX_SHARING):
        compiler.compile(spec)
    assert len(calls) == 2


def test_sequences_of_a_copy_count_before_it_is_compiled(counted):
    """Also those of one request, and in spite of the limit of grammars that wait."""
    compiler, gate, calls = counted
    spec, caller = StructuredOutput(regex="a*"), Caller("ann")
    single = [compiler.submit(spec, caller) for _ in range(MAX_WAITING * MAX_SHARING)]
    many = compiler.submit(spec, caller, 2 * MAX_SHARING + 1)
    gate.set()
    copies = [each.result(10) for each in single]
    assert {copies.count(each) for each in copies} == {MAX_SHARING}
    own = [many.result(10).of_choice(choice).start for choice in range(2 * MAX_SHARING + 1)]
    assert {own.count(each) for each in own} == {MAX_SHARING, 1}
    assert not {each.start for each in copies} & set(own)
    rest = compiler.compile(spec, MAX_SHARING - 1)
    assert rest.start is own[-1]
    assert len(calls) == MAX_WAITING + 3


def test_further_copies_are_tried_once(counted, monkeypatch):
    compiler, gate, calls = counted
    gate.set()
    tried = []
    monkeypatch.setattr(compiler, "_tries_first", True)
    monkeypatch.setattr(compiler, "_try", tried.append)
    for _ in range(3):
        compiler.compile(StructuredOutput(regex="a"), num_sequences=MAX_SHARING)
    assert (len(tried), len(calls)) == (1, 3)


@pytest.mark.parametrize("regex", ["a*", "(a"])
def test_copies_wait_for_the_trial_of_the_first(counted, monkeypatch, regex):
    """So one trial, and one compilation where it fails, is all that they cost."""
    compiler, gate, calls = counted
    tried = []
    monkeypatch.setattr(compiler, "_tries_first", True)
    monkeypatch.setattr(compiler, "_try", tried.append)
    spec = StructuredOutput(regex=regex)
    copies = [compiler.submit(spec, num_sequences=4 * MAX_SHARING) for _ in range(2)]
    while not calls:
        time.sleep(0.001)
    assert not compiler._queue
    gate.set()
    errors = [each.exception(10) for each in copies]
    is_valid = regex == "a*"
    assert {type(each) for each in errors} == {type(None) if is_valid else InvalidValueError}
    assert (len(tried), len(calls)) == (1, 8 if is_valid else 1)


@pytest.mark.parametrize("is_stranger", [False, True])
def test_the_further_copies_of_a_caller_are_limited(counted, is_stranger):
    """A refused request has no sequences of a copy."""
    compiler, gate, calls = counted
    spec, caller = StructuredOutput(regex="a*"), Caller("192.0.2.7", is_stranger=is_stranger)
    rest = MAX_WAITING_COPIES % 5
    held = [compiler.submit(spec, caller, 5 * MAX_SHARING) for _ in range(MAX_WAITING_COPIES // 5)]
    with pytest.raises(OverloadedError, match=f"limit {MAX_WAITING_COPIES}"):
        compiler.submit(spec, caller, 5 * MAX_SHARING)
    held.append(compiler.submit(spec, caller, rest * MAX_SHARING))
    own = compiler.submit(spec, num_sequences=MAX_SHARING)
    gate.set()
    assert all(each.result(10).spec == spec for each in (*held, own))
    assert len(calls) == MAX_WAITING_COPIES + 1


def test_copies_that_no_request_awaits_are_dropped(counted):
    compiler, gate, calls = counted
    caller, compiled, known = Caller("ann"), [], StructuredOutput(regex="c*")
    for number in range(NUM_THREADS):
        compiled.append(compiler.submit(StructuredOutput(regex=f"b{{{number}}}"), caller))
    while len(calls) < NUM_THREADS:
        time.sleep(0.001)
    for _ in range(20):
        assert compiler.submit(known, caller, 4 * MAX_SHARING).cancel()
    assert not compiler._queue
    assert known not in compiler._cache
    left, kept = (compiler.submit(known, caller, MAX_SHARING) for _ in range(2))
    assert left.cancel()  # the first copy, which the other one needs
    gate.set()
    assert kept.result(10).spec == known
    assert all(each.result(10) for each in compiled)
    assert len(calls) == NUM_THREADS + 2
