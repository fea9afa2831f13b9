"""The private names of Ray and Ray Serve that are used exist, and mean what is assumed."""

import inspect
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, create_autospec

import pytest
import ray
from ray import serve
from ray._private import node, worker
from ray._raylet import AuthenticationMode, get_authentication_mode
from ray.serve import context
from ray.serve._private import default_impl, grpc_util, http_util, proxy, replica
from ray.serve._private.client import ServeControllerClient
from ray.serve._private.common import DeploymentID
from ray.serve._private.controller import ServeController
from ray.serve._private.grpc_util import gRPCGenericServer
from ray.serve.config import HTTPOptions, gRPCOptions
from ray.serve.schema import ApplicationDetails, ServeInstanceDetails

from cluster.workers.ray import ray_internals
from cluster.workers.ray.ray_internals import ProxyRoute, ServeListeners

PACKAGE = Path(__file__).parents[4] / "cluster"
PRIVATE = re.compile(r"\b(?:import|from)\s+ray(?:\.\w+)*\._|\b(?:ray|serve)(?:\.\w+)*\._\w")


def test_no_other_module_uses_private_names():
    using = {each.name for each in PACKAGE.rglob("*.py") if PRIVATE.search(each.read_text())}
    assert using == {Path(ray_internals.__file__).name}


def test_the_head_node_has_a_special_resource():
    assert ray_internals.head_node_resource() == "node:__internal_head__"


def test_the_header_of_a_session():
    assert ray_internals.session_header() == "x-session-id"
    source = inspect.getsource(proxy.HTTPProxy.setup_request_context_and_handle)
    assert "_matches_session_id_header" in source
    assert 'key == "session_id"' in inspect.getsource(proxy.gRPCProxyRequest.setup_variables)


def test_the_node_that_this_process_has_started(monkeypatch):
    monkeypatch.setattr(worker, "_global_node", None)
    assert ray_internals.local_node() is None
    started = object()
    monkeypatch.setattr(worker, "_global_node", started)
    assert ray_internals.local_node() is started


def test_the_processes_of_a_node():
    with subprocess.Popen(["true"]) as raylet:
        kinds = {"raylet": [SimpleNamespace(process=raylet)], "log_monitor": []}
        assert ray_internals.node_processes(SimpleNamespace(all_processes=kinds)) == [raylet]
    assert "self.all_processes" in inspect.getsource(node.Node.__init__)


def test_authentication_is_read_from_the_environment_again(monkeypatch):
    with monkeypatch.context() as changed:
        changed.setenv("RAY_AUTH_MODE", "token")
        changed.setenv("RAY_AUTH_TOKEN", "secret")
        ray_internals.reload_authentication()
        assert get_authentication_mode() == AuthenticationMode.TOKEN
    ray_internals.reload_authentication()
    assert get_authentication_mode() != AuthenticationMode.TOKEN


def test_where_a_running_serve_listens(monkeypatch):
    options = {
        "get_http_config": HTTPOptions(host="10.0.0.1", port=8100),
        "get_grpc_config": gRPCOptions(port=9100, grpc_servicer_functions=["a.b"]),
    }
    methods = {
        name: SimpleNamespace(remote=lambda value=value: value) for name, value in options.items()
    }
    controller = SimpleNamespace(**methods)
    assert all(hasattr(ServeController, name) for name in options)
    monkeypatch.setattr(ray, "get", list)
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: controller)
    assert ray_internals.serve_listeners() == ServeListeners("10.0.0.1", 9100, 8100, ["a.b"])


def test_where_no_serve_runs(monkeypatch):
    def fail(name, namespace):
        raise ValueError(name)

    monkeypatch.setattr(ray, "get_actor", fail)
    assert ray_internals.serve_listeners() is None


def test_the_route_prefixes_of_applications(monkeypatch):
    assert "route_prefix" in ApplicationDetails.model_fields
    assert "applications" in ServeInstanceDetails.model_fields
    details = {"applications": {"a": {"route_prefix": "/"}, "b": {"route_prefix": None}, "c": {}}}
    client = create_autospec(ServeControllerClient, instance=True)
    client.get_serve_details.return_value = details
    monkeypatch.setattr(context, "_get_global_client", lambda **_: client)
    assert ray_internals.route_prefixes() == {"a": "/", "b": None, "c": None}
    monkeypatch.setattr(context, "_get_global_client", lambda **_: None)
    assert ray_internals.route_prefixes() == {}


def test_refusals_of_a_proxy_itself():
    for status, is_refusal in ((404, True), (503, True), (200, False)):
        start, _ = http_util.convert_object_to_asgi_messages("text", status_code=status)
        assert ray_internals.is_refusal_of_proxy(start) == is_refusal
        start["headers"].append((b"content-length", b"4"))  # as an application sends it
        assert not ray_internals.is_refusal_of_proxy(start)
    not_found = inspect.getsource(proxy.HTTPProxy.not_found_response)
    assert "convert_object_to_asgi_messages" in not_found
    on_exception = inspect.getsource(http_util.send_http_response_on_exception)
    assert "convert_object_to_asgi_messages" in on_exception


def test_a_replica_that_serve_stops(monkeypatch):
    own = SimpleNamespace(_shutting_down=False)
    actors = {"id": SimpleNamespace(_replica_impl=own)}
    monkeypatch.setattr(worker, "global_worker", SimpleNamespace(actors=actors))
    assert not ray_internals.is_replica_stopping()
    own._shutting_down = True
    assert ray_internals.is_replica_stopping()
    stop = inspect.getsource(replica.Replica._perform_graceful_shutdown)
    assert stop.index("_shutting_down = True") < stop.index("_drain_ongoing_requests")
    assert "self._replica_impl" in inspect.getsource(replica.ReplicaActor.__init__)
    assert "self.actors = " in inspect.getsource(worker.Worker.__init__)


def test_an_application_is_deleted_without_waiting(monkeypatch):
    assert "_blocking" in inspect.signature(serve.delete).parameters
    deleted = []
    monkeypatch.setattr(serve, "delete", lambda name, _blocking: deleted.append((name, _blocking)))
    ray_internals.delete_application("a")
    assert deleted == [("a", False)]


@pytest.mark.parametrize(("host", "address"), [("127.0.0.1", "127.0.0.1:9"), ("::1", "[::1]:9")])
def test_a_proxy_listens_on_one_host(monkeypatch, host, address):
    monkeypatch.setattr(default_impl, "add_grpc_address", default_impl.add_grpc_address)
    assert "import add_grpc_address" in inspect.getsource(grpc_util.start_grpc_server)
    server = Mock()
    ray_internals.set_grpc_proxy_host(host)
    default_impl.add_grpc_address(server, "[::]:9")
    server.add_insecure_port.assert_called_once_with(address)


async def test_a_proxys_grpc_server_has_further_options(monkeypatch):
    defaults = [*grpc_util.DEFAULT_GRPC_SERVER_OPTIONS]
    ray_internals.add_grpc_proxy_options([("a", 1)])
    try:
        init = Mock()
        monkeypatch.setattr(grpc_util.Server, "__init__", init)
        gRPCGenericServer(Mock())
        assert init.call_args.kwargs["options"] == [*defaults, ("a", 1)]
    finally:
        grpc_util.DEFAULT_GRPC_SERVER_OPTIONS[:] = defaults


async def test_handlers_of_a_proxy_can_be_wrapped():
    class Proxy:
        proxy_router = SimpleNamespace(
            endpoints={DeploymentID("Router", "a"): SimpleNamespace(route="/a")}
        )

        def service_handler_factory(self, service_method, streaming_type):
            return f"a handler of {service_method}"

    wrapped = []

    def wrap(factory, routes):
        wrapped.append(factory)
        assert routes() == [ProxyRoute("a", "Router", "/a")]
        return lambda **_: "another one"

    server = gRPCGenericServer(Proxy().service_handler_factory)
    ray_internals.wrap_proxy_handlers(server, wrap)
    assert wrapped[0](service_method="x", streaming_type=None) == "a handler of x"
    assert server.service_handler_factory() == "another one"
    assert hasattr(proxy.gRPCProxy, "service_handler_factory")
    assert "self.proxy_router" in inspect.getsource(proxy.GenericProxy.__init__)
