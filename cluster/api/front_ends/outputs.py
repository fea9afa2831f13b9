"""The outputs of a step, as they go from the engine's process to a front end.

Most only add tokens to a choice: a few numbers each, in one table for all. The others (first and
last ones, several choices, text, log-probabilities, errors) go whole.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from specdec.types.reports.stats import SpeculationStats
from specdec.types.responses import EngineOutput


class MoreTokens(NamedTuple):
    """Further tokens of the only choice of a request.

    number: of the request, in its front end. num_drafted: the number of leading tokens that were
    drafted. num_drafts, num_draft_tokens, num_accepted_tokens: see SpeculationStats.
    """

    number: int
    num_tokens: int
    num_steps: int
    num_drafted: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int


_WIDTH = len(MoreTokens._fields)

StepOutputs = tuple[bytes, bytes, list[tuple[object, ...]]]
"""Rows of MoreTokens, int32 [num_rows, 7]; their tokens, int32, one after the other; whole outputs
as tuples."""


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

    def encode(self, outputs: Sequence[EngineOutput]) -> StepOutputs:
        """Encode outputs."""
        rows, token_ids, whole = list[int](), list[int](), list[tuple[object, ...]]()
        begun_number = self._begun.get
        for output in outputs:
            number = begun_number(output.request_id)
            if number is not None and (num_drafted := _num_drafted(output)) is not None:
                tokens, stats = output.token_ids, output.speculation
                drafts = stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens
                rows += (number, len(tokens), output.num_steps, num_drafted, *drafts)
                token_ids += tokens
                continue
            whole.append(tuple(output))
            if output.request_id in self._numbers:
                self._begun[output.request_id] = self._numbers[output.request_id]
        return array("i", rows).tobytes(), array("i", token_ids).tobytes(), whole


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


def decode(outputs: StepOutputs) -> Iterator[tuple[MoreTokens, tuple[int, ...]]]:
    """Yield each row with its tokens."""
    rows, token_ids = array("i", outputs[0]), array("i", outputs[1]).tolist()
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
    num_others = row.num_tokens - row.num_drafted
    fields = (
        last.request_id,
        token_ids,
        "",
        None,  # it goes on
        last.num_prompt_tokens,
        last.num_output_tokens + row.num_tokens,
        stats,
        row.num_steps,
        last.num_cached_tokens,
        0,
        (True,) * row.num_drafted + (False,) * num_others,
        (),
        False,
        None,
        last.verifier,
        None,
        None,
        None,
        last.prediction,
        None,
    )
    return EngineOutput._make(fields)
