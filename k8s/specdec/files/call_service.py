"""The program that `helm test` runs: streams over gRPC and HTTP, and checks speculation's state.

Its argument is a JSON file with the addresses and the expected state. It prints one line for each
failed check, and exits with status 1 if there are any.
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
from specdec.types.network import bypasses_proxy


class _Tls(ssl.SSLContext):
    """TLS context for a service whose certificate may have another name than its address."""

    _server_name = ""

    @classmethod
    def create(cls, ca_file: Path, server_name: str) -> _Tls:
        """Trust the certificates of `ca_file`, for `server_name` or, if empty, for the address."""
        context = cls(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(ca_file)
        context._server_name = server_name
        return context

    def wrap_socket(self, *arguments: Any, **options: Any) -> ssl.SSLSocket:
        if self._server_name:
            options["server_hostname"] = self._server_name
        return super().wrap_socket(*arguments, **options)


def _ca_file(path: str) -> Path:
    """Return the CA file of the Secret or, since that is optional, the public CAs."""
    ca_file = Path(path)
    return ca_file if ca_file.exists() and ca_file.stat().st_size else Path(certifi.where())


class Service:
    """Client of the service with the credentials of the release."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        """Take the content of the JSON file."""
        self._plan = plan
        self._ca_file = _ca_file(plan["ca_file"]) if plan["ca_file"] else None
        self._tls = _Tls.create(self._ca_file, plan["server_name"]) if self._ca_file else None

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
        """Stream a completion of the prompt; return the number of tokens. Raises RpcError."""
        params = SamplingParams(temperature=0.0, max_tokens=self._plan["max_tokens"])
        with self._client() as client:
            chunks = client.generate_stream(self._plan["prompt"], params, model=model)
            return sum(len(chunk.token_ids) for chunk in chunks)

    def model_info(self, model: str) -> Any:
        """Fetch the metadata of a model."""
        with self._client() as client:
            return client.model_info(model)

    def stream_over_http(self, model: str) -> list[dict[str, Any]]:
        """Stream a chat completion; return the events before [DONE]. Raises OSError."""
        body = {
            "model": model,
            "messages": [{"role": "user", "content": self._plan["prompt"]}],
            "max_completion_tokens": self._plan["max_tokens"],
            "stream": True,
        }
        data = json.dumps(body).encode()
        with self._open("/v1/chat/completions", self._key(), data) as response:
            return [json.loads(event) for event in _events(response) if event != "[DONE]"]

    def speculation(self, route_prefix: str) -> dict[str, Any]:
        """Fetch the state of speculation from a model's ControlPlane. Raises OSError."""
        token = _first_line(self._plan["admin_token_file"]) or self._key()
        path = f"{route_prefix.rstrip('/')}/v1/admin/speculation"
        with self._open(path, token) as response:
            state: dict[str, Any] = json.load(response)
            return state

    def _open(self, path: str, bearer: str | None, body: bytes | None = None) -> Any:
        request = urllib.request.Request(self._plan["http_url"] + path, data=body)
        request.add_header("Content-Type", "application/json")
        if bearer is not None:
            request.add_header("Authorization", f"Bearer {bearer}")
        handlers: list[urllib.request.BaseHandler] = []
        if self._tls is not None:
            handlers.append(urllib.request.HTTPSHandler(context=self._tls))
        if bypasses_proxy(request.host):
            handlers.append(urllib.request.ProxyHandler({}))
        opener = urllib.request.build_opener(*handlers)
        return opener.open(request, timeout=self._plan["timeout_s"])


def failures(plan: Mapping[str, Any]) -> Iterator[str]:
    """Run all checks; yield one line for each failure."""
    service = Service(plan)
    for model in plan["models"]:
        try:
            for failure in _model_failures(service, model):
                yield f"{model['name']}: {failure}"
        except Exception as error:  # the other models are checked in any case
            yield f"{model['name']}: {type(error).__name__}: {error}"


def _model_failures(service: Service, model: Mapping[str, Any]) -> Iterator[str]:
    if service.stream_over_grpc(model["name"]) == 0:
        yield "the gRPC stream returned no tokens"
    events = service.stream_over_http(model["name"])
    if not any(choice["delta"].get("content") for event in events for choice in event["choices"]):
        yield "the HTTP stream returned no text"
    info = service.model_info(model["name"])
    for name in ("speculation_method", "num_speculative_tokens"):
        actual, expected = getattr(info, name), model[name]
        if expected != "any" and actual != expected:
            yield f"{name} is {actual} (expected {expected})"
    mode = service.speculation(model["route_prefix"])["in_force"]["mode"]
    if model["mode"] and mode != model["mode"]:
        yield f"the mode of speculation is {mode} (expected {model['mode']})"


def _events(response: Any) -> Iterator[str]:
    for line in response:
        if line.startswith(b"data: "):
            yield line[len(b"data: ") :].decode().strip()


def _first_key(path: str) -> str | None:
    return yaml.safe_load(Path(path).read_text(encoding="utf-8"))[0]["key"] if path else None


def _first_line(path: str) -> str | None:
    return Path(path).read_text(encoding="utf-8").strip() if path else None


def main(path: str) -> int:
    """Run all checks, print the failures, and return the exit status."""
    plan = json.loads(Path(path).read_text(encoding="utf-8"))
    found = list(failures(plan))
    for failure in found:
        print(failure, file=sys.stderr)
    if not found:
        names = ", ".join(model["name"] for model in plan["models"])
        print(f"{names}: gRPC and HTTP streams work, and speculation is as configured")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
