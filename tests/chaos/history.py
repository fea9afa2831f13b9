"""Histories of calls, and the check that no token of an answer was lost, doubled or wrong.

A client records what it asked for and each message that it received. The tokens that an undisturbed
run generates with the same seed are the reference: whatever happened meanwhile, a call that
finished has exactly these, and any other call has a prefix of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Message:
    """A part of an answer: tokens of one choice, the last part of it if `ends_choice`."""

    choice: int
    token_ids: Tokens
    ends_choice: bool = False


@dataclass(frozen=True)
class End:
    """How a call ended. status: "finished", "cancelled" by its client, or that of its error.

    num_output_tokens: the usage that was reported, of all choices; None where none was.
    """

    status: str
    num_output_tokens: int | None = None


FINISHED = "finished"
CANCELLED = "cancelled"


@dataclass
class Call:
    """What a client knows about a call. expected: the reference, by choice."""

    name: str
    expected: tuple[Tokens, ...]
    messages: list[Message] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)

    def receive(self, choice: int, token_ids: Sequence[int], *, ends_choice: bool = False) -> None:
        """Record a message."""
        self.messages.append(Message(choice, tuple(token_ids), ends_choice))

    def end(self, status: str, num_output_tokens: int | None = None) -> None:
        """Record the end. A second one is a violation, not an error of the caller."""
        self.ends.append(End(status, num_output_tokens))

    def tokens(self, choice: int = 0) -> Tokens:
        """Return what was received of a choice, in order."""
        parts = (each.token_ids for each in self.messages if each.choice == choice)
        return tuple(token for part in parts for token in part)

    @property
    def has_ended(self) -> bool:
        return bool(self.ends)


def violations(calls: Iterable[Call], refusals: Collection[str] = ()) -> list[str]:
    """Return what is wrong with a history, a line for each fault; none where all is well.

    refusals: the statuses with which a call may end early, beside its client's cancellation.
    """
    return [f"{call.name}: {fault}" for call in calls for fault in _faults(call, refusals)]


def _faults(call: Call, refusals: Collection[str]) -> Iterable[str]:
    if len(call.ends) != 1:
        yield "never ended" if not call.ends else f"ended {len(call.ends)} times"
        return
    end = call.ends[0]
    if end.status not in {FINISHED, CANCELLED, *refusals}:
        yield f"ended with {end.status}"
    for choice, expected in enumerate(call.expected):
        yield from _faults_of_choice(call, choice, expected, is_whole=end.status == FINISHED)
    strange = {each.choice for each in call.messages} - set(range(len(call.expected)))
    if strange:
        yield f"messages of choices that were not asked for: {sorted(strange)}"
    num_received = sum(len(each.token_ids) for each in call.messages)
    if end.num_output_tokens not in (None, num_received):
        yield f"usage counts {end.num_output_tokens} tokens, {num_received} were received"


def _faults_of_choice(
    call: Call, choice: int, expected: Tokens, *, is_whole: bool
) -> Iterable[str]:
    received = call.tokens(choice)
    if (fault := difference(received, expected)) is not None:
        yield f"choice {choice}: {fault}"
    ends = [each.ends_choice for each in call.messages if each.choice == choice]
    if True in ends[:-1]:
        yield f"choice {choice}: a message after its end"
    if is_whole and len(received) < len(expected):
        yield f"choice {choice}: {len(expected) - len(received)} of {len(expected)} tokens missing"
    if is_whole and True not in ends:
        yield f"choice {choice}: its end was not reported"


def difference(received: Tokens, expected: Tokens) -> str | None:
    """Return how `received` departs from `expected`; None where it is a prefix of it."""
    place = next(
        (i for i, (a, b) in enumerate(zip(received, expected, strict=False)) if a != b),
        min(len(received), len(expected)),
    )
    if place == len(received):
        return None
    rest = received[place:]
    if place == len(expected):
        kind = f"{len(rest)} tokens after the last one"
    elif rest[:3] == expected[place + 1 :][:3]:
        kind = "a token was lost"
    elif place and rest[:1] == received[place - 1 : place] and rest[1:4] == expected[place:][:3]:
        kind = "a token was doubled"
    else:
        kind = f"token {received[place]} in place of {expected[place]}"
    return f"{kind} at position {place}"
