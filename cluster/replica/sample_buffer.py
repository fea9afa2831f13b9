"""Answers of requests that allow training, in memory until a trainer takes them."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from specdec.sequences.sequence import EngineRequest
from specdec.types.responses import EngineOutput
from specdec.types.samples import SampleBatch, SampleOrder, ServedSample
from specdec.types.sampling.sampling_params import LOSSY_VERIFIERS


@dataclass(frozen=True)
class _Stored:
    token_ids: array[int]  # int32
    num_prompt_tokens: int
    temperature: float


class SampleBuffer:
    """Ring buffer of samples of one cache_salt, for one event loop.

    There is one draft head for all requests, and it can repeat what it was trained on. So requests
    with any other salt are never recorded, whatever they allow.
    """

    def __init__(self, max_tokens: int, cache_salt: str, replica_id: str) -> None:
        """Start empty. max_tokens: of all samples, the latest ones; 0 records nothing."""
        self._max_tokens = max_tokens
        self._cache_salt = cache_salt
        self._replica_id = replica_id
        self._samples: deque[_Stored] = deque()  # oldest first
        self._num_tokens = 0
        self._num_dropped = 0

    def accepts(self, cache_salt: str, *, allow_training: bool) -> bool:
        """Return whether the answers to a request are recorded: it and the service allow that."""
        return allow_training and self._max_tokens > 0 and cache_salt == self._cache_salt

    async def recording(
        self,
        request: EngineRequest,
        temperature: float,
        outputs: AsyncGenerator[EngineOutput, None],
    ) -> AsyncGenerator[EngineOutput, None]:
        """Pass the outputs of an accepted request on, and record each choice that completes.

        A choice of a lossy verifier is not recorded: it is not the target's own text. Tokens that a
        request resumes count as its prompt, since the client supplied them, and so does the mark
        that a thinking budget adds, with what is before it.
        """
        prefix = (*request.prompt_token_ids, *request.resume_token_ids)
        budget = request.thinking_budget
        answers: dict[int, array[int]] = {}
        async with aclosing(outputs) as stream:
            async for output in stream:
                answer = answers.setdefault(output.choice, array("i", prefix))
                answer.extend(output.token_ids)
                if output.finish_reason and output.verifier not in LOSSY_VERIFIERS:
                    start = len(prefix)
                    if budget is not None and (end := budget.end_of_mark(answer[start:])):
                        self.add(answer[: start + budget.num_tokens], start, temperature)
                        start += end
                    self.add(answer, start, temperature)
                yield output

    def take(self, order: SampleOrder) -> SampleBatch:
        """Remove and return the oldest samples, up to the tokens of the order but at least one."""
        taken, num_tokens = list[ServedSample](), 0
        while self._samples:
            num_tokens += len(self._samples[0].token_ids)
            if taken and num_tokens > order.max_tokens:
                break
            oldest = self._pop()
            token_ids = tuple(oldest.token_ids)
            taken.append(ServedSample(token_ids, oldest.num_prompt_tokens, oldest.temperature))
        return SampleBatch(self._replica_id, tuple(taken), self._num_tokens, self._num_dropped)

    def add(self, token_ids: array[int], num_prompt_tokens: int, temperature: float) -> None:
        """Record a choice of two tokens or more; drop the oldest ones that no longer fit."""
        if len(token_ids) - num_prompt_tokens < 2 or len(token_ids) > self._max_tokens:
            return
        self._samples.append(_Stored(token_ids, num_prompt_tokens, temperature))
        self._num_tokens += len(token_ids)
        while self._num_tokens > self._max_tokens:
            self._pop()
            self._num_dropped += 1

    def _pop(self) -> _Stored:
        oldest = self._samples.popleft()
        self._num_tokens -= len(oldest.token_ids)
        return oldest
