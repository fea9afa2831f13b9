"""What `helm test` runs: real streams over gRPC and HTTP, and a look at how speculation stands.

Reads what to call, and what to find there, from the JSON file that it is given. Ends with status 1
and one line for each thing that is not as it should be.
"""

from __future__ import annotations

import json
import ssl
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import certifi
import yaml

from specdec import SamplingParams
from specdec.client import Client


class _Tls(ssl.SSLContext):
    """TLS with a service whose certificate may have another name than its address."""

    _server_name = ""

    @classmethod
    def by(cls, ca_file: Path, server_name: str) -> _Tls:
        """Trusts the certificates of the file. Empty: the name has to be the address's."""
        context = cls(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(ca_file)
        context._server_name = server_name
        return context

    def wrap_socket(self, *arguments: Any, **options: Any) -> ssl.SSLSocket:
        if self._server_name:
            options["server_hostname"] = self._server_name
        return super().wrap_socket(*arguments, **options)


def _ca_file(path: str) -> Path:
    """The Secret's own, or public authorities' where it has none, as it need not have."""
    own = Path(path)
    return own if own.exists() and own.stat().st_size else Path(certifi.where())


class Service:
    """The service, as a caller with the release's keys sees it."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        """plan: the JSON file's content."""
        self._plan = plan
        self._ca_file = _ca_file(plan["ca_file"]) if plan["ca_file"] else None
        self._tls = _Tls.by(self._ca_file, plan["server_name"]) if self._ca_file else None

    def _key(self) -> str | None:
        return _first_key(self._plan["api_keys_file"])

    def _client(self) -> Client:
        plan = self._plan
        return Client(
            plan["grpc_address"],
            timeout_s=plan["timeout_s"],
            tls_ca_file=self._ca_file,
            tls_server_name=plan["server_name"] or None,
            api_key=self._key(),
        )

    def stream_over_grpc(self, model: str) -> int:
        """Asks for the prompt's completion; how many tokens came, one message a step."""
        params = SamplingParams(temperature=0.0, max_tokens=self._plan["max_tokens"])
        with self._client() as client:
            chunks = client.generate_stream(self._plan["prompt"], params, model=model)
            return sum(len(chunk.token_ids) for chunk in chunks)

    def model_info(self, model: str) -> Any:
        """What the service says of a model."""
        with self._client() as client:
            return client.model_info(model)

    def stream_over_http(self, model: str) -> list[dict[str, Any]]:
        """Asks in a chat; the events of the stream that came before [DONE]. Raises OSError."""
        body = {
            "model": model,
            "messages": [{"role": "user", "content": self._plan["prompt"]}],
            "max_completion_tokens": self._plan["max_tokens"],
            "stream": True,
        }
        sent = json.dumps(body).encode()
        with self._open("/v1/chat/completions", self._key(), sent) as response:
            return [json.loads(data) for data in _events(response) if data != "[DONE]"]

    def speculation(self, route_prefix: str) -> dict[str, Any]:
        """The state that the ControlPlane of a model keeps. Raises OSError."""
        token = _first_line(self._plan["admin_token_file"])
        path = f"{route_prefix.rstrip('/')}/v1/admin/speculation"
        with self._open(path, token) as response:
            state: dict[str, Any] = json.load(response)
            return state

    def _open(self, path: str, bearer: str | None, body: bytes | None = None) -> Any:
        request = urllib.request.Request(self._plan["http_url"] + path, data=body)
        request.add_header("Content-Type", "application/json")
        if bearer is not None:
            request.add_header("Authorization", f"Bearer {bearer}")
        timeout_s = self._plan["timeout_s"]
        return urllib.request.urlopen(request, timeout=timeout_s, context=self._tls)


def faults(plan: Mapping[str, Any]) -> Iterator[str]:
    """What is not as it should be, a line each."""
    service = Service(plan)
    for model in plan["models"]:
        try:
            for fault in _faults_of(service, model):
                yield f"{model['name']}: {fault}"
        except Exception as error:  # whatever it is, the next model is looked at too
            yield f"{model['name']}: {type(error).__name__}: {error}"


def _faults_of(service: Service, model: Mapping[str, Any]) -> Iterator[str]:
    if service.stream_over_grpc(model["name"]) == 0:
        yield "the stream over gRPC brought no token"
    events = service.stream_over_http(model["name"])
    if not any(choice["delta"].get("content") for each in events for choice in each["choices"]):
        yield "the stream over HTTP brought no text"
    info = service.model_info(model["name"])
    for name in ("speculation_method", "num_speculative_tokens"):
        found, expected = getattr(info, name), model[name]
        if expected != "any" and found != expected:
            yield f"{name} is {found}, and should be {expected}"
    mode = service.speculation(model["route_prefix"])["in_force"]["mode"]
    if model["mode"] and mode != model["mode"]:
        yield f"the mode of speculation is {mode}, and should be {model['mode']}"


def _events(response: Any) -> Iterator[str]:
    for line in response:
        if line.startswith(b"data: "):
            yield line[len(b"data: ") :].decode().strip()


def _first_key(path: str) -> str | None:
    return yaml.safe_load(Path(path).read_text(encoding="utf-8"))[0]["key"] if path else None


def _first_line(path: str) -> str | None:
    return Path(path).read_text(encoding="utf-8").strip() if path else None


def main(path: str) -> int:
    """Exit status 1 where something is not as it should be."""
    plan = json.loads(Path(path).read_text(encoding="utf-8"))
    found = list(faults(plan))
    for fault in found:
        print(fault, file=sys.stderr)
    if not found:
        names = ", ".join(model["name"] for model in plan["models"])
        print(f"{names}: streams over gRPC and HTTP, and speculation as configured")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
