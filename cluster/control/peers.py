"""The other applications of a Serve instance, each with its own model, and calls to them.

Every Router knows its own model only. It looks other applications up when a request names another
model, and for lists of all models; a service of one model never does.

Ray is imported inside the functions: front ends run without it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from cluster.config.model_name import DEFAULT_MODEL
from cluster.observability.metric_definitions import FleetView
from specdec.types.errors import NotReadyError, UnknownModelError
from specdec.types.responses import ModelInfo

LOST_MESSAGE = "the replica that answered is lost; send the request again, with what came of it"
NOT_STARTED_MESSAGE = "the service is starting or stopping"

logger = logging.getLogger(__name__)

ROUTER, CONTROL_PLANE = "Router", "ControlPlane"
"""Deployments of each application."""

DRAFT_POOL = "DraftPool"
"""Deployment of one whose replicas share draft workers."""

_FRESH_S = 1.0
_STALE_S = 5.0
"""Age at which the address of a known model or adapter is looked up again: a call to a deleted
application would wait indefinitely."""

_REDEPLOYMENT_S = 120.0
"""Time in which a model that is no longer listed is expected back, so that clients try again."""

_ANSWER_TIMEOUT_S = 3.0
_POLL_S = 0.05


@dataclass(frozen=True)
class ServiceCard:
    """An application's description of itself, whether its models are loaded or not.

    num_expected: the minimum number of replicas.
    """

    model: str
    num_expected: int


@dataclass(frozen=True)
class PeerApplication:
    """Another application. router, control_plane: handles of its deployments."""

    card: ServiceCard
    router: Any
    control_plane: Any

    async def stream(
        self, method: str, *arguments: Any, session_id: str = ""
    ) -> AsyncGenerator[Any, None]:
        """Yield the results of a method of one of its Routers; closing the generator cancels it.

        session_id: of the call to Serve, by which it chooses the Router.
        Raises NotReadyError while it has no Router, and when the Router that answers is lost.
        """
        from ray.exceptions import RayError, RayTaskError
        from ray.serve.exceptions import RayServeException

        await self._wait_for_replicas()
        caller = getattr(self.router.options(stream=True, session_id=session_id), method)
        answer = caller.remote(*arguments)
        try:
            async for each in answer:
                yield each
        except RayTaskError as error:
            raise error.cause from error
        except (RayError, RayServeException) as error:
            raise NotReadyError(LOST_MESSAGE) from error
        finally:
            answer.cancel()

    async def model_infos(self) -> tuple[ModelInfo, ...]:
        """Return the descriptions of its model and adapters; none if no Router of it answers."""
        infos: tuple[ModelInfo, ...] | None = await _answer(self.router.own_model_infos)
        return infos or ()

    async def fleet(self) -> FleetView | None:
        """Return its replicas as they last reported; None if its ControlPlane does not answer."""
        fleet = await _answer(self.control_plane.fleet)
        return None if fleet is None else FleetView(fleet, self.card.num_expected)

    async def _wait_for_replicas(self) -> None:
        """Wait until a new handle has received the list of replicas."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                while not self.router.running_replicas_populated():
                    await asyncio.sleep(_POLL_S)
                return
        raise NotReadyError(f"the model {self.card.model} is starting or stopping")


async def _answer(method: Any) -> Any:
    """Call a method of a handle; return None without an answer in time."""
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    with suppress(RayError, RayServeException, TimeoutError):
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            return await method.remote()
    return None


ListPeers = Callable[[], Awaitable[Mapping[str, PeerApplication]]]


class Applications:
    """Directory of the models that this application and its peers serve."""

    def __init__(
        self,
        own_model: str,
        list_peers: ListPeers | None = None,
        own_adapters: Callable[[], Collection[str]] = tuple,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """list_peers: returns all others, by name of the application; None: there are none.

        own_adapters: returns the names of this application's adapters. clock: monotonic, in
        seconds.
        """
        self._clock = clock
        self._own_model = own_model
        self._own_adapters = own_adapters
        self._by_adapter: dict[str, PeerApplication] = {}
        self._list_peers = list_peers
        self._by_model: dict[str, PeerApplication] = {}
        self._last_seen_at_s: dict[str, float] = {}  # of models
        self._last_listed_at_s: dict[str, float] = {}  # of applications
        self._listed_at_s = self._asked_at_s = -math.inf
        self._lock = asyncio.Lock()

    def is_own(self, model: str) -> bool:
        """Return whether this application serves the model or adapter; "" stands for its own."""
        return model in ("", self._own_model) or model in self._own_adapters()

    def require_own(self, model: str) -> None:
        """Raise UnknownModelError, with all known names, unless this application serves the model.

        Callers have been authenticated by then.
        """
        if not self.is_own(model) and model != DEFAULT_MODEL:
            names = (*self._own_adapters(), *sorted(self._by_model), *sorted(self._by_adapter))
            raise UnknownModelError(model, self._own_model, *names)

    async def find(self, model: str) -> PeerApplication | None:
        """Return the application that serves this model; None for this one.

        Raises NotReadyError for a model that was there in the last two minutes, as it may be
        redeployed, and UnknownModelError as `require_own` does.
        """
        if self.is_own(model):
            return None
        if (known := self._known(model)) is not None:
            return known
        await self._refresh()
        if model in self._by_model:
            return self._by_model[model]
        await self._find_adapters()
        if model in self._by_adapter:
            return self._by_adapter[model]
        self._expect(f"the model {model}", self._last_seen_at_s.get(model))
        self.require_own(model)
        return None

    def expect_application(self, name: str) -> None:
        """Raise NotReadyError for another application that was there in the last two minutes."""
        self._expect(f"the application {name}", self._last_listed_at_s.get(name))

    def _expect(self, what: str, last_at_s: float | None) -> None:
        if last_at_s is not None and self._clock() - last_at_s < _REDEPLOYMENT_S:
            raise NotReadyError(f"{what} is being redeployed, or was deleted")

    def _known(self, model: str) -> PeerApplication | None:
        """Return the application of a model or adapter; None where it must be looked up."""
        now_s = self._clock()
        if model in self._by_model:
            return self._by_model[model] if now_s - self._listed_at_s <= _STALE_S else None
        return self._by_adapter.get(model) if now_s - self._asked_at_s <= _STALE_S else None

    async def peers(self) -> tuple[PeerApplication, ...]:
        """Return all others, at most a second old, by the names of their models."""
        await self._refresh()
        return tuple(self._by_model[model] for model in sorted(self._by_model))

    async def _find_adapters(self) -> None:
        """Ask the peers for their adapters, which come and go; once for all concurrent callers."""
        async with self._lock:
            if self._clock() - self._asked_at_s < _FRESH_S:
                return
            peers = tuple(self._by_model.values())
            infos = await asyncio.gather(*(each.model_infos() for each in peers))
            self._by_adapter = {
                info.model: peer
                for peer, of_peer in zip(peers, infos, strict=True)
                for info in of_peer
                if info.parent
            }
            self._asked_at_s = self._clock()

    async def _refresh(self) -> None:
        """List the peers, once for all concurrent callers; keep the last list if that fails."""
        async with self._lock:
            if self._list_peers is None or self._clock() - self._listed_at_s < _FRESH_S:
                return
            try:
                found = await self._list_peers()
            except Exception as error:  # whatever happens to others, own requests go on
                logger.warning("other applications cannot be looked up: %s", error)
            else:
                self._by_model = {each.card.model: each for each in found.values()}
                self._last_listed_at_s |= dict.fromkeys(found, self._clock())
            self._listed_at_s = self._clock()
            self._last_seen_at_s |= dict.fromkeys(self._by_model, self._listed_at_s)


class ServeDirectory:
    """Finds the applications that Serve runs."""

    def __init__(self, own_application: str) -> None:
        self._own = own_application
        self._listed: dict[str, _ListedApplication] = {}

    async def list_peers(self) -> Mapping[str, PeerApplication]:
        """Return all that Serve lists besides this one; of two with the same model the first.

        The description of an application holds until Serve lists it no longer: its Routers answer
        while its ControlPlane is unavailable.
        """
        names = set(await asyncio.to_thread(our_applications)) - {self._own}
        for gone in self._listed.keys() - names:
            self._listed.pop(gone).close()
        for new in names - self._listed.keys():
            self._listed[new] = _ListedApplication(new)
        await asyncio.gather(*(each.refresh() for each in self._listed.values()))
        found = {name: self._listed[name].peer for name in sorted(names, reverse=True)}
        return {name: peer for name, peer in found.items() if peer is not None}


class _ListedApplication:
    """An application that Serve lists. Handles are made once; each costs a connection.

    peer: None until its ControlPlane has sent its description.
    """

    def __init__(self, application: str) -> None:
        from ray import serve

        self._application = application
        self._router = serve.get_deployment_handle(ROUTER, application)
        # Otherwise it receives the list of replicas after its first call. Serve returns the handle
        # of an earlier application of this name, which can be initialized only once.
        if not self._router.is_initialized:
            self._router._init()
        self._control_plane = serve.get_deployment_handle(CONTROL_PLANE, application)
        self._request: asyncio.Task[None] | None = None
        self.peer: PeerApplication | None = None

    async def refresh(self) -> None:
        """Request the description, unless a request is pending; wait for the first one only."""
        if self._request is not None and not self._request.done():
            return
        self._request = asyncio.create_task(self._fetch())
        if self.peer is None:
            await asyncio.wait([self._request], timeout=_ANSWER_TIMEOUT_S)
        if self.peer is None:
            logger.warning("application %s does not report its model", self._application)

    async def _fetch(self) -> None:
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        with suppress(RayError, RayServeException):
            card = await self._control_plane.card.remote()
            self.peer = PeerApplication(card, self._router, self._control_plane)

    def close(self) -> None:
        """Cancel a pending request, which would never be answered."""
        if self._request is not None:
            self._request.cancel()


def our_applications() -> dict[str, Any]:
    """Return Serve's status of the applications made of our deployments, by name."""
    from ray import serve

    return {
        name: each
        for name, each in serve.status().applications.items()
        if {ROUTER, CONTROL_PLANE} <= set(each.deployments)
    }
