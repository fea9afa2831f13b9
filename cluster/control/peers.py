"""The applications beside this one, each with a model of its own, and how they are reached.

Every Router knows its own model only. It looks around when a request names another, and when it is
to tell of all; otherwise nobody asks, so a service of one model never does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from cluster.observability.metric_definitions import FleetView
from specdec.types.errors import (
    NotReadyError,
    UnknownModelError,
)
from specdec.types.responses import ModelInfo

LOST_MESSAGE = "the replica that answered is lost; send the request again, with what came of it"


logger = logging.getLogger(__name__)

ROUTER, CONTROL_PLANE = "Router", "ControlPlane"
"""Deployments of each application."""

_FRESH_S = 1.0
_STALE_S = 5.0
"""After so long a model that is known is looked for again: a handle of none waits for ever."""

_ANSWER_TIMEOUT_S = 3.0
_POLL_S = 0.05


@dataclass(frozen=True)
class ServiceCard:
    """What an application says of itself, whether its models are loaded or not.

    num_expected: replicas that there have to be at any load.
    """

    model: str
    num_expected: int


@dataclass(frozen=True)
class Fellow:
    """Another application. router, control_plane: handles of its deployments."""

    card: ServiceCard
    router: Any
    control_plane: Any

    async def stream(self, method: str, *arguments: Any) -> AsyncGenerator[Any, None]:
        """What a method of one of its Routers yields; leaving the generator cancels it there.

        Raises NotReadyError while it has no Router, and when the one that answers is lost.
        """
        await self._until_reachable()
        caller = getattr(self.router.options(stream=True), method)
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

    async def model_info(self) -> ModelInfo | None:
        """Of its model; None while none of its Routers answers."""
        with suppress(RayError, RayServeException, TimeoutError):
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                info: ModelInfo = await self.router.own_model_info.remote()
                return info
        return None

    async def fleet(self) -> FleetView | None:
        """Its replicas as they last reported; None while its ControlPlane is away."""
        with suppress(RayError, RayServeException, TimeoutError):
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                return FleetView(await self.control_plane.fleet.remote(), self.card.num_expected)
        return None

    async def _until_reachable(self) -> None:
        """A handle that has just been made knows of replicas a moment later."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                while not self.router.running_replicas_populated():
                    await asyncio.sleep(_POLL_S)
                return
        raise NotReadyError(f"the model {self.card.model} is starting or stopping")


Look = Callable[[], Awaitable[Mapping[str, Fellow]]]


async def nobody() -> Mapping[str, Fellow]:
    """What is found where there can be no other application."""
    return {}


class Applications:
    """Who serves which model beside this application."""

    def __init__(self, own_model: str, look: Look = nobody) -> None:
        """look: finds all the others, by name of the application."""
        self._own_model = own_model
        self._look = look
        self._by_model: dict[str, Fellow] = {}
        self._looked_at_s = -_FRESH_S
        self._looking = asyncio.Lock()

    def is_own(self, model: str) -> bool:
        """Whether it is our own model, as it is where none is named."""
        return model in ("", self._own_model)

    async def elsewhere(self, model: str) -> Fellow | None:
        """Who serves this model; None for our own.

        Raises UnknownModelError, with the names that there are, where nobody serves it: callers
        have been asked for their key by then.
        """
        if self.is_own(model):
            return None
        if model not in self._by_model or time.monotonic() - self._looked_at_s > _STALE_S:
            await self._look_around()
        if model not in self._by_model:
            raise UnknownModelError(model, self._own_model, *sorted(self._by_model))
        return self._by_model[model]

    async def fellows(self) -> tuple[Fellow, ...]:
        """All others as of a second ago at most, by the names of their models."""
        await self._look_around()
        return tuple(self._by_model[model] for model in sorted(self._by_model))

    async def _look_around(self) -> None:
        """Once for all who ask at the same time. What cannot be found out stays as it was."""
        async with self._looking:
            if time.monotonic() - self._looked_at_s < _FRESH_S:
                return
            try:
                found = await self._look()
            except (RayError, RayServeException) as error:
                logger.warning("other applications cannot be looked up: %s", error)
            else:
                self._by_model = {each.card.model: each for each in found.values()}
            self._looked_at_s = time.monotonic()


class ServeDirectory:
    """Finds the applications that Serve runs."""

    def __init__(self, own_application: str) -> None:
        self._own = own_application
        self._listed: dict[str, _Listed] = {}

    async def look(self) -> Mapping[str, Fellow]:
        """All that Serve lists besides this one; of two with the same model the first by name.

        What one has said of itself holds until Serve lists it no longer: its Routers answer while
        its ControlPlane is away.
        """
        names = set(await asyncio.to_thread(our_applications)) - {self._own}
        for gone in self._listed.keys() - names:
            self._listed.pop(gone).close()
        for new in names - self._listed.keys():
            self._listed[new] = _Listed(new)
        await asyncio.gather(*(each.ask() for each in self._listed.values()))
        found = {name: self._listed[name].fellow for name in sorted(names, reverse=True)}
        return {name: fellow for name, fellow in found.items() if fellow is not None}


class _Listed:
    """An application that Serve lists. Handles are made once; each costs a connection."""

    def __init__(self, application: str) -> None:
        self._application = application
        self._router = serve.get_deployment_handle(ROUTER, application)
        self._router._init()  # else it learns of replicas with its first call only
        self._control_plane = serve.get_deployment_handle(CONTROL_PLANE, application)
        self._card: ServiceCard | None = None
        self._asking: asyncio.Task[None] | None = None

    @property
    def fellow(self) -> Fellow | None:
        """None as long as it has never said what it serves."""
        if self._card is None:
            return None
        return Fellow(self._card, self._router, self._control_plane)

    async def ask(self) -> None:
        """Has it say what it serves; waits for that where it never has, and once only."""
        if self._asking is not None and not self._asking.done():
            return
        self._asking = asyncio.create_task(self._hear())
        if self._card is None:
            await asyncio.wait([self._asking], timeout=_ANSWER_TIMEOUT_S)
        if self._card is None:
            logger.warning("application %s does not say what it serves", self._application)

    async def _hear(self) -> None:
        with suppress(RayError, RayServeException):
            self._card = await self._control_plane.card.remote()

    def close(self) -> None:
        """It is gone, and so is whoever would answer."""
        if self._asking is not None:
            self._asking.cancel()


def our_applications() -> dict[str, Any]:
    """Serve's status of those made of our deployments, by name."""
    found = serve.status().applications
    return {
        name: each
        for name, each in found.items()
        if {ROUTER, CONTROL_PLANE} <= set(each.deployments)
    }
