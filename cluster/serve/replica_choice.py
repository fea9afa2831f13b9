"""Chooses a replica for each request: one that has computed its prefix, unless that is too busy.

Candidates are the replicas with the longest common prefix; of two of them the one with less load is
chosen (Mitzenmacher, "The power of two choices in randomized load balancing", 2001), if its load is
at most a constant factor above the mean (Mirrokni et al., "Consistent hashing with bounded loads",
2018). Otherwise replicas with shorter prefixes are candidates, and in the end all.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from cluster.api.base.prefix_record import PREFIX_WORTH, PrefixRecord, work_tokens
from cluster.api.base.routing_hint import RoutingHint

MAX_LOAD_FACTOR = 1.1
"""Most load of a replica that is chosen for its prefix, relative to the mean of all."""

_LOAD_TIME_S = 60.0  # time constant of the decay
_MAX_OPEN_S = 3600.0  # the end of a request that is open for longer has been lost
_MAX_SESSIONS = 2**16


class Load:
    """Tokens of a replica's recent requests, decayed over a minute, but at least of its open ones.

    A decayed sum alone would take a replica that is stuck for an idle one; open requests alone
    would take two replicas for equal whenever none is open.
    """

    def __init__(self) -> None:
        self._recent = 0.0
        self._at_s = 0.0
        self._open = 0

    def tokens(self, now_s: float) -> float:
        """Return the load now."""
        decayed = self._recent * math.exp((self._at_s - now_s) / _LOAD_TIME_S)
        return max(decayed, self._open)

    def begin(self, tokens: int, now_s: float) -> None:
        """Add a request."""
        self._recent = self._recent * math.exp((self._at_s - now_s) / _LOAD_TIME_S) + tokens
        self._at_s = now_s
        self._open += tokens

    def end(self, tokens: int) -> None:
        """End a request; it remains a recent one."""
        self._open -= tokens

    def withdraw(self, tokens: int, now_s: float) -> None:
        """Remove a request that was never sent to the replica."""
        self.begin(-tokens, now_s)
        self._recent = max(0.0, self._recent)


@dataclass(frozen=True)
class _Open:
    """An open request: its replica, hint, tokens to compute, and when it was assigned."""

    replica: str
    hint: RoutingHint
    tokens: int
    at_s: float


class ReplicaChooser:
    """State of the choice: the prefixes and the load of each replica, as assigned by this process.

    With several proxies each has its own; each balances its own requests. A session gives all of
    them the same two replicas to start with.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """clock: monotonic seconds."""
        self._clock = clock
        self._records: dict[str, PrefixRecord] = {}
        self._loads: dict[str, Load] = {}
        self._sessions: OrderedDict[bytes, str] = OrderedDict()
        self._open: dict[str, _Open] = {}  # by request id, the oldest first

    def set_replicas(self, capacities: Mapping[str, int | None]) -> None:
        """Set the replicas; forget the others. capacities: tokens of each cache, None if unknown.

        A new replica begins with the mean load, or it would get every request for a minute.
        """
        now_s = self._clock()
        known = [load.tokens(now_s) for load in self._loads.values()]
        mean = round(sum(known) / len(known)) if known else 0
        for name in self._records.keys() - capacities.keys():
            del self._records[name], self._loads[name]
        for name, capacity in capacities.items():
            if name not in self._records:
                self._records[name] = PrefixRecord()
                self._loads[name] = load = Load()
                load.begin(mean, now_s)
                load.end(mean)
            if capacity is not None:
                self._records[name].limit(capacity)

    def choose(self, request_id: str, hint: RoutingHint) -> str:
        """Return a replica for a request, and count the request there until `end`.

        A request that is chosen for again has lost its first replica. Needs at least one replica.
        """
        self.end(request_id)
        now_s = self._clock()
        self._end_lost(now_s)
        loads = {name: load.tokens(now_s) for name, load in self._loads.items()}
        matched = {name: each.matched_tokens(hint) for name, each in self._records.items()}
        if (of_session := self._sessions.get(hint.session)) in matched:
            matched[of_session] = hint.prompt_tokens
        anchor = hint.session or b"".join(hint.prefix_keys[-1:]) or request_id.encode()
        name = choose_replica(hint, loads, matched, anchor)
        self._begin(request_id, name, hint, now_s)
        return name

    def move(self, request_id: str, replica: str) -> None:
        """Correct the replica of a request that was sent to another one than the chosen one.

        The prefix stays recorded for both, so the next one may go to either.
        """
        known = self._open.get(request_id)
        if known is None or known.replica == replica or replica not in self._records:
            return
        now_s = self._clock()
        if (load := self._loads.get(known.replica)) is not None:
            load.withdraw(known.tokens, now_s)
        del self._open[request_id]
        self._begin(request_id, replica, known.hint, now_s)

    def complete(self, request_id: str, replica: str) -> None:
        """End a request that a replica has completed or rejected, if it is still there.

        A rejected one may have been chosen for again, before its first replica reports the end.
        """
        known = self._open.get(request_id)
        if known is not None and known.replica == replica:
            self.end(request_id)

    def end(self, request_id: str) -> None:
        """End a request; an unknown one has no effect."""
        known = self._open.pop(request_id, None)
        if known is not None and (load := self._loads.get(known.replica)) is not None:
            load.end(known.tokens)

    def _begin(self, request_id: str, name: str, hint: RoutingHint, now_s: float) -> None:
        tokens = work_tokens(hint, self._records[name].matched_tokens(hint))
        self._open[request_id] = _Open(name, hint, tokens, now_s)
        self._loads[name].begin(tokens, now_s)
        self._records[name].add(hint)
        if hint.session:
            self._sessions[hint.session] = name
            self._sessions.move_to_end(hint.session)
            if len(self._sessions) > _MAX_SESSIONS:
                self._sessions.popitem(last=False)

    def _end_lost(self, now_s: float) -> None:
        """End the requests whose end was never reported, such as cancelled ones."""
        while self._open:
            request_id, oldest = next(iter(self._open.items()))
            if now_s - oldest.at_s < _MAX_OPEN_S:
                return
            self.end(request_id)


def choose_replica(
    hint: RoutingHint, loads: Mapping[str, float], matched: Mapping[str, int], anchor: bytes
) -> str:
    """Return the replica for a request.

    loads: tokens of each replica. matched: tokens of the prompt that each has computed. anchor:
    selects the two candidates.
    """
    total = sum(loads.values())
    for level in sorted(set(matched.values()), reverse=True):
        candidates = [name for name, tokens in matched.items() if tokens >= level]
        name = min(two_of(candidates, anchor), key=loads.__getitem__)
        mean = (total + work_tokens(hint, matched[name])) / len(loads)
        if loads[name] <= MAX_LOAD_FACTOR * mean + PREFIX_WORTH * level:
            return name
    return min(loads, key=loads.__getitem__)


def two_of(names: Collection[str], anchor: bytes) -> Sequence[str]:
    """Return two pseudo-random candidates: the same ones for an anchor in every process.

    By rendezvous hashing, so that the end of a replica changes only the pairs that it was in.
    """

    def score(name: str) -> bytes:
        return blake2b(anchor + name.encode(), digest_size=8).digest()

    return sorted(names, key=score)[:2]
