"""The outputs of a step, as they go from the engine's process to a front end.

Most are a token of a plain decode: two numbers each. Others that only add tokens to a choice are a
few numbers each, in one table. The rest (first and last ones, several choices, text,
log-probabilities, errors) go whole.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import NamedTuple

from specdec.engine.requests.outputs import Delivery, continued
from specdec.types.reports.stats import SpeculationStats
from specdec.types.responses import EngineOutput


class MoreTokens(NamedTuple):
    """Further tokens of the only choice of a request.

    number: of the request, in its front end. num_output_tokens: of the request so far. num_drafted:
    the number of leading tokens that were drafted. num_drafts, num_draft_tokens,
    num_accepted_tokens: see SpeculationStats.
    """

    number: int
    num_tokens: int
    num_output_tokens: int
    num_steps: int
    num_drafted: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int


_WIDTH = len(MoreTokens._fields)


class EncodedStep(NamedTuple):
    """The outputs of a step for a front end.

    decodes: numbers of requests, then a token of each, int32. rows: of MoreTokens, int32
    [num_rows, 8]. token_ids: of the rows, int32, one after the other. whole: outputs as tuples.
    """

    decodes: bytes
    rows: bytes
    token_ids: bytes
    whole: list[tuple[object, ...]]


class OutputEncoder:
    """Encodes the outputs of the open requests of one front end.

    `open` is called before the engine has the request, all else on the engine's thread.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._begun: dict[str, int] = {}  # those of which a whole output has been sent

    def open(self, unique_id: str, number: int) -> None:
        """Begin with a request of one choice."""
        self._numbers[unique_id] = number

    def close(self, unique_id: str) -> None:
        """Forget a request; an unknown one is ignored."""
        self._numbers.pop(unique_id, None)
        self._begun.pop(unique_id, None)

    def encode(self, step: Delivery) -> EncodedStep:
        """Encode outputs."""
        rows, token_ids, whole = list[int](), list[int](), list[tuple[object, ...]]()
        begun_number = self._begun.get
        for output in step.outputs:
            number = begun_number(output.request_id)
            if number is not None and (num_drafted := _num_drafted(output)) is not None:
                tokens, stats = output.token_ids, output.speculation
                drafts = stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens
                counts = len(tokens), output.num_output_tokens, output.num_steps
                rows += (number, *counts, num_drafted, *drafts)
                token_ids += tokens
                continue
            whole.append(tuple(output))
            if output.request_id in self._numbers:
                self._begun[output.request_id] = self._numbers[output.request_id]
        decodes = [*map(self._numbers.__getitem__, step.request_ids), *step.token_ids]
        return EncodedStep(_packed(decodes), _packed(rows), _packed(token_ids), whole)


def _num_drafted(output: EngineOutput) -> int | None:
    """Return the number of leading drafted tokens; None where MoreTokens does not suffice."""
    if output.finish_reason is not None or output.text or output.error is not None:
        return None
    if output.logprobs is not None or output.prompt_logprobs is not None:
        return None
    if output.prediction.num_drafts:
        return None
    if True not in output.is_drafted:
        return 0
    return sum(output.is_drafted) if output.num_steps == 1 else None


def _packed(numbers: list[int]) -> bytes:
    return array("i", numbers).tobytes()


def decodes_of(step: EncodedStep) -> Iterator[tuple[int, int]]:
    """Return the number of each request with a plain decode, and its token."""
    numbers = array("i", step.decodes)
    half = len(numbers) // 2
    return zip(numbers[:half], numbers[half:], strict=True)


def rows_of(step: EncodedStep) -> Iterator[tuple[MoreTokens, tuple[int, ...]]]:
    """Yield each row with its tokens."""
    rows, token_ids = array("i", step.rows), array("i", step.token_ids).tolist()
    start = 0
    for index in range(0, len(rows), _WIDTH):
        row = MoreTokens._make(rows[index : index + _WIDTH])
        end = start + row.num_tokens
        yield row, tuple(token_ids[start:end])
        start = end


def following(last: EngineOutput, row: MoreTokens, token_ids: tuple[int, ...]) -> EngineOutput:
    """Return the output of a row, without its text. last: the request's output before it."""
    stats = last.speculation
    if row.num_drafts != stats.num_drafts:
        stats = SpeculationStats(row.num_drafts, row.num_draft_tokens, row.num_accepted_tokens)
    counts = row.num_output_tokens, stats, row.num_steps, row.num_drafted
    return continued(last, token_ids, *counts)
