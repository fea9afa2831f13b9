"""A front end on the event loop of its Router, linked to it as in another process."""

from __future__ import annotations

import socket
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.types import ASGIApp

from cluster.api.base.authentication import AdminAccess, ApiKeys
from cluster.api.front_ends.front_ends import state_of
from cluster.api.front_ends.messages import Start
from cluster.api.front_ends.relay import GRPC, HTTP, RelayHttp, RelayOthers
from cluster.api.front_ends.router_client import FrontEndRouter, RouterClient
from cluster.api.front_ends.router_end import RouterEnd
from cluster.api.grpc import forwarding
from cluster.api.http import forwarding as http_forwarding
from cluster.replica.replica_router import ReplicaRouter


class LinkedFrontEnd:
    """Both ends. app: the ASGI application of a front end with the paths of `own`."""

    def __init__(self, end: RouterEnd, client: RouterClient, router: FrontEndRouter) -> None:
        self.end, self.client, self.router = end, client, router

    @classmethod
    async def start(
        cls, router: ReplicaRouter, app: ASGIApp | None = None, admin: Any = None
    ) -> LinkedFrontEnd:
        """app, admin: the Router's own interfaces, to which the front end relays."""
        ours, theirs = socket.socketpair()
        methods: Any = {
            HTTP: partial(http_forwarding.answer, app),
            GRPC: partial(forwarding.answer, admin),
        }
        client = RouterClient(theirs, lambda: None)
        routed = replace(router.routed, engine=router.running_engine().thread.config)
        end = RouterEnd(ours, router, methods, Start(routed, "1."))
        end.show(state_of(router))
        return cls(end, client, FrontEndRouter(await client.started, client))

    def app(self, own: ASGIApp) -> ASGIApp:
        return RelayOthers(own, RelayHttp(self.client, AdminAccess(), ApiKeys()))

    def close(self) -> None:
        self.client.close()
        self.end._channel.close()
