"""Scrapes the endpoints of a pool: load, readiness and served models, each with a bound."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path
from random import Random
from ssl import SSLContext

import httpx
from pydantic_core import from_json

from cluster.api.endpoint_picker.endpoint import Endpoint
from cluster.api.endpoint_picker.http_bodies import read_body
from cluster.api.endpoint_picker.pool import Pool
from cluster.api.endpoint_picker.reports import metric_names, parse_report
from specdec.types.network import trusting

logger = logging.getLogger(__name__)

_TIMEOUT_S = 0.5  # of all of a scrape
_MAX_BYTES = 2**21
_MODELS_PERIOD_S = 1.0
_MAX_MODELS = 1024
_MAX_BACKOFF_S = 1.0
_PLAIN = {"accept-encoding": "identity"}
"""A compressed body has no bound when it is expanded."""


@dataclass(frozen=True)
class ScrapeConfig:
    """How endpoints are scraped.

    interval_s: between two scrapes of an endpoint. path: of the metrics. ca_file: certificates in
    PEM that verify the endpoints' TLS; empty for plain HTTP. api_key: for the list of models of an
    endpoint whose metrics have none.
    """

    interval_s: float = 0.1
    path: str = "/metrics/replica"
    ca_file: str = ""
    api_key: str | None = field(default=None, repr=False)

    @property
    def scheme(self) -> str:
        """The scheme of URLs."""
        return "https" if self.ca_file else "http"

    @cached_property
    def ssl_context(self) -> SSLContext | bool:
        """The context that verifies certificates; True for plain HTTP. Raises InvalidValueError."""
        return trusting("endpoint_ca_file", Path(self.ca_file))[0] if self.ca_file else True


class Scraper:
    """Scrapes each endpoint of a pool in a separate task."""

    def __init__(self, pool: Pool, config: ScrapeConfig, rng: Random) -> None:
        """rng: spreads the scrapes, so that those of all endpoints do not stay together."""
        self._rng = rng
        self._pool = pool
        self._config = config
        self._tasks: dict[Endpoint, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Scrape until cancelled; follow the pool's endpoints."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        context = self._config.ssl_context
        try:
            async with httpx.AsyncClient(
                verify=context,
                headers=_PLAIN,
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
                limits=limits,
                trust_env=False,
                timeout=_TIMEOUT_S,
            ) as client:
                while True:
                    self._follow(client)
                    await asyncio.sleep(self._config.interval_s)
        finally:
            for task in self._tasks.values():
                task.cancel()

    def _follow(self, client: httpx.AsyncClient) -> None:
        """Start and end the tasks of endpoints that have come and gone.

        Raises the error of a task that has failed, which is a defect of ours.
        """
        for task in self._tasks.values():
            if task.done():
                task.result()
        current = set(self._pool.endpoints)
        for gone in self._tasks.keys() - current:
            self._tasks.pop(gone).cancel()
        for new in current - self._tasks.keys():
            self._tasks[new] = asyncio.create_task(self._scrape_repeatedly(client, new))

    async def _scrape_repeatedly(self, client: httpx.AsyncClient, endpoint: Endpoint) -> None:
        scrape = EndpointScrape(client, endpoint, self._pool, self._config)
        while True:
            await scrape.once()
            interval_s = backoff_s(self._config.interval_s, endpoint.num_failed_scrapes)
            await asyncio.sleep(interval_s * self._rng.uniform(0.9, 1.1))


def backoff_s(interval_s: float, num_failed: int) -> float:
    """Return the seconds to the next scrape, after failed ones up to _MAX_BACKOFF_S."""
    return min(interval_s * (1 << min(num_failed, 8)), max(interval_s, _MAX_BACKOFF_S))


class EndpointScrape:
    """The scrapes of one endpoint."""

    def __init__(
        self, client: httpx.AsyncClient, endpoint: Endpoint, pool: Pool, config: ScrapeConfig
    ) -> None:
        self._client = client
        self._endpoint = endpoint
        self._clock = pool.clock
        self._config = config
        self._models_due_s = 0.0
        self._has_objective = pool.objective is not None
        names = metric_names(has_objective=self._has_objective)
        self._selection = httpx.QueryParams([("name[]", each) for each in names])

    async def once(self) -> None:
        """Scrape; an error counts for the endpoint."""
        endpoint, was_up = self._endpoint, self._endpoint.is_up
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                body = await self._get(self._config.path, params=self._selection)
                text = body.decode(errors="replace")
                report = parse_report(text, has_objective=self._has_objective)
                is_ready = report.is_ready
                if is_ready is None:
                    is_ready = await self._responds_ready()
            endpoint.apply(report, is_ready=is_ready, now_s=self._clock())
        except Exception as error:  # an endpoint is not trusted to send what can be parsed
            endpoint.fail_scrape(is_refused=isinstance(error, httpx.ConnectError))
            logger.debug("scrape of %s failed: %r", endpoint.address, error)
        if endpoint.is_up != was_up:
            logger.info("%s is %s", endpoint.address, "up" if endpoint.is_up else "down")
        is_listed = endpoint.last_report is not None and endpoint.last_report.models is not None
        if endpoint.is_up and not is_listed and self._clock() >= self._models_due_s:
            self._models_due_s = self._clock() + _MODELS_PERIOD_S
            await self._read_models()

    async def _responds_ready(self) -> bool:
        """Ask for readiness; a server without /ready is ready."""
        try:
            await self._get("/ready")
        except httpx.HTTPStatusError as error:
            return error.response.status_code == httpx.codes.NOT_FOUND
        return True

    async def _read_models(self) -> None:
        """Read the names of models and adapters; without an answer they are unknown."""
        key = self._config.api_key
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        models = adapters = None
        with suppress(httpx.HTTPError, TimeoutError, ValueError, TypeError, KeyError):
            async with asyncio.timeout(_TIMEOUT_S):
                cards = from_json(await self._get("/v1/models", headers=headers))["data"]
            cards = cards[:_MAX_MODELS]
            models = frozenset(str(each["id"]) for each in cards)
            adapters = frozenset(str(each["id"]) for each in cards if each.get("parent"))
        self._endpoint.models, self._endpoint.adapters = models, adapters or frozenset()

    async def _get(
        self,
        path: str,
        *,
        params: httpx.QueryParams | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """Return a body. Raises HTTPError, and ValueError for one that is too large."""
        request = self._client.stream("GET", self._url(path), params=params, headers=headers)
        async with request as response:
            return await read_body(response, _MAX_BYTES)

    def _url(self, path: str) -> str:
        return f"{self._config.scheme}://{self._endpoint.address}{path}"
