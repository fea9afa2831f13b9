"""Everything that uses private names of Ray and Ray Serve, tested against the pinned minor release.

Ray is imported inside the functions: it reads the environment when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from subprocess import Popen
from typing import Any, NamedTuple

from cluster.config.network import address_of

HandlerFactory = Callable[..., Any]


class ProxyRoute(NamedTuple):
    """A deployment that a Serve proxy forwards calls to."""

    application: str
    deployment: str
    prefix: str


ListRoutes = Callable[[], list[ProxyRoute]]


@dataclass(frozen=True)
class ServeListeners:
    """The addresses of a running Serve instance's proxies, and its gRPC servicer functions."""

    host: str
    grpc_port: int
    http_port: int
    grpc_servicer_functions: list[str]


def head_node_resource() -> str:
    """Return the name of the resource that only Ray's head node has."""
    from ray._common.constants import HEAD_NODE_RESOURCE_NAME

    return str(HEAD_NODE_RESOURCE_NAME)


def local_node() -> Any:
    """Return Ray's record of the processes that this one has started; None if it has not."""
    from ray._private import worker

    return worker._global_node


def node_processes(node: Any) -> list[Popen[bytes]]:
    """Return the processes in the record of a node, running or ended."""
    return [each.process for each in chain(*node.all_processes.values())]


def vital_processes(node: Any) -> dict[str, Popen[bytes]]:
    """Return the processes of a node without which it does not go on, by name."""
    vital = ("gcs_server", "raylet")
    return {name: each.process for name in vital for each in node.all_processes.get(name, ())}


def reload_authentication() -> None:
    """Apply Ray's authentication variables, which it caches when it is imported or first asked."""
    from ray._raylet import (  # type: ignore[attr-defined]  # missing in the stubs
        AuthenticationTokenLoader,
        Config,
    )

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def serve_listeners() -> ServeListeners | None:
    """Return where the Serve instance of the connected cluster listens; None if none runs."""
    import ray

    try:
        controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return None
    http, grpc = ray.get([controller.get_http_config.remote(), controller.get_grpc_config.remote()])
    return ServeListeners(http.host, grpc.port, http.port, list(grpc.grpc_servicer_functions))


def session_header() -> str:
    """Return the HTTP header whose value Serve's proxies pass on as the session id of a request."""
    from ray.serve._private.constants import SERVE_SESSION_ID

    return str(SERVE_SESSION_ID)


def route_prefixes() -> dict[str, str | None]:
    """Return the route prefix of each application of the running Serve; `serve.status` has none."""
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return {}
    applications = client.get_serve_details()["applications"]
    return {name: each.get("route_prefix") for name, each in applications.items()}


def is_refusal_of_proxy(start: Mapping[str, Any]) -> bool:
    """Return whether Serve's HTTP proxy itself refuses a request, by the start of its response.

    404 for a path without an application, 503 for an application that failed to start. Only its
    texts have a type and no length, and the id of the request, which it adds to every response.
    """
    headers = {bytes(name).lower(): bytes(value) for name, value in start.get("headers", ())}
    headers.pop(b"x-request-id", None)
    is_text = headers == {b"content-type": b"text/plain; charset=utf-8"}
    return is_text and start["status"] in (404, 503)


def is_replica_stopping() -> bool:
    """Return whether Serve has begun to stop the replica in this process."""
    from ray._private import worker

    actors = worker.global_worker.actors.values()
    return any(each._replica_impl._shutting_down for each in actors)


def delete_application(name: str) -> None:
    """Start to delete a Serve application, without waiting until it is gone."""
    from ray import serve

    serve.delete(name, _blocking=False)


def set_grpc_proxy_host(host: str) -> None:
    """Let the gRPC server that the Serve proxy of this process starts next listen on one host."""
    from ray.serve._private import default_impl

    def add_address(server: Any, address: str) -> None:
        server.add_insecure_port(address_of(host, int(address.rpartition(":")[2])))

    default_impl.add_grpc_address = add_address


def add_grpc_proxy_options(options: Sequence[tuple[str, int]]) -> None:
    """Add options to the gRPC server that the Serve proxy of this process starts next."""
    from ray.serve._private.constants import DEFAULT_GRPC_SERVER_OPTIONS

    DEFAULT_GRPC_SERVER_OPTIONS.extend(options)


def wrap_proxy_handlers(
    server: Any, wrap: Callable[[HandlerFactory, ListRoutes], HandlerFactory]
) -> None:
    """Wrap the factory of the handlers that a Serve proxy's gRPC server mounts from now on."""
    factory = server.service_handler_factory
    router = factory.__self__.proxy_router

    def routes() -> list[ProxyRoute]:
        return [
            ProxyRoute(each.app_name, each.name, info.route)
            for each, info in router.endpoints.items()
        ]

    server.service_handler_factory = wrap(factory, routes)
