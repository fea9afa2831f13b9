"""Trial compilation of grammars in a separate process with resource limits.

llguidance limits most costs of a grammar, but not all: long chains of references overflow the
native stack, and some numbers cost minutes and gigabytes. Native code in a thread can neither be
stopped nor isolated. A grammar that passes here compiles within the limits.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict
from typing import IO

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from specdec.text.grammar.translation import plain_reason, reason_of, to_llguidance
from specdec.text.grammar.vocabulary import GrammarVocabulary
from specdec.types.errors import InvalidValueError, OverloadedError
from specdec.types.sampling.sampling_params import StructuredOutput

CPU_LIMIT_S = 1.0
_WALL_LIMIT_S = 10.0
_SETUP_LIMIT_S = 60.0
_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
"""The environment variables of the process: API keys and tokens are not for what grammars run."""
_MEMORY_LIMIT_BYTES = 2 * 2**30
_STACK_LIMIT_BYTES = 2**20
"""Less than the stack of any thread that compiles."""

_NOT_READY = (
    "structured_output was not compiled, since the process that tries grammars is still starting; "
    "retry later"
)
_ENDED = (BrokenPipeError, EOFError)
"""Errors of writing to a process that has ended, and of reading from it."""

LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=4_000,
    max_lexer_states=120_000,
    max_grammar_size=25_000,
    verbose_errors=False,
)
"""A grammar that exceeds these limits is rejected, or fails its request with an error."""


class TrialProcess:
    """A process that compiles grammars one by one; it is restarted after a crash or time-out.

    Thread-safe: calls run one after the other. A restart continues in the background.
    """

    def __init__(self, vocabulary: str) -> None:
        """Start the process, without waiting for it. vocabulary: a GrammarVocabulary as JSON."""
        self._setup = vocabulary
        self._lock = threading.Lock()
        self._process = self._start()
        self._has_setup = self._is_ready = False
        self._is_closed = False

    def prepare(self) -> None:
        """Wait until the process has read the vocabulary, so that the first grammar need not."""
        with self._lock, suppress(*_ENDED):
            if not self._is_closed:
                self._wait_until_ready()

    def fault(self, spec: StructuredOutput) -> str | None:
        """Return why `spec` cannot be compiled within the limits; None if it can.

        Raises OverloadedError while the process has not read the vocabulary.
        """
        with self._lock:
            self._require_ready()
            answer = self._ask(spec)
            if answer is None:
                self._restart()
                limits = f"{CPU_LIMIT_S:g} s and {_MEMORY_LIMIT_BYTES >> 30} GiB"
                return f"its compilation exceeds {limits}, or it is nested too deeply"
        reason: str | None = json.loads(answer)
        return reason

    def close(self) -> None:
        """Kill the process."""
        self._is_closed = True
        self._process.kill()
        with self._lock:  # waits for its end
            self._process.communicate()

    def _restart(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._process = self._start()
        self._has_setup = self._is_ready = False
        threading.Thread(target=self.prepare, name="grammar trial", daemon=True).start()

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "specdec.text.grammar.trial"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=_environment(),
        )
        return process

    def _ask(self, spec: StructuredOutput) -> str | None:
        """Return the answer; None if the process died or timed out."""
        try:
            self._send(json.dumps(asdict(spec)))
            return self._receive(_WALL_LIMIT_S)
        except _ENDED:
            return None

    def _require_ready(self) -> None:
        """Raise OverloadedError unless the process is ready; restart one that has ended before."""
        try:
            self._wait_until_ready()
        except _ENDED:
            self._restart()
        if not self._is_ready:
            raise OverloadedError(_NOT_READY)

    def _wait_until_ready(self) -> None:
        """Send the vocabulary, once, and wait for the answer, which no grammar may take for its."""
        if not self._has_setup:
            self._has_setup = True
            self._send(self._setup)
        if not self._is_ready:
            self._is_ready = self._receive(_SETUP_LIMIT_S) is not None

    def _send(self, line: str) -> None:
        stream = self._process.stdin
        assert stream is not None
        stream.write(line + "\n")
        stream.flush()

    def _receive(self, timeout_s: float) -> str | None:
        """Return the next answer; None after `timeout_s`. Raises EOFError if the process ended."""
        stream = self._process.stdout
        assert stream is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                return None
        if not (line := stream.readline()):
            raise EOFError
        return line


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(sys.path)}


def first_matcher(tokenizer: LLTokenizer, spec: StructuredOutput) -> LLMatcher:
    """Make a matcher before the first token.

    For an invalid grammar the matcher is in its error state, or InvalidValueError is raised.
    """
    matcher = LLMatcher(tokenizer, to_llguidance(spec), log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # detects grammars that no text satisfies
    return matcher


def serve(requests: IO[str], answers: IO[str]) -> None:
    """Read the vocabulary, then answer each grammar with a line of JSON: null, or the fault."""
    tokenizer = GrammarVocabulary(**json.loads(requests.readline())).tokenizer()
    _answer(answers, None)
    for line in requests:
        spec = StructuredOutput(**json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)  # SIGPROF kills the process
        reason = _try(tokenizer, spec)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _answer(answers, reason)


def _try(tokenizer: LLTokenizer, spec: StructuredOutput) -> str | None:
    try:
        matcher = first_matcher(tokenizer, spec)
    except InvalidValueError as error:
        return reason_of(error)
    return plain_reason(matcher.get_error()) if matcher.is_error() else None


def _answer(answers: IO[str], reason: str | None) -> None:
    answers.write(json.dumps(reason) + "\n")
    answers.flush()


def _limit_resources() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_LIMIT_BYTES, _MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_LIMIT_BYTES, _STACK_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    _limit_resources()
    serve(sys.stdin, sys.stdout)
