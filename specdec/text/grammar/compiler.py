"""Grammar compiler: compiles in background threads, with an LRU cache."""

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
"""Upper bound of the allocation rate while compiling (docs/adr/0008), to estimate sizes from."""


class GrammarCompiler:
    """Grammar compiler of one vocabulary. Thread-safe."""

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
            for _ in range(NUM_THREADS):
                trial = TrialProcess(tokenizer.to_json(), vocab_size, eos_token_ids)
                self._prepared.append(self._pool.submit(trial.prepare))
                self._trials.put(trial)
        self._lock = Lock()
        self._cache: OrderedDict[StructuredOutput, Future[Grammar]] = OrderedDict()

    def compile(self, spec: StructuredOutput) -> Grammar:
        """Compile `spec`, or return it from the cache; blocks for up to 2 s.

        Waits for the vocabulary first. Raises InvalidValueError for a grammar that cannot be
        enforced or exceeds the limits of compilation, and OverloadedError if too many others are
        being compiled.
        """
        self.wait_until_ready()
        try:
            return self.submit(spec).result(self._timeout_s)
        except TimeoutError as error:
            raise OverloadedError(BUSY) from error

    def wait_until_ready(self) -> None:
        """Block until the vocabulary has been read; that time does not count for a grammar."""
        self._tokenizer.exception()
        wait(self._prepared)

    def close(self) -> None:
        """Stop the trial processes after the current compilations."""
        self._pool.shutdown(cancel_futures=True)
        while not self._trials.empty():
            self._trials.get().close()

    def submit(self, spec: StructuredOutput) -> Future[Grammar]:
        """Compile `spec` in the background.

        The future may be shared with other callers and must not be cancelled. Raises
        OverloadedError.
        """
        with self._lock:
            compiled = self._cache.get(spec)
            if compiled and not (_is_ready(compiled) and compiled.result().is_used_up):
                self._cache.move_to_end(spec)
                return compiled
            if sum(not each.done() for each in self._cache.values()) >= MAX_WAITING:
                raise OverloadedError(BUSY)
            compiled = self._cache[spec] = self._pool.submit(self._compile, spec)
        # Outside the lock, which the callback takes: it runs at once if the future is done.
        compiled.add_done_callback(lambda done: self._update_cache(spec, done))
        return compiled

    def _update_cache(self, spec: StructuredOutput, done: Future[Grammar]) -> None:
        """Remove a failed compilation from the cache, and apply the limits of the cache."""
        with self._lock:
            if not _is_ready(done) and self._cache.get(spec) is done:
                del self._cache[spec]
            ready = [each.result() for each in self._cache.values() if _is_ready(each)]
            num_bytes = sum(map(_num_bytes, ready)) if self._tries_first else 0.0
            for index, grammar in enumerate(ready):  # least recently used first
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
        trial = self._trials.get()  # never blocks: one process for each thread
        try:
            reason = trial.fault(spec)
        finally:
            self._trials.put(trial)
        if reason is not None:
            raise refusal(spec.kind, getattr(spec, spec.kind), reason)


def _is_ready(compiled: Future[Grammar]) -> bool:
    return compiled.done() and not compiled.cancelled() and compiled.exception() is None


def _num_bytes(grammar: Grammar) -> float:
    return grammar.compile_s * _BYTES_PER_SECOND


def _read_vocabulary(
    tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]
) -> LLTokenizer:
    try:
        return LLTokenizer(tokenizer.to_json(), vocab_size, sorted(eos_token_ids))
    except ValueError as error:
        raise UnsupportedModelError(f"the tokenizer is not supported: {error}") from error
