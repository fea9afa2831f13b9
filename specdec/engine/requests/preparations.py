"""Requests that have arrived and have no stream yet: they can be aborted like those that have."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakSet

from specdec.types.deadline import CancelScope
from specdec.types.errors import AbortedError
from specdec.types.request import OWN_PROCESS, Caller


class Preparation(CancelScope):
    """A request that is prepared; its ids need not be unique.

    As a context manager its abort ends the body. What cannot be ended calls `require_alive` later.
    """

    def __init__(
        self,
        *request_ids: str,
        caller: Caller = OWN_PROCESS,
        among: WeakSet[Preparation] | None = None,
    ) -> None:
        """caller: may abort it. among: where it is registered until it ends, if anywhere."""
        super().__init__(lambda: AbortedError(*request_ids))
        self._among = WeakSet[Preparation]() if among is None else among
        self._among.add(self)
        self.request_ids = request_ids
        self.caller = caller
        self.is_aborted = False

    def end(self) -> None:
        """Remove it: the stream of its request is open, and receives aborts."""
        self._among.discard(self)

    def abort(self) -> None:
        """End the request."""
        self.is_aborted = True
        self.cancel()

    def require_alive(self) -> None:
        """Raise AbortedError if the request was aborted."""
        if self.is_aborted:
            raise AbortedError(*self.request_ids)


class Preparations:
    """The preparations of one event loop, each until its request ends or drops it."""

    def __init__(self) -> None:
        self.open = WeakSet[Preparation]()

    def begin(self, request_id: str, caller: Caller = OWN_PROCESS) -> Preparation:
        """Register a request that arrives."""
        return Preparation(request_id, caller=caller, among=self.open)

    def abort(self, is_ended: Callable[[str, Caller], bool]) -> None:
        """End preparations. is_ended: of a request's id and caller."""
        for each in tuple(self.open):
            if any(is_ended(request_id, each.caller) for request_id in each.request_ids):
                each.abort()
