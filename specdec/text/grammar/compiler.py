"""Grammar compiler: compiles in background threads, by turns of the callers, with an LRU cache."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from threading import Lock

from llguidance import LLTokenizer

from specdec.text.grammar.fair_queue import FairQueue
from specdec.text.grammar.matcher import MAX_SHARING, Grammar, mask_words
from specdec.text.grammar.translation import refusal
from specdec.text.grammar.trial import TrialProcess, first_matcher
from specdec.text.tokenizer import Tokenizer
from specdec.types.errors import InvalidValueError, OverloadedError, UnsupportedModelError
from specdec.types.request import OWN_PROCESS, Caller
from specdec.types.sampling.sampling_params import StructuredOutput

COMPILE_TIMEOUT_S = 1.9
TIMED_OUT = (
    f"structured_output was not compiled within {COMPILE_TIMEOUT_S:g} s, since other grammars are "
    "being compiled; retry later"
)
NUM_THREADS = 2
NUM_TRIAL_PROCESSES = NUM_THREADS + 1
"""One more than there are threads, so that a grammar does not wait for a process to restart."""

MAX_WAITING = 16
"""Limit of the compilations of one caller that wait or run."""

MAX_WAITING_OF_STRANGER = 8
"""The same for a caller without an API key."""

MAX_CACHED_GRAMMARS = 64
MAX_CACHED_BYTES = 512 * 2**20

_BYTES_PER_SECOND = 150e6
"""Upper bound of the allocation rate while compiling (docs/adr/0008), to estimate sizes from."""


@dataclass(eq=False)
class _Compilation:
    """A compilation of one copy that waits, runs or has ended.

    former: that of the copy before, until this one has ended. num_sequences: for which the copy was
    handed out, whether they start or not.
    """

    spec: StructuredOutput
    former: _Compilation | None
    num_sequences: int = 0
    result: Future[Grammar] = field(default_factory=Future)

    @property
    def is_ready(self) -> bool:
        """Return whether it has succeeded."""
        done = self.result.done() and not self.result.cancelled()
        return done and self.result.exception() is None

    def has_room(self, num_sequences: int) -> bool:
        """Return whether further sequences may use the same copy."""
        is_exhausted = self.is_ready and self.result.result().is_exhausted
        return self.num_sequences + num_sequences <= MAX_SHARING and not is_exhausted


class GrammarCompiler:
    """Grammar compiler of one vocabulary. Thread-safe.

    Callers take turns (`FairQueue`): however many grammars one of them has queued, a grammar of
    another one waits for at most one compilation.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Collection[int],
        timeout_s: float | None = COMPILE_TIMEOUT_S,
        tries_first: bool = True,
    ) -> None:
        """Start to read the vocabulary in the background.

        vocab_size: the model's, which may be padded beyond the tokenizer's.
        eos_token_ids: allowed if and only if an output may end.
        timeout_s: None: no limit.
        tries_first: whether to compile in a separate process first (`TrialProcess`). False for
            draft workers, which get only grammars that were tried. Their ranks must agree, so their
            cache is limited by the number of grammars only, not by compile times.
        """
        self._tries_first = tries_first
        self._timeout_s = timeout_s
        self._eos_token_ids = frozenset(eos_token_ids)
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        special = tokenizer.special_token_ids - set(eos_token_ids)
        self._text_mask = ~mask_words((t for t in special if t < vocab_size), vocab_size)
        self._tokenizer = self._pool.submit(_read_vocabulary, tokenizer, vocab_size, eos_token_ids)
        self._prepared: list[Future[None]] = []
        self._trials = SimpleQueue[TrialProcess]()
        if tries_first:
            for _ in range(NUM_TRIAL_PROCESSES):
                trial = TrialProcess(tokenizer.to_json(), vocab_size, eos_token_ids)
                self._prepared.append(self._pool.submit(trial.prepare))
                self._trials.put(trial)
        self._lock = Lock()  # guards the two below
        self._cache: OrderedDict[StructuredOutput, _Compilation] = OrderedDict()
        self._queue = FairQueue[_Compilation]()

    def compile(
        self, spec: StructuredOutput, caller: Caller = OWN_PROCESS, num_sequences: int = 1
    ) -> Grammar:
        """Compile `spec`, or return it from the cache; blocks for up to 2 s. See `submit`.

        Waits for the vocabulary first. Raises InvalidValueError for a grammar that cannot be
        enforced or exceeds the limits of compilation, and OverloadedError if too many others are
        being compiled or no trial process is ready.
        """
        self.wait_until_ready()
        try:
            return self.submit(spec, caller, num_sequences).result(self._timeout_s)
        except TimeoutError as error:
            raise OverloadedError(TIMED_OUT) from error

    def wait_until_ready(self) -> None:
        """Block until the vocabulary has been read; that time does not count for a grammar."""
        self._tokenizer.exception()
        wait(self._prepared)

    def close(self) -> None:
        """Stop the trial processes after the current compilations."""
        self._pool.shutdown(cancel_futures=True)
        with self._lock:
            while self._queue:
                self._queue.take().result.cancel()
        while not self._trials.empty():
            self._trials.get().close()

    def submit(
        self, spec: StructuredOutput, caller: Caller = OWN_PROCESS, num_sequences: int = 1
    ) -> Future[Grammar]:
        """Compile `spec` in the background, for the choices of one request.

        A copy is handed out for at most MAX_SHARING sequences: they share a limited number of lexer
        states, and none may fail because of the others. The future may be shared with other callers
        and must not be cancelled. Raises OverloadedError.
        """
        starts = range(0, num_sequences, MAX_SHARING)
        with self._lock:
            return _joined(
                [
                    self._copy_for(min(num_sequences - start, MAX_SHARING), spec, caller)
                    for start in starts
                ]
            )

    def _copy_for(
        self, num_sequences: int, spec: StructuredOutput, caller: Caller
    ) -> Future[Grammar]:
        """Return a copy with room for sequences. Further copies of a grammar have no limit."""
        known = self._cache.get(spec)
        limit = MAX_WAITING_OF_STRANGER if caller.is_stranger else MAX_WAITING
        max_open = limit if known is None else math.inf
        is_same = known is not None and known.has_room(num_sequences)
        compilation = known if known is not None and is_same else _Compilation(spec, known)
        if not compilation.result.done() and self._queue.put(compilation, caller, max_open):
            self._pool.submit(self._run_next)
        compilation.num_sequences += num_sequences
        self._cache[spec] = compilation
        self._cache.move_to_end(spec)
        return compilation.result

    def _run_next(self) -> None:
        """Run the next compilation in the queue. A failure is not cached."""
        with self._lock:
            compilation = self._queue.take()
        outcome = self._outcome(compilation)
        with self._lock:
            self._queue.finish(compilation)
            compilation.former = None
            if isinstance(outcome, Grammar):
                compilation.result.set_result(outcome)
                self._evict()
            else:
                compilation.result.set_exception(outcome)
                if self._cache.get(compilation.spec) is compilation:
                    del self._cache[compilation.spec]

    def _outcome(self, compilation: _Compilation) -> Grammar | BaseException:
        """Compile a copy; what the one before has shown is not tried again."""
        former = compilation.former
        try:
            if former is not None and former.result.done():
                former.result.result()
            return self._compile(compilation.spec, is_tried=former is not None and former.is_ready)
        except BaseException as error:
            return error

    def _evict(self) -> None:
        """Apply the limits of the cache."""
        ready = [each.result.result() for each in self._cache.values() if each.is_ready]
        num_bytes = sum(map(_num_bytes, ready)) if self._tries_first else 0.0
        for index, grammar in enumerate(ready):  # least recently used first
            if len(ready) - index <= MAX_CACHED_GRAMMARS and num_bytes <= MAX_CACHED_BYTES:
                break
            num_bytes -= _num_bytes(grammar)
            del self._cache[grammar.spec]

    def _compile(self, spec: StructuredOutput, *, is_tried: bool) -> Grammar:
        try:
            tokenizer = self._tokenizer.result()
        except UnsupportedModelError as error:
            raise InvalidValueError("structured_output", spec.kind, f"left out: {error}") from error
        if self._tries_first and not is_tried:
            self._try(spec)
        started_s = time.thread_time()
        matcher = first_matcher(tokenizer, spec)
        if matcher.is_error():
            raise refusal(spec.kind, getattr(spec, spec.kind), matcher.get_error())
        compile_s = time.thread_time() - started_s
        return Grammar(spec, matcher, self._text_mask, self._eos_token_ids, compile_s)

    def _try(self, spec: StructuredOutput) -> None:
        trial = self._trials.get()  # never blocks: more processes than threads
        try:
            reason = trial.fault(spec)
        finally:
            self._trials.put(trial)
        if reason is not None:
            raise refusal(spec.kind, getattr(spec, spec.kind), reason)


def _joined(copies: Sequence[Future[Grammar]]) -> Future[Grammar]:
    """Return the first copy, with the others of its request. The futures end one at a time."""
    if len(copies) == 1:
        return copies[0]
    joined = Future[Grammar]()

    def settle(_: Future[Grammar]) -> None:
        if joined.done() or not all(each.done() for each in copies):
            return
        try:
            first, *others = (each.result() for each in copies)
        except BaseException as error:
            joined.set_exception(error)
        else:
            joined.set_result(replace(first, others=tuple(others)))

    for each in copies:
        each.add_done_callback(settle)
    return joined


def _num_bytes(grammar: Grammar) -> float:
    return grammar.compile_s * _BYTES_PER_SECOND


def _read_vocabulary(
    tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]
) -> LLTokenizer:
    try:
        return LLTokenizer(tokenizer.to_json(), vocab_size, sorted(eos_token_ids))
    except ValueError as error:
        raise UnsupportedModelError(f"the tokenizer is not supported: {error}") from error
