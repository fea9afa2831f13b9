"""The Router as a Serve deployment."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest

from cluster.api.ingress import EmbeddedIngress, IngressFailedError
from cluster.serve import deployment
from cluster.serve.deployment import RouterReplica
from specdec.types.errors import NotReadyError, TargetFailedError
from specdec.types.reports.fleet import DRAINING
from tests.cluster.admin_service import operator_service
from tests.cluster.replica_on_hash_target import REPLICA, running_replica


async def test_a_replica_can_be_deleted_before_its_constructor_has_returned():
    incomplete = SimpleNamespace(_is_complete=RouterReplica._is_complete)
    await RouterReplica.__del__(incomplete)


class Replica:
    """A RouterReplica that Python does not finalize, too."""

    _is_complete = True
    check_health = RouterReplica.check_health
    drain = RouterReplica.drain
    shut_down = RouterReplica.__del__
    _shut_down_when_stopped = RouterReplica._shut_down_when_stopped
    _wait_for_stop = RouterReplica._wait_for_stop
    _calls_end_within = RouterReplica._calls_end_within
    _close = RouterReplica._close


@pytest.mark.parametrize("failed", ["model", "server", None])
async def test_a_replica_whose_model_or_server_has_failed_is_replaced(failed):
    replica, errors = (
        Replica(),
        {"model": TargetFailedError("x"), "server": IngressFailedError("x")},
    )
    check_models = AsyncMock(side_effect=errors.get(failed) if failed == "model" else None)
    replica.router = SimpleNamespace(check_models=check_models, is_ready=True)
    replica._ingress, replica._has_failed = Mock(spec=EmbeddedIngress), False
    replica._ingress.check.side_effect = errors["server"] if failed == "server" else None
    if failed is None:
        await replica.check_health()
    else:
        with pytest.raises(type(errors[failed])):
            await replica.check_health()
    assert replica._has_failed is (failed is not None)
    replica._ingress.set_ready.assert_awaited_once_with(True)


@asynccontextmanager
async def replica_of_serve(model, state_dir, **settings):
    """A Replica on a Router without workers, and its ControlPlane."""
    async with running_replica(model, state_dir) as running:
        running.router.config = replace(running.router.config, **settings)
        own = Replica()
        own.router, own.operators = running.router, operator_service(running.link)
        own._ingress, own._replica_id, own._has_failed = None, REPLICA, False
        own._calls_have_ended = asyncio.Event()
        own._stopping = asyncio.create_task(own._shut_down_when_stopped())
        running.link.start()
        while not (await running.plane.plane.status()).replicas:
            await asyncio.sleep(0.01)
        yield own, running.plane.plane


async def test_a_replica_that_serve_stops_does_not_wait_for_watches(
    tiny_model_dir, tmp_path, monkeypatch
):
    """Serve waits for calls that are open, and then kills the process."""
    stops = []
    monkeypatch.setattr(deployment, "is_replica_stopping", lambda: bool(stops))
    monkeypatch.setattr(deployment, "_STALE_ROUTES_S", 0.2)
    async with replica_of_serve(tiny_model_dir, tmp_path) as (replica, plane):
        watch = replica.operators.stats_streams.watch(60.0)
        await anext(watch)
        stops.append(True)
        with pytest.raises(NotReadyError, match="draining"):
            await anext(watch)
        assert replica.router.is_ready  # for requests that were on their way to it
        await replica._stopping
        assert replica.router.why_not_ready == DRAINING
        assert (status := await plane.status()).replicas == ()
        assert status.num_lost_replicas == 0


@pytest.mark.parametrize("error", [None, AttributeError("a private name of Ray")])
async def test_a_replica_without_calls_ends_when_serve_deletes_it(
    tiny_model_dir, tmp_path, monkeypatch, caplog, error
):
    """Also where it cannot read whether Serve stops it."""
    polls = Mock(return_value=False, side_effect=error)
    monkeypatch.setattr(deployment, "is_replica_stopping", polls)
    monkeypatch.setattr(deployment, "_STOP_POLL_S", 0.01)
    async with replica_of_serve(tiny_model_dir, tmp_path, drain_timeout_s=60.0) as (replica, plane):
        while polls.call_count < (1 if error else 3):
            await asyncio.sleep(0.01)
        watch = replica.operators.stats_streams.watch(60.0)
        await anext(watch)  # it has not begun to drain
        await replica.shut_down()
        assert (await plane.status()).replicas == ()
    assert ("cannot read whether Serve stops" in caplog.text) == (error is not None)


async def test_a_replica_that_cannot_drain_is_closed(tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(deployment, "is_replica_stopping", lambda: False)
    async with replica_of_serve(tiny_model_dir, tmp_path) as (replica, plane):
        replica.drain, replica._ingress = AsyncMock(side_effect=OSError), AsyncMock()
        replica._ingress.close.side_effect = OSError
        with pytest.raises(OSError):
            await replica.shut_down()
        replica._ingress.close.assert_awaited_once()
        assert (await plane.status()).replicas == ()
