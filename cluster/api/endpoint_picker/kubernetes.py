"""Follows the pods of a label selector through the Kubernetes API: a list, and a watch from there.

Needs the verbs list and watch for pods of one namespace, and the files of a service account.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from ssl import create_default_context
from typing import Any, Self

import httpx
from pydantic_core import from_json

from cluster.api.endpoint_picker.http_bodies import read_body
from cluster.config.network import address_of
from specdec.types.errors import InvalidValueError

logger = logging.getLogger(__name__)

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

_WATCH_S = 300
_READ_TIMEOUT_S = _WATCH_S + 30.0
_CONNECT_TIMEOUT_S = 5.0
_RETRY_S = 2.0
_MAX_LIST_BYTES = 2**26
_MAX_EVENT_BYTES = 2**21

_MALFORMED = (ValueError, KeyError, TypeError, AttributeError)
"""Raised for answers that are not those of the API."""

Pod = Mapping[str, Any]


@dataclass(frozen=True)
class Cluster:
    """Where the Kubernetes API is, and how a client is known there.

    account: directory with the files token and ca.crt.
    """

    url: str
    namespace: str
    account: Path = SERVICE_ACCOUNT

    @classmethod
    def of_pod(cls, namespace: str | None, account: Path = SERVICE_ACCOUNT) -> Self:
        """Return the cluster of the pod in which this runs. namespace: None for that of the pod.

        Raises InvalidValueError outside of a pod with a service account.
        """
        host, port = (os.environ.get(f"KUBERNETES_SERVICE_{each}") for each in ("HOST", "PORT"))
        if not host or not (account / "token").is_file():
            limit = "used in a pod with a service account; elsewhere list the endpoints"
            raise InvalidValueError("pod_selector", "given", limit)
        own = namespace or (account / "namespace").read_text().strip()
        return cls(f"https://{address_of(host, int(port or 443))}", own, account)


class PodWatcher:
    """Calls back with the addresses of the ready pods whenever they change."""

    def __init__(
        self, cluster: Cluster, selector: str, port: int, on_change: Callable[[list[str]], None]
    ) -> None:
        """selector: of labels, such as app=chat. port: of every pod."""
        self._cluster = cluster
        self._selector = selector
        self._port = port
        self._on_change = on_change
        self._addresses: dict[str, str] = {}  # by the names of the ready pods

    async def run(self) -> None:
        """Follow until cancelled; while the API is unavailable, the last pods remain."""
        timeout = httpx.Timeout(_READ_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
        context = create_default_context(cafile=str(self._cluster.account / "ca.crt"))
        async with httpx.AsyncClient(verify=context, timeout=timeout, trust_env=False) as client:
            while True:
                next_s = time.monotonic() + _RETRY_S
                try:
                    version = await self._list(client)
                    await self._watch(client, version)
                except (httpx.HTTPError, OSError, *_MALFORMED) as error:
                    logger.warning("the list of pods is not available: %r", error)
                await asyncio.sleep(next_s - time.monotonic())

    async def _list(self, client: httpx.AsyncClient) -> str:
        """Read all pods; return the version from which a watch continues."""
        async with self._get(client) as response:
            answer = from_json(await read_body(response, _MAX_LIST_BYTES))
        self._addresses.clear()
        for each in answer["items"]:
            self._apply(each)
        self._report()
        return str(answer["metadata"]["resourceVersion"])

    async def _watch(self, client: httpx.AsyncClient, version: str) -> None:
        """Apply events until the API ends the watch, or rejects it, as for an old version."""
        parameters = {"watch": "1", "resourceVersion": version, "timeoutSeconds": str(_WATCH_S)}
        async with self._get(client, **parameters) as response:
            response.raise_for_status()
            async for line in _lines(response):
                event = from_json(line)
                if event["type"] == "ERROR":
                    raise ValueError(f"the watch ended: {event['object'].get('message')}")
                self._apply(event["object"], is_gone=event["type"] == "DELETED")
                self._report()

    def _apply(self, pod: Pod, *, is_gone: bool = False) -> None:
        name, address = pod["metadata"]["name"], _address(pod, self._port)
        if is_gone or address is None:
            self._addresses.pop(name, None)
        else:
            self._addresses[name] = address

    def _get(self, client: httpx.AsyncClient, **parameters: str) -> Any:
        """Return the response as an asynchronous context manager; the token may have changed."""
        cluster = self._cluster
        token = (cluster.account / "token").read_text().strip()
        return client.stream(
            "GET",
            f"{cluster.url}/api/v1/namespaces/{cluster.namespace}/pods",
            params={"labelSelector": self._selector, **parameters},
            headers={"authorization": f"Bearer {token}", "accept-encoding": "identity"},
        )

    def _report(self) -> None:
        self._on_change(sorted(self._addresses.values()))


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the lines of a response. Raises ValueError for a line that is too long."""
    rest = bytearray()
    async for chunk in response.aiter_raw():
        *complete, last = chunk.split(b"\n")
        for part in complete:
            yield bytes(rest + part)
            rest.clear()
        rest += last
        if len(rest) > _MAX_EVENT_BYTES:
            raise ValueError(f"an event has more than {_MAX_EVENT_BYTES} bytes")


def _address(pod: Pod, port: int) -> str | None:
    """Return the address of a pod that is ready and not being deleted, else None."""
    status = pod.get("status") or {}
    conditions = {each["type"]: each["status"] for each in status.get("conditions") or ()}
    is_ready = conditions.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]
    host = status.get("podIP")
    return address_of(host, port) if is_ready and host else None
