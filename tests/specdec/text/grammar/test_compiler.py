# Modules: specdec.text.grammar.translation
"""Rejection of grammars that cannot be enforced, and the cache of compiled grammars."""

import contextlib
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from llguidance import LLParserLimits

import specdec.text.grammar.compiler as compiler_module
import specdec.text.grammar.trial as trial_module
from specdec.text.grammar.compiler import (
    MAX_WAITING,
    MAX_WAITING_OF_STRANGER,
    NUM_THREADS,
    NUM_TRIAL_PROCESSES,
    GrammarCompiler,
)
from specdec.text.grammar.matcher import MAX_SHARING
from specdec.text.grammar.translation import refusal, to_llguidance
from specdec.types.errors import GrammarError, InvalidValueError, OverloadedError
from specdec.types.request import Caller
from specdec.types.sampling.sampling_params import (
    MAX_SCHEMA_CHARS,
    StructuredOutput,
    StructuredOutputsParams,
)
from tests.specdec.text.grammar.vocabulary import EOS, VOCAB_SIZE, allowed, wander

DEEP = '{"type":"object","properties":{"a":' * 5000 + "{}" + "}}" * 5000
BAD = {
    "not JSON": {"json_schema": '{"type":'},
    "no schema": {"json_schema": "3"},
    "false": {"json_schema": "false"},
    "unknown type": {"json_schema": '{"type":"strin"}'},
    "not enforceable": {"json_schema": '{"type":"array","uniqueItems":true}'},
    "not enforceable, asked to pass": {
        "json_schema": '{"type":"array","uniqueItems":true,"x-guidance":{"lenient":true}}'
    },
    "unique, beside what restricts nothing": {
        "json_schema": '{"type":"array","items":{"format":"path"},"uniqueItems":true}'
    },
    "not": {"json_schema": '{"not":{"type":"string"}}'},
    "nothing satisfies it": {"json_schema": '{"type":"integer","minimum":5,"maximum":2}'},
    "reference loop": {"json_schema": '{"$ref":"#"}'},
    "reference to the web": {"json_schema": '{"$ref":"https://example.com/schema.json"}'},
    "reference to a file": {"json_schema": '{"$ref":"file:///etc/passwd"}'},
    "reference to nothing": {"json_schema": '{"$ref":"#/$defs/none"}'},
    "nested too deeply": {"json_schema": DEEP},
    "many brackets": {"json_schema": "[" * 200_000},
    "too many combinations": {
        "json_schema": json.dumps(
            {
                "allOf": [
                    {"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(4)]}
                    for i in range(12)
                ]
            }
        )
    },
    "open group": {"regex": "(a"},
    "look-ahead": {"regex": "(?=a)b"},
    "no character": {"regex": r"[^\s\S]"},
    "no grammar": {"grammar": "hello"},
    "no such rule": {"grammar": "root ::= other"},
    "special token": {"grammar": "start: <|im_start|>"},
    "half a surrogate pair": {"grammar": 'root ::= "\\ud800"'},
    "no such character": {"grammar": 'root ::= "\\UFFFFFFFF"'},
    "nested groups": {"grammar": "root ::= " + "(" * 20_000},
    "too many rules": {
        "grammar": "\n".join(f'r{i} ::= r{i + 1} "a"' for i in range(3000)) + "\nroot ::= r0"
    },
}


@pytest.mark.parametrize("spec", BAD.values(), ids=BAD)
def test_invalid_and_hostile_grammars_are_rejected_within_two_seconds_of_cpu_time(compiler, spec):
    started_s = time.process_time()
    with pytest.raises(InvalidValueError) as caught:
        compiler.submit(StructuredOutput(**spec)).result(60)
    assert time.process_time() - started_s < 2
    (kind,) = spec
    assert caught.value.field == f"structured_output.{kind}"
    assert len(str(caught.value)) < 700
    assert caught.value.limit.count("that can be enforced: ") == 1


def test_errors_do_not_expose_the_library():
    error = refusal("regex", "a", "panic: assertion failed: x\n<backtrace>\n 0: lib.rs")
    assert str(error).endswith("enforced: it is too large")
    error = refusal("regex", "a", "NoExtensionBias\n<non-verbose/>")
    assert str(error).endswith("enforced: no text satisfies it")


def test_a_huge_number_does_not_end_the_trial_process(compiler):
    spec = StructuredOutput(json_schema=f'{{"type":"array","minItems":{10**400}}}')
    with pytest.raises(InvalidValueError) as caught:
        compiler.compile(spec)
    assert "its compilation exceeds" not in str(caught.value)


def test_errors_do_not_repeat_the_grammar(compiler):
    spec = StructuredOutput(grammar='start: a b\na: %json {"type":"any"}\nb: "x"')
    with pytest.raises(InvalidValueError) as caught:
        compiler.compile(spec)
    assert str(caught.value).endswith("failed to compile JSON schema: Invalid type: any")


@pytest.mark.parametrize("rule", ["start.1", "?start{a}", "start.2[capture] "])
def test_errors_about_lark_are_those_of_lark(compiler, rule):
    with pytest.raises(InvalidValueError, match=r"not supported yet$"):
        compiler.compile(StructuredOutput(grammar=f'{rule}: "a"'))


HOSTILE = {
    "exponential regex": {"regex": "(x+x+)+y"},
    "state explosion": {"regex": "(.*a.{40}b.*)+"},
    "many alternatives": {"regex": "|".join(f"[a-z]{{{i}}}x.*" for i in range(1, 800))},
    "large repeat": {"regex": "a{1,1000000}"},
    "huge enum": {"json_schema": json.dumps({"enum": [f"value {i}" for i in range(15_000)]})},
    "long strings": {"json_schema": '{"type":"string","minLength":50000,"maxLength":100000}'},
    "many items": {"json_schema": '{"type":"array","minItems":10000,"maxItems":100000}'},
    "many properties": {
        "json_schema": json.dumps({"properties": {f"p{i}": {} for i in range(600)}})
    },
    "slow number": {"json_schema": '{"type":"integer","multipleOf":9973}'},
    "ambiguous": {"grammar": 'start: x\nx: x x x | x x | "a"'},
    "schema at the limit": {
        "json_schema": json.dumps(
            {"properties": {f"p{i}": {"pattern": f"^[a-z]{{1,{i}}}$"} for i in range(6000)}}
        )[:MAX_SCHEMA_CHARS]
    },
}


@pytest.mark.parametrize("spec", HOSTILE.values(), ids=HOSTILE)
def test_hostile_grammars_return_within_two_seconds(compiler, spec):
    """The result is a grammar with bounded cost, or an error of the request.

    `compile` limits the time that is waited, and the trial process its own CPU time.
    """
    started_s = time.process_time()
    try:
        here = compiler.compile(StructuredOutput(**spec)).matcher()
        for _ in range(20):
            here.advance(min(allowed(here.allowed_mask()) - EOS, default=min(EOS)))
    except (InvalidValueError, GrammarError, OverloadedError):
        pass
    assert time.process_time() - started_s < 2


def test_oversized_grammars_are_rejected_before_parsing():
    for spec in (
        {"json_schema": " " * (MAX_SCHEMA_CHARS + 1)},
        {"regex": ""},
        {"grammar": "x" * 10**6},
        {"choice": ("a", "")},
        {"choice": ("x",) * 5000},
        {"regex": "\ud800"},
    ):
        with pytest.raises(InvalidValueError, match="structured_output"):
            StructuredOutput(**spec)


@pytest.mark.parametrize("fields", [{}, {"regex": "a", "json_object": True}])
def test_exactly_one_kind_is_required(fields):
    with pytest.raises(InvalidValueError, match="exactly one of"):
        StructuredOutput(**fields)


@pytest.mark.parametrize("others", [{}, {"regex": "a"}])
@pytest.mark.parametrize("kind", [StructuredOutput, StructuredOutputsParams])
def test_an_empty_choice_is_refused(kind, others):
    with pytest.raises(InvalidValueError, match=r"^structured_output\.choice length is 0; it must"):
        kind(choice=[], **others)


def test_concurrent_requests_for_a_grammar_compile_it_once(counted):
    compiler, gate, calls = counted
    with ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(compiler.compile, StructuredOutput(regex="a+")) for _ in range(8)]
        while not calls:
            time.sleep(0.001)
        gate.set()
        grammars = {each.result() for each in waiting}
    assert len(calls) == len(grammars) == 1
    assert compiler.compile(StructuredOutput(regex="a+")) in grammars


def test_a_failure_is_not_cached(counted):
    compiler, gate, calls = counted
    gate.set()
    for _ in range(2):
        with pytest.raises(InvalidValueError):
            compiler.compile(StructuredOutput(regex="(a"))
    assert len(calls) == 2


def test_least_recently_used_grammars_are_evicted(counted, monkeypatch):
    compiler, gate, calls = counted
    gate.set()
    monkeypatch.setattr(compiler_module, "MAX_CACHED_GRAMMARS", 2)
    for regex in ("a", "b", "a", "c", "a", "b"):  # c takes the place of b
        compiler.compile(StructuredOutput(regex=regex))
    assert [spec.regex for spec in calls] == ["a", "b", "c", "b"]


def test_the_cache_is_bounded_in_bytes(counted, monkeypatch):
    compiler, gate, calls = counted
    gate.set()
    monkeypatch.setattr(compiler, "_tries_first", True)  # limits the cache by compile times
    monkeypatch.setattr(compiler, "_try", lambda spec: None)
    monkeypatch.setattr(compiler_module, "MAX_CACHED_BYTES", 0)
    for _ in range(2):
        compiler.compile(StructuredOutput(regex="a"))
    assert len(calls) == 2


def test_this_process_has_no_limit(counted):
    """Its requests wait for their turn: no other one could be served instead."""
    compiler, gate, _ = counted
    specs = [StructuredOutput(regex=f"a{{{number}}}") for number in range(3 * MAX_WAITING)]
    with ThreadPoolExecutor(len(specs)) as threads:
        compiled = threads.map(compiler.compile, specs)
        while len(compiler._queue) < len(specs) - NUM_THREADS:
            time.sleep(0.001)
        gate.set()
        assert [each.spec for each in compiled] == specs


def test_a_stranger_has_a_smaller_share_and_others_keep_theirs(counted):
    compiler, _, _ = counted
    shares = {
        Caller("192.0.2.7", is_stranger=True): MAX_WAITING_OF_STRANGER,
        Caller("192.0.2.8", is_stranger=True): MAX_WAITING_OF_STRANGER,
        Caller("ann"): MAX_WAITING,
    }
    for index, (caller, limit) in enumerate(shares.items()):
        specs = [StructuredOutput(regex=f"a{{{index},{1000 + i}}}") for i in range(limit + 1)]
        for each in specs[:limit]:
            compiler.submit(each, caller)
        with pytest.raises(OverloadedError):
            compiler.submit(specs[limit], caller)
    assert MAX_WAITING_OF_STRANGER < MAX_WAITING


@pytest.mark.parametrize("is_shared", [False, True])
def test_grammars_of_another_caller_are_compiled_next(counted, is_shared):
    compiler, gate, calls = counted
    compiler.wait_until_ready()
    bombs = [StructuredOutput(regex=f"a{{{number}}}") for number in range(9)]
    for each in bombs:
        compiler.submit(each, Caller("bomber"))
    while len(calls) < NUM_THREADS:
        time.sleep(0.001)
    spec = bombs[-1] if is_shared else StructuredOutput(regex="b")
    compiled = compiler.submit(spec, Caller("user"))
    gate.set()
    assert compiled.result(10).spec == spec
    for each in bombs:
        compiler.compile(each)
    assert calls.index(spec) in (NUM_THREADS, NUM_THREADS + 1)
    assert len(calls) == len({*bombs, spec}), "a grammar was compiled twice"


def _chain(length):
    """Return a schema of references, each to the next."""
    links = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/0", "$defs": {**links, str(length): {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "count"),
    [
        pytest.param(_chain(3000), NUM_TRIAL_PROCESSES + 1, id="overflows the native stack"),
        pytest.param({"type": "integer", "multipleOf": 99_999_999}, 1, id="minutes and gigabytes"),
    ],
)
def test_grammars_that_crash_the_process_are_rejected(compiler, schema, count):
    spec = StructuredOutput(json_schema=json.dumps(schema))
    for _ in range(count):
        with pytest.raises(InvalidValueError, match="its compilation exceeds 1 s and 2 GiB"):
            compiler.submit(spec).result(60)
    assert compiler.submit(StructuredOutput(regex="[a-z]+")).result(60).matcher()


@pytest.mark.parametrize(
    "grammar",
    [
        pytest.param('start: "' + '\\"' * 32_000, id="an open text"),
        pytest.param("start: /" + "\\/" * 32_000, id="an open regex"),
        pytest.param("\n" * 65_000 + "x", id="empty lines"),
    ],
)
def test_parsing_time_is_linear(grammar):
    started_s = time.process_time()
    with contextlib.suppress(InvalidValueError):
        to_llguidance(StructuredOutput(grammar=grammar))
    assert time.process_time() - started_s < 1  # quadratic time would take minutes


def test_an_exhausted_grammar_is_compiled_again(counted):
    compiler, gate, calls = counted
    gate.set()
    spec = StructuredOutput(regex="a+")
    grammar = compiler.compile(spec)
    grammar.exhaust()
    assert compiler.compile(spec) is not grammar
    assert len(calls) == 2


def test_a_grammar_may_exhaust_its_lexer_states(tokenizer, monkeypatch, rng):
    monkeypatch.setattr(trial_module, "LIMITS", LLParserLimits(max_lexer_states=300))
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, EOS)
    spec = StructuredOutput(regex=r"[\s\S]*a[\s\S]{40}b[\s\S]*")
    grammar = compiler.compile(spec)
    with pytest.raises(GrammarError, match="too many states"):
        wander(grammar.matcher(), rng, 500)
    assert grammar.is_exhausted
    assert compiler.compile(spec) is not grammar


def test_the_other_sequences_of_an_exhausted_copy_report_it(tokenizer, monkeypatch, rng):
    monkeypatch.setattr(trial_module, "LIMITS", LLParserLimits(max_lexer_states=700))
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, EOS, tries_first=False)
    grammar = compiler.compile(StructuredOutput(regex=r"[\s\S]*a[\s\S]{40}b[\s\S]*"))
    others = [grammar.matcher() for _ in range(MAX_SHARING)]
    allowed_first = sorted(allowed(others[0].allowed_mask()) - EOS)
    with pytest.raises(GrammarError, match="too many states"):
        wander(grammar.matcher(), rng, 500)
    reasons = set()
    for other, token in zip(others, allowed_first[::-1], strict=False):
        try:
            other.advance(token)
        except GrammarError as error:
            reasons.add("too many states" in str(error))
    assert reasons == {True}


def test_an_unsupported_tokenizer_rejects_requests_only(tokenizer):
    class Odd:
        special_token_ids = added_strings = frozenset()
        decoder = None

    compiler = GrammarCompiler(Odd(), VOCAB_SIZE, EOS)
    with pytest.raises(InvalidValueError, match="left out: the tokenizer is not supported"):
        compiler.compile(StructuredOutput(json_object=True))
