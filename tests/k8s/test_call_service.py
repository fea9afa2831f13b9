"""Tests of the certificate verification of `helm test` with the TLS sidecar."""

import importlib.util
import json
import ssl
import threading
import urllib.error
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import certifi
import pytest

from tests.k8s.rendering import CHART, only, render
from tests.k8s.value_sets import VALUE_SETS
from tests.specdec.client.certificate import self_signed_certificate

NAME = "llm.example.com"


def script():
    spec = importlib.util.spec_from_file_location("called", CHART / "files" / "call_service.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class State(BaseHTTPRequestHandler):
    def log_message(self, format, *arguments):
        pass

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(
            json.dumps({"path": self.path, "authorization": self.headers["authorization"]}).encode()
        )


@contextmanager
def https_server(folder, name):
    key, certificate = self_signed_certificate(name)
    (folder / "tls.key").write_bytes(key)
    (folder / "ca.crt").write_bytes(certificate)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(folder / "ca.crt", folder / "tls.key")
    server = HTTPServer(("127.0.0.1", 0), State)
    server.socket = tls.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"https://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def plan_of(values, folder, url):
    """Return the rendered plan with the address of the test's server and the folder of its CA."""
    plan = json.loads(only(render(values), "ConfigMap", "-test")["data"]["plan.json"])
    ca_file = plan["ca_file"].replace("/etc/specdec/tls", str(folder))
    return plan | {
        "http_url": url,
        "ca_file": ca_file,
        "admin_token_file": "",
        "api_keys_file": "",
        "timeout_s": 10,
    }


def test_a_certificate_for_the_address_is_verified_with_the_secrets_ca(tmp_path):
    with https_server(tmp_path, "") as url:
        plan = plan_of(VALUE_SETS["sidecar"], tmp_path, url)
        state = script().Service(plan).speculation("/a")
        assert state["path"] == "/a/v1/admin/speculation"


def test_a_certificate_for_another_name_needs_server_name(tmp_path):
    with https_server(tmp_path, NAME) as url:
        plan = plan_of(VALUE_SETS["sidecar"], tmp_path, url)
        with pytest.raises(urllib.error.URLError, match="not valid for '127"):
            script().Service(plan).speculation("/")
        named = plan_of(VALUE_SETS["sidecar with a public name"], tmp_path, url)
        assert script().Service(named).speculation("/")


def test_without_an_admin_token_the_api_key_is_sent(tmp_path):
    keys, token = tmp_path / "keys.yaml", tmp_path / "token"
    keys.write_text("- {name: ann, key: sk-battery-staple}\n")
    token.write_text("correct-horse-battery\n")
    with https_server(tmp_path, "") as url:
        plan = plan_of(VALUE_SETS["sidecar"], tmp_path, url) | {"api_keys_file": str(keys)}
        sent = script().Service(plan).speculation("/")["authorization"]
        assert sent == "Bearer sk-battery-staple"
        plan |= {"admin_token_file": str(token)}
        assert script().Service(plan).speculation("/")["authorization"].endswith("horse-battery")


@pytest.mark.parametrize("content", [None, b""])
def test_without_a_ca_in_the_secret_public_cas_are_trusted(tmp_path, monkeypatch, content):
    with https_server(tmp_path, "") as url:
        authority = tmp_path / "ca.crt"
        public = authority.rename(tmp_path / "public.pem")
        if content is not None:
            authority.write_bytes(content)
        plan = plan_of(VALUE_SETS["sidecar"], tmp_path, url)
        with pytest.raises(urllib.error.URLError, match="self-signed"):
            script().Service(plan).speculation("/")
        monkeypatch.setattr(certifi, "where", lambda: str(public))
        assert script().Service(plan).speculation("/")
