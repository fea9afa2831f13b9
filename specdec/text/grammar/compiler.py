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
from specdec.text.grammar.reasoning import FreeText, ReasoningGrammar
from specdec.text.grammar.translation import limits_lexemes, refusal
from specdec.text.grammar.trial import TrialProcess, first_matcher
from specdec.text.grammar.vocabulary import GrammarVocabulary
from specdec.text.tokenizer import Tokenizer
from specdec.types.errors import (
    InvalidValueError,
    OverloadedError,
    UnsupportedModelError,
    as_exception,
)
from specdec.types.request import OWN_PROCESS, Caller
from specdec.types.sampling.reasoning_marks import ReasoningMarks
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
"""Limit of the compilations of one caller that wait or run; this process has none."""

MAX_WAITING_OF_STRANGER = 8
"""The same for a caller without an API key."""

MAX_WAITING_COPIES = 32
"""Limit of the compilations of one caller with which a further copy of a known grammar waits."""

MAX_CACHED_GRAMMARS = 64
MAX_CACHED_BYTES = 512 * 2**20
MAX_CACHED_MARKS = 8

_BYTES_PER_SECOND = 150e6
"""Upper bound of the allocation rate while compiling (docs/adr/0008), to estimate sizes from."""


@dataclass(eq=False)
class _Compilation:
    """A compilation of one copy that waits, runs or has ended.

    first: the copy that is tried for this one, until this one has ended; None for that copy.
    num_sequences: for which the copy was handed out, whether they start or not; 0 while no request
    awaits it. followers: further copies and their callers, queued once this one has succeeded.
    """

    spec: StructuredOutput
    first: _Compilation | None
    num_sequences: int = 0
    result: Future[Grammar] = field(default_factory=Future)
    followers: list[tuple[_Compilation, Caller]] = field(default_factory=list)

    @property
    def is_ready(self) -> bool:
        """Return whether it has succeeded."""
        done = self.result.done() and not self.result.cancelled()
        return done and self.result.exception() is None

    @property
    def is_held(self) -> bool:
        """Return whether it is queued only once another copy has succeeded."""
        return self.first is not None and not self.first.is_ready

    def with_followers(self) -> tuple[_Compilation, ...]:
        """Return the copies that fail if this one does."""
        return self, *dict.fromkeys(copy for copy, _ in self.followers)

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
        tries_first: bool = True,
    ) -> None:
        """Read the tokens, and prepare their tokenizer in the background.

        vocab_size: the model's, which may be padded beyond the tokenizer's.
        eos_token_ids: allowed if and only if an output may end.
        tries_first: whether to compile in a separate process first (`TrialProcess`). False for
            draft workers, which get only grammars that were tried. Their ranks must agree, so their
            cache is limited by the number of grammars only, not by compile times.
        """
        self._tries_first = tries_first
        self._eos_token_ids = frozenset(eos_token_ids)
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        special = tokenizer.special_token_ids - set(eos_token_ids)
        self._text_mask = ~mask_words((t for t in special if t < vocab_size), vocab_size)
        self._tokenizer = Future[LLTokenizer]()
        self._prepared: list[Future[None]] = []
        self._trials = SimpleQueue[TrialProcess]()
        self._free_texts: dict[ReasoningMarks, FreeText] = {}
        try:
            self._vocabulary = GrammarVocabulary.of(tokenizer, vocab_size, eos_token_ids)
        except UnsupportedModelError as error:
            self._tokenizer.set_exception(error)
        else:
            self._start(self._vocabulary)
        self._lock = Lock()  # guards the two below
        self._cache: OrderedDict[StructuredOutput, _Compilation] = OrderedDict()
        self._queue = FairQueue[_Compilation]()

    def _start(self, vocabulary: GrammarVocabulary) -> None:
        self._tokenizer = self._pool.submit(vocabulary.tokenizer)
        if self._tries_first:
            content = vocabulary.to_json()
            for _ in range(NUM_TRIAL_PROCESSES):
                trial = TrialProcess(content)
                self._prepared.append(self._pool.submit(trial.prepare))
                self._trials.put(trial)

    def compile(self, spec: StructuredOutput, num_sequences: int = 1) -> Grammar:
        """Compile `spec` for this process, or return it from the cache; see `submit`.

        Waits for the vocabulary and for other grammars first. Raises InvalidValueError for one that
        cannot be enforced or exceeds the limits of compilation, and OverloadedError if no trial
        process is ready.
        """
        self.wait_until_ready()
        return self.submit(spec, num_sequences=num_sequences).result()

    def wait_until_ready(self) -> None:
        """Block until the vocabulary has been read; that time does not count for a grammar."""
        self._tokenizer.exception()
        wait(self._prepared)

    def close(self) -> None:
        """Stop the trial processes after the current compilations."""
        self._pool.shutdown(cancel_futures=True)
        with self._lock:
            while self._queue:
                for each in self._queue.take().with_followers():
                    each.result.cancel()
        while not self._trials.empty():
            self._trials.get().close()

    def submit(
        self, spec: StructuredOutput, caller: Caller = OWN_PROCESS, num_sequences: int = 1
    ) -> Future[Grammar]:
        """Compile `spec` in the background, for the choices of one request.

        A copy is handed out for at most MAX_SHARING sequences: they share a limited number of lexer
        states, and none may fail because of the others. To cancel the future gives them back; a
        copy that no request awaits is not compiled. Raises OverloadedError.
        """
        shares: list[tuple[_Compilation, int]] = []
        with self._lock:
            try:
                for start in range(0, num_sequences, MAX_SHARING):
                    count = min(num_sequences - start, MAX_SHARING)
                    shares.append((self._copy_for(count, spec, caller), count))
            except OverloadedError:
                self._give_back(shares)
                raise
            joined = _joined([copy.result for copy, _ in shares])
        joined.add_done_callback(lambda done: self._end_wait(shares, is_over=done.cancelled()))
        return joined

    def _copy_for(self, num_sequences: int, spec: StructuredOutput, caller: Caller) -> _Compilation:
        """Return a copy with room for sequences, which is queued if it has not ended."""
        known = self._cache.get(spec)
        max_open = math.inf
        if known is not None and known.has_room(num_sequences):
            copy = known
        elif known is not None:
            self._require_room_for_copy(caller)
            copy = _Compilation(spec, known.first or known)
        else:
            copy = _Compilation(spec, None)
            if caller != OWN_PROCESS:
                max_open = MAX_WAITING_OF_STRANGER if caller.is_stranger else MAX_WAITING
        if not copy.result.done():
            self._enqueue(copy, caller, max_open)
        copy.num_sequences += num_sequences
        self._cache[spec] = copy
        self._cache.move_to_end(spec)
        return copy

    def _require_room_for_copy(self, caller: Caller) -> None:
        """Raise OverloadedError if a further copy of a known grammar may not wait as well."""
        firsts = (each.first or each for each in self._cache.values())
        num_held = sum(other == caller for first in firsts for _, other in first.followers)
        num_open = self._queue.num_open(caller) + num_held
        if caller != OWN_PROCESS and num_open >= MAX_WAITING_COPIES:
            count = f"{num_open} copies of grammars of this client wait or are compiled"
            raise OverloadedError(f"structured_output: {count} (limit {MAX_WAITING_COPIES})")

    def _enqueue(self, copy: _Compilation, caller: Caller, max_open: float = math.inf) -> None:
        if copy.is_held:
            assert copy.first is not None
            if (copy, caller) not in copy.first.followers:
                copy.first.followers.append((copy, caller))
        elif self._queue.put(copy, caller, max_open):
            self._pool.submit(self._run_next)

    def _end_wait(self, shares: Sequence[tuple[_Compilation, int]], *, is_over: bool) -> None:
        if is_over:
            with self._lock:
                self._give_back(shares)

    def _give_back(self, shares: Sequence[tuple[_Compilation, int]]) -> None:
        """Subtract the sequences of a request that has ended from its copies."""
        for copy, num_sequences in reversed(shares):
            copy.num_sequences -= num_sequences
            self._drop_unawaited(copy)

    def _drop_unawaited(self, copy: _Compilation) -> None:
        """Drop a waiting copy if no request awaits it or one of its followers."""
        first = copy.first
        if copy.num_sequences or copy.followers or copy.result.done():
            return
        if first is not None and copy.is_held:
            first.followers = [each for each in first.followers if each[0] is not copy]
        elif not self._queue.discard(copy):
            return  # it runs
        if self._cache.get(copy.spec) is copy:
            del self._cache[copy.spec]
            if first is not None:
                self._cache[copy.spec] = first
        if first is not None:
            self._drop_unawaited(first)

    def _run_next(self) -> None:
        """Run the next compilation in the queue. A failure is not cached."""
        with self._lock:
            if not self._queue:
                return  # the copy that this call was for has been dropped
            compilation = self._queue.take()
        outcome = self._outcome(compilation)
        with self._lock:
            self._queue.finish(compilation)
            compilation.first = None
            if isinstance(outcome, Grammar):
                self._succeed(compilation, outcome)
            else:
                self._fail(compilation, outcome)

    def _succeed(self, compilation: _Compilation, grammar: Grammar) -> None:
        compilation.result.set_result(grammar)
        self._evict()
        followers, compilation.followers = compilation.followers, []
        for copy, caller in followers:
            self._enqueue(copy, caller)

    def _fail(self, compilation: _Compilation, error: Exception) -> None:
        for each in compilation.with_followers():
            each.result.set_exception(error)
            if self._cache.get(each.spec) is each:
                del self._cache[each.spec]

    def _outcome(self, compilation: _Compilation) -> Grammar | Exception:
        """Compile a copy; only the first one of a grammar is tried."""
        try:
            return self._compile(compilation.spec, is_tried=compilation.first is not None)
        except BaseException as error:
            return as_exception(error)

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
        rolls_back = spec.grammar is None or not limits_lexemes(spec.grammar)
        parts = spec, matcher, self._text_mask, self._eos_token_ids, compile_s, rolls_back
        if spec.reasoning is None:
            return Grammar(*parts)
        begins_inside = spec.reasoning.begins_inside
        reasoning = self._free_text(replace(spec.reasoning, begins_inside=False))
        return ReasoningGrammar(*parts, reasoning=reasoning, begins_inside=begins_inside)

    def _free_text(self, marks: ReasoningMarks) -> FreeText:
        """Return the text before an answer with these marks, of which a service has few."""
        known = self._free_texts.get(marks)
        if known is None:
            known = FreeText(self._vocabulary, marks, len(self._text_mask))
            with self._lock:
                while len(self._free_texts) >= MAX_CACHED_MARKS:
                    del self._free_texts[next(iter(self._free_texts))]
                self._free_texts[marks] = known
        return known

    def _try(self, spec: StructuredOutput) -> None:
        trial = self._trials.get()  # never blocks: more processes than threads
        try:
            reason = trial.fault(replace(spec, reasoning=None))
        finally:
            self._trials.put(trial)
        if reason is not None:
            raise refusal(spec.kind, getattr(spec, spec.kind), reason)


def _joined(copies: Sequence[Future[Grammar]]) -> Future[Grammar]:
    """Return the first copy, with the others of its request. The futures end one at a time."""
    joined = Future[Grammar]()

    def settle(_: Future[Grammar]) -> None:
        if joined.done() or not all(each.done() for each in copies):
            return
        if not joined.set_running_or_notify_cancel():
            return
        try:
            first, *others = (each.result() for each in copies)
        except BaseException as error:
            joined.set_exception(error)
        else:
            joined.set_result(replace(first, others=tuple(others)) if others else first)

    for each in copies:
        each.add_done_callback(settle)
    return joined


def _num_bytes(grammar: Grammar) -> float:
    return grammar.compile_s * _BYTES_PER_SECOND
