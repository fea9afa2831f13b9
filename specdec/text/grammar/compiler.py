"""Compiles grammars beside the step loop, and keeps those that were used last."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from threading import Lock

from llguidance import LLTokenizer

from specdec.text.grammar.matcher import Grammar, mask_words
from specdec.text.grammar.translation import refusal
from specdec.text.grammar.trial import TrialProcess, first_matcher
from specdec.text.tokenizer import Tokenizer
from specdec.types.errors import InvalidValueError, OverloadedError, UnsupportedModelError
from specdec.types.sampling_params import StructuredOutput

COMPILE_TIMEOUT_S = 1.9
NUM_THREADS = 2
MAX_WAITING = 16
MAX_CACHED_GRAMMARS = 64
MAX_CACHED_BYTES = 512 * 2**20

BUSY = "too many grammars are waiting to be compiled"
_BYTES_PER_SECOND = 150e6
"""Compiling allocates at most about so fast (docs/adr/0008): the only measure there is of size."""


class GrammarCompiler:
    """Compiles for one vocabulary. Threads may share it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Collection[int],
        timeout_s: float | None = COMPILE_TIMEOUT_S,
        tries_first: bool = True,
    ) -> None:
        """Returns at once, and reads the vocabulary meanwhile.

        vocab_size: the model's, which may be padded beyond the tokenizer's.
        eos_token_ids: allowed where, and only where, an output may end.
        timeout_s: None waits as long as it takes.
        tries_first: whether to compile in a process that may be lost first (`TrialProcess`). False
            for draft workers, who get only what somebody has tried, and whose ranks must agree: so
            the cache goes by numbers of grammars there, and not by how long they took.
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
            for _ in range(NUM_THREADS):
                trial = TrialProcess(tokenizer.to_json(), vocab_size, eos_token_ids)
                self._prepared.append(self._pool.submit(trial.prepare))
                self._trials.put(trial)
        self._lock = Lock()
        self._cache: OrderedDict[StructuredOutput, Future[Grammar]] = OrderedDict()

    def compile(self, spec: StructuredOutput) -> Grammar:
        """The grammar of `spec`; blocks for up to 2 s once the vocabulary has been read.

        Raises InvalidValueError for one that cannot be enforced or takes too much to compile, and
        OverloadedError where too many others are being compiled.
        """
        self.wait_until_ready()
        try:
            return self.submit(spec).result(self._timeout_s)
        except TimeoutError as error:
            raise OverloadedError(BUSY) from error

    def wait_until_ready(self) -> None:
        """Blocks until the vocabulary has been read, which is not a grammar's fault."""
        self._tokenizer.exception()
        wait(self._prepared)

    def close(self) -> None:
        """Ends the processes that grammars are tried in, after those that are being compiled."""
        self._pool.shutdown(cancel_futures=True)
        while not self._trials.empty():
            self._trials.get().close()

    def submit(self, spec: StructuredOutput) -> Future[Grammar]:
        """The same without waiting. Others may wait for the same future: it is not to be cancelled.

        Raises OverloadedError.
        """
        with self._lock:
            compiled = self._cache.get(spec)
            if compiled is not None and not _is_used_up(compiled):
                self._cache.move_to_end(spec)
                return compiled
            if self._num_compiling() >= MAX_WAITING:
                raise OverloadedError(BUSY)
            compiled = self._cache[spec] = self._pool.submit(self._compile, spec)
        # Without the lock, which the call needs: it comes at once where all is done already.
        compiled.add_done_callback(lambda done: self._settle(spec, done))
        return compiled

    def _settle(self, spec: StructuredOutput, done: Future[Grammar]) -> None:
        """Keeps a success within the limits of the cache; a failure is not kept."""
        with self._lock:
            if not _is_ready(done) and self._cache.get(spec) is done:
                del self._cache[spec]
            self._evict()

    def _evict(self) -> None:
        ready = [each.result() for each in self._cache.values() if _is_ready(each)]
        num_bytes = sum(map(_num_bytes, ready)) if self._tries_first else 0.0
        for index, grammar in enumerate(ready):  # the one used longest ago first
            if len(ready) - index <= MAX_CACHED_GRAMMARS and num_bytes <= MAX_CACHED_BYTES:
                break
            num_bytes -= _num_bytes(grammar)
            del self._cache[grammar.spec]

    def _compile(self, spec: StructuredOutput) -> Grammar:
        try:
            tokenizer = self._tokenizer.result()
        except UnsupportedModelError as error:
            raise InvalidValueError("structured_output", spec.kind, f"left out: {error}") from error
        if self._tries_first:
            self._try(spec)
        started_s = time.thread_time()
        matcher = first_matcher(tokenizer, spec)
        if matcher.is_error():
            raise refusal(spec.kind, getattr(spec, spec.kind), matcher.get_error())
        compile_s = time.thread_time() - started_s
        return Grammar(spec, matcher, self._text_mask, self._eos_token_ids, compile_s)

    def _try(self, spec: StructuredOutput) -> None:
        trial = self._trials.get()  # there are as many as threads
        try:
            reason = trial.refuse(spec)
        finally:
            self._trials.put(trial)
        if reason is not None:
            raise refusal(spec.kind, getattr(spec, spec.kind), reason)

    def _num_compiling(self) -> int:
        return sum(not compiled.done() for compiled in self._cache.values())


def _is_ready(compiled: Future[Grammar]) -> bool:
    return compiled.done() and not compiled.cancelled() and compiled.exception() is None


def _is_used_up(compiled: Future[Grammar]) -> bool:
    return _is_ready(compiled) and compiled.result().is_used_up


def _num_bytes(grammar: Grammar) -> float:
    return grammar.compile_s * _BYTES_PER_SECOND


def _read_vocabulary(
    tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]
) -> LLTokenizer:
    try:
        return LLTokenizer(tokenizer.to_json(), vocab_size, sorted(eos_token_ids))
    except ValueError as error:
        raise UnsupportedModelError(f"the tokenizer is of no known kind: {error}") from error
