"""Requests that have not ended, and the ends of their sequences."""

from __future__ import annotations

from specdec.engine.requests.outputs import output_of
from specdec.engine.scheduling.async_scheduling import StepsInFlight
from specdec.engine.scheduling.scheduler import Scheduler
from specdec.engine.scheduling.speculator import Speculator
from specdec.sequences.output_buffer import BufferedTokens
from specdec.sequences.sequence import Choices, EngineRequest, Sequence
from specdec.types.errors import SpecdecError
from specdec.types.responses import EngineOutput


class OpenRequests:
    """The choices of each request that has not ended, by request id.

    A sequence ends in one place: scheduler, target and proposer drop it together.
    """

    def __init__(self, scheduler: Scheduler, steps: StepsInFlight, speculator: Speculator) -> None:
        self._scheduler = scheduler
        self._steps = steps
        self._speculator = speculator
        self._choices: dict[str, Choices] = {}
        self._restarted: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._choices)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._choices

    def add(self, request: EngineRequest, sequences: list[Sequence]) -> None:
        """Keep a request, whose id is unused, until all its choices have ended."""
        choices = Choices(sequences, len(request.resume_token_ids))
        self._choices[request.request_id] = choices
        for seq in sequences:
            seq.choices = choices
            has_more = seq.detokenizer is not None or seq.output_buffer.interval > 1
            seq.streams_tokens = len(sequences) == 1 and not has_more

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences that have not ended."""
        return [seq for each in self._choices.values() for seq in each.unfinished]

    def abort(self, request_id: str) -> None:
        """End all choices of a request and free their blocks; ignore unknown and ended requests."""
        choices = self._choices.get(request_id)
        for seq in tuple(choices.unfinished) if choices else ():
            self.finish(seq)

    def finish(self, seq: Sequence) -> None:
        """End a sequence, and its request with the last one; free its blocks."""
        unfinished = seq.choices.unfinished
        unfinished.remove(seq)
        if not unfinished:
            del self._choices[seq.request.request_id]
        self._scheduler.finish(seq)
        self.release(seq)

    def stop_drafting(self, seq: Sequence) -> None:
        """Run a sequence without drafts from now on."""
        seq.head_draft = None
        self._scheduler.load.stop_drafting(seq)

    def recompute(self, seq: Sequence) -> None:
        """Compute a running sequence again; its rows in flight count no more."""
        self._scheduler.preempt(seq)
        self._steps.drop(seq)
        self.release(seq)

    def restart(self, seq: Sequence) -> None:
        """Compute a running sequence again that got further tokens; no step in flight has it."""
        assert seq not in self._steps.sequences, "its row in flight would count"
        self._scheduler.requeue(seq)
        self._restarted.append(seq)
        self.release(seq)

    def readmit_restarted(self) -> None:
        """Give sequences that were restarted their seats back, before any other can join."""
        for seq in self._restarted:
            self._scheduler.readmit(seq)
        self._restarted.clear()

    def fail(self, seq: Sequence, error: SpecdecError) -> list[EngineOutput]:
        """End all choices of the request of a sequence that cannot go on.

        Returns the tokens of each that were not sent yet, then the error.
        """
        unsent = [
            output_of(each, None, *each.output_buffer.take())
            for each in seq.choices.unfinished
            if each.output_buffer.has_tokens
        ]
        self.abort(seq.request.request_id)
        failure = output_of(seq, None, *BufferedTokens())._replace(error=error, is_last=True)
        return [*unsent, failure]

    def release(self, seq: Sequence) -> None:
        """Have target and proposer drop a sequence that lost its blocks."""
        seq.lookahead = seq.head_draft = None
        self._steps.release(seq.seq_id)
        self._speculator.release(seq.seq_id)
