"""Compare llguidance with xgrammar for docs/adr/0008: compile time, mask time, coverage.

xgrammar is not a dependency of this project. Install it separately to include it:

    pip install --no-deps --target build/xgrammar xgrammar==0.2.8 apache-tvm-ffi
    PYTHONPATH=build/xgrammar python -m benchmarks.grammar_libraries
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.workloads import MODEL
from specdec.models.config.model_config import ModelConfig
from specdec.models.resolve import resolve
from specdec.text.tokenizer import Tokenizer

_TIMEOUT_S = 30.0
_LOADED = "loaded"
_PATTERN = "^.*(a|b|c).{20}$"

_CASES: dict[str, tuple[str, Any, str]] = {  # kind, grammar, text to match
    "small schema": (
        "json",
        {"properties": {"name": {"type": "string"}, "age": {"type": "integer", "maximum": 120}}},
        '{"name":"Alice Johnson","age":42}',
    ),
    "any object": ("json", {"type": "object"}, '{"name":"Alice","list":[42,true,{"a":1.5e3}]}'),
    "30,000 texts": ("json", {"enum": [f"value number {i} of many" for i in range(30_000)]}, '"va'),
    "2,000 optional properties": (
        "json",
        {"properties": {f"p{i}": {"type": "integer"} for i in range(2000)}},
        '{"p0":1,"p17":2}',
    ),
    "50 patterns": (
        "json",
        {
            "properties": {f"s{i}": {"type": "string", "pattern": _PATTERN} for i in range(50)},
            "required": [f"s{i}" for i in range(50)],
        },
        '{"s0":"hello abc',
    ),
    "1,000 levels": ("json", '{"properties":{"a":' * 1000 + "{}" + "}}" * 1000, '{"a":{"a":'),
    "6,000 properties": (
        "json",
        {"properties": {f"p{i}": {"pattern": f"^[a-z]{{1,{i % 50 + 1}}}$"} for i in range(6000)}},
        '{"p0":',
    ),
    "states of a regex": ("regex", ".*a.{30}b", "aaaa bbbb aaaa"),
    "nested repeats": ("regex", "((a{0,100}){0,100}){0,100}", "aaaaaaa"),
    "unicode class": ("regex", r"\p{L}{1,3000}", "hello"),
    "uniqueItems": (
        "json",
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        "[1,1]",
    ),
    "not": (
        "json",
        {"properties": {"a": {"type": "integer"}}, "not": {"required": ["a"]}},
        '{"a":1}',
    ),
}


@dataclass(frozen=True)
class Result:
    """One case with one library, in CPU time.

    error: why the grammar was rejected.
    follows: whether the grammar accepts the case's text.
    """

    case: str
    library: str
    compile_ms: float
    mask_ms: float = 0.0
    slowest_mask_ms: float = 0.0
    follows: bool = False
    error: str = ""


class _Llguidance:
    """Masks by llguidance with its default limits."""

    def __init__(self, directory: Path, vocab_size: int, eos_token_id: int) -> None:
        from llguidance import LLMatcher, LLTokenizer

        tokenizer = LLTokenizer(Tokenizer(directory).to_json(), vocab_size, eos_token_id)
        self._tokenizer = tokenizer
        self._matchers = LLMatcher

    def compile(self, kind: str, text: str) -> None:
        options = {"whitespace_flexible": False}
        if kind == "regex":
            grammar = self._matchers.grammar_from_regex(text)
        else:
            grammar = self._matchers.grammar_from_json_schema(text, overrides=options)  # type: ignore[arg-type]
        self._matcher = self._matchers(self._tokenizer, grammar, log_level=0)
        self.mask()

    def mask(self) -> None:
        self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise ValueError(self._matcher.get_error())

    def advance(self, token_id: int) -> bool:
        return self._matcher.try_consume_tokens([token_id]) == 1


class _Xgrammar:
    """Masks by xgrammar on one thread, without its cache."""

    def __init__(self, directory: Path, vocab_size: int, eos_token_id: int) -> None:
        import xgrammar  # type: ignore[import-not-found]
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(directory)
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._matchers = xgrammar.GrammarMatcher
        self._bitmask = xgrammar.allocate_token_bitmask(1, vocab_size)

    def compile(self, kind: str, text: str) -> None:
        if kind == "regex":
            compiled = self._compiler.compile_regex(text)
        else:
            compiled = self._compiler.compile_json_schema(
                text, any_whitespace=False, separators=(",", ":")
            )
        self._matcher = self._matchers(compiled)
        self.mask()

    def mask(self) -> None:
        self._matcher.fill_next_token_bitmask(self._bitmask)

    def advance(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))


_LIBRARIES: dict[str, Callable[[Path, int, int], _Llguidance | _Xgrammar]] = {
    "llguidance": _Llguidance,
    "xgrammar": _Xgrammar,
}


def main() -> None:
    """Print one line of JSON per case and library."""
    for case in _CASES:
        for library in _LIBRARIES:
            print(json.dumps(asdict(_measured_apart(library, case))), flush=True)


def _measured_apart(library: str, case: str) -> Result:
    """Measure in a separate process, which can be killed."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.Process(target=_measure, args=(library, case, sender))
    process.start()
    sender.close()
    try:
        assert receiver.recv() == _LOADED
        if receiver.poll(_TIMEOUT_S):
            result: Result = receiver.recv()
            return result
        return Result(case, library, _TIMEOUT_S * 1e3, error="stopped at the time limit")
    except EOFError:
        return Result(case, library, 0, error="the process died")
    finally:
        process.kill()
        process.join()


def _measure(library: str, case: str, sender: Connection) -> None:
    kind, value, text = _CASES[case]
    directory = resolve(MODEL)
    model = ModelConfig.from_directory(directory)
    masks = _LIBRARIES[library](directory, model.vocab_size, min(model.eos_token_ids))
    token_ids = Tokenizer(directory).encode(text, add_special_tokens=False)
    sender.send(_LOADED)
    started_at = time.process_time()
    times_ms: list[float] = []
    try:
        masks.compile(kind, value if isinstance(value, str) else json.dumps(value))
        compile_ms = (time.process_time() - started_at) * 1e3
        follows = all(_timed_step(masks, token, times_ms) for token in token_ids)
    except Exception as error:  # the libraries raise various types for a grammar
        seconds = time.process_time() - started_at
        message = " ".join(str(error).split())[:120]
        sender.send(Result(case, library, round(seconds * 1e3, 2), error=message))
        return
    mean_ms = sum(times_ms) / len(times_ms)
    timings = (round(compile_ms, 3), round(mean_ms, 3), round(max(times_ms), 3))
    sender.send(Result(case, library, *timings, follows))


def _timed_step(masks: _Llguidance | _Xgrammar, token_id: int, times_ms: list[float]) -> bool:
    started_at = time.process_time()
    masks.mask()
    times_ms.append((time.process_time() - started_at) * 1e3)
    return masks.advance(token_id)


if __name__ == "__main__":
    main()
