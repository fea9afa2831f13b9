"""Tests the configuration of the TLS sidecar in a real Envoy, with HTTP and gRPC servers."""

import ssl
import subprocess
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tests.e2e.conftest import free_ports
from tests.k8s.binaries import tool
from tests.k8s.rendering import only, ray_templates, render
from tests.k8s.value_sets import VALUE_SETS
from tests.specdec.client.certificate import self_signed_certificate

pytestmark = pytest.mark.slow


class Plain(BaseHTTPRequestHandler):
    is_read = threading.Event()

    def log_message(self, format, *arguments):
        pass

    def do_GET(self):
        """Send two parts, the second one when the first is read: a buffered one never is."""
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"data: 1\n\n")
        self.wfile.flush()
        self.wfile.write(b"data: 2\n\n" if self.is_read.wait(30) else b"data: unread\n\n")


@pytest.fixture(scope="module")
def backends():
    """Run an HTTP and a gRPC server in plain text; yield their ports."""
    http_server = ThreadingHTTPServer(("127.0.0.1", 0), Plain)
    threading.Thread(target=http_server.serve_forever, daemon=True).start()
    grpc_server = grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), grpc_server)
    grpc_port = grpc_server.add_insecure_port("127.0.0.1:0")
    grpc_server.start()
    yield http_server.server_port, grpc_port
    http_server.shutdown()
    grpc_server.stop(None)


@pytest.fixture(scope="module")
def sidecar(backends, tmp_path_factory):
    """Run Envoy with the rendered files, but other ports and paths; yield its folder and ports."""
    envoy = tool("envoy/envoy/_bin/envoy")
    folder = tmp_path_factory.mktemp("envoy")
    key, certificate = self_signed_certificate()
    (folder / "tls.key").write_bytes(key)
    (folder / "tls.crt").write_bytes(certificate)
    objects = render(VALUE_SETS["sidecar"])
    ports = free_ports(2)
    replaced = {"/etc/envoy": folder, "/etc/specdec/tls": folder}
    replaced |= dict(zip(("8443", "9443", "8000", "9000"), (*ports, *backends), strict=True))
    for name, text in only(objects, "ConfigMap", "-envoy")["data"].items():
        for old, new in replaced.items():
            text = text.replace(old, str(new))
        (folder / name).write_text(text)
    _, container = ray_templates(objects)["head"]["spec"]["containers"]
    arguments = [each.replace("/etc/envoy", str(folder)) for each in container["args"]]
    with (folder / "log").open("wb") as log:
        popen = subprocess.Popen([envoy, *arguments], stdout=log, stderr=log)
    try:
        yield folder, *ports
    finally:
        popen.terminate()
        popen.wait(30)


def test_http_streams_pass_unbuffered(sidecar):
    folder, port, _ = sidecar
    tls = ssl.create_default_context(cafile=folder / "tls.crt")
    url = f"https://127.0.0.1:{port}/"
    for _ in range(50):
        try:
            response = urllib.request.urlopen(url, context=tls, timeout=10)
            break
        except OSError:
            time.sleep(0.2)
    else:
        pytest.fail((folder / "log").read_text())
    assert response.readline() == b"data: 1\n"
    Plain.is_read.set()
    assert response.read() == b"\ndata: 2\n\n"


def test_grpc_calls_pass(sidecar):
    folder, _, port = sidecar
    credentials = grpc.ssl_channel_credentials((folder / "tls.crt").read_bytes())
    with grpc.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=20, wait_for_ready=True)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_more_streams_pass_than_envoy_allows_by_default(sidecar):
    folder, _, port = sidecar
    credentials = grpc.ssl_channel_credentials((folder / "tls.crt").read_bytes())
    own_connection = [("grpc.use_local_subchannel_pool", 1)]
    channels = [
        grpc.secure_channel(f"127.0.0.1:{port}", credentials, own_connection) for _ in range(2)
    ]
    for channel in channels:
        grpc.channel_ready_future(channel).result(20)
    watches = [
        health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
        for channel in channels
        for _ in range(600)
    ]
    assert {next(each).status for each in watches} == {health_pb2.HealthCheckResponse.SERVING}
    for channel in channels:
        channel.close()


def test_connections_without_tls_fail(sidecar):
    _, port, _ = sidecar
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10)
