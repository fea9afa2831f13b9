"""Scrapes of real HTTP servers: load, readiness, models, and servers that misbehave."""

import asyncio

import pytest

from cluster.api.endpoint_picker import scraper
from cluster.api.endpoint_picker.certificates import self_signed
from cluster.api.endpoint_picker.scraper import ScrapeConfig
from cluster.api.endpoint_picker.server import PickerConfig
from tests.cluster.api.endpoint_picker.fake_replica import (
    INTERVAL_S,
    FakeReplica,
    picking,
    running_picker,
)
from tests.waiting import eventually

OWN = "specdec:num_requests_running 0\nspecdec:replica_ready {}\n"


async def test_a_report_has_the_load_and_the_models():
    replica = FakeReplica(waiting=7, models=("m", "sql"))
    async with picking(replica) as picker:
        [endpoint] = picker.server.pool.endpoints
        await eventually(lambda: endpoint.models == {"m", "sql"})
        assert endpoint.adapters == {"sql"}
        assert endpoint.last_report.num_waiting == 7
    path, query, headers = replica.requests[0]
    assert path == "/metrics/replica"
    assert "name%5B%5D=vllm%3Anum_requests_waiting" in query
    assert headers["accept-encoding"] == "identity", "bounds are those of the bytes received"


@pytest.mark.parametrize("slo", [None, "ttft:2000 tpot:40"])
async def test_metrics_for_an_objective_are_read_under_one_only(slo):
    text = "vllm:num_requests_running 0\nvllm:requests_received_total 5\n"
    async with picking(replica := FakeReplica(metrics=text), slo=slo) as picker:
        [endpoint] = picker.server.pool.endpoints
        totals = endpoint.last_report.totals
        assert (totals and totals.num_requests) == (None if slo is None else 5)
    assert ("requests_received_total" in replica.requests[0][1]) == (slo is not None)


@pytest.mark.parametrize(("status", "is_up"), [(200, True), (503, False), (404, True)])
async def test_readiness_is_asked_for_where_the_metrics_lack_it(status, is_up):
    replica = FakeReplica(ready_status=status)
    async with replica.running():
        config = PickerConfig(endpoints=(replica.address,), scrape=ScrapeConfig(INTERVAL_S))
        async with running_picker(config) as picker:
            await eventually(lambda: picker.server.pool.is_synced)
            [endpoint] = picker.server.pool.endpoints
            assert (endpoint.is_up, endpoint.scrape_errors) == (is_up, 0)


async def test_readiness_in_the_metrics_needs_no_other_request():
    replica = FakeReplica(metrics=OWN.format(1), ready_status=503)
    async with picking(replica) as picker:
        replica.metrics = OWN.format(0)
        await picker.until_up()
    assert "/ready" not in {path for path, _, _ in replica.requests}


async def test_a_dead_server_is_down_at_once_and_up_again_when_it_returns():
    replica = FakeReplica()
    async with picking(FakeReplica()) as picker:
        [up] = picker.server.pool.endpoints
        async with replica.running():
            picker.server.pool.set_addresses([up.address, replica.address])
            await picker.until_up(up.address, replica.address)
        await picker.until_up(up.address)
        port = int(replica.address.split(":")[1])
        async with replica.running(port=port):
            await picker.until_up(up.address, replica.address)


@pytest.mark.parametrize("metrics", ["", "<html>", "\0", "x" * 2**22])
async def test_a_server_without_usable_metrics_goes_down(metrics):
    replica = FakeReplica()
    async with picking(replica) as picker:
        replica.metrics = metrics
        await picker.until_up()
        [endpoint] = picker.server.pool.endpoints
        assert endpoint.scrape_errors >= 3


async def test_whatever_a_parser_raises_is_a_failed_scrape(monkeypatch):
    """The text of a server must not end the picker."""

    def parse(text, **_):
        raise OverflowError

    async with picking(FakeReplica()) as picker:
        monkeypatch.setattr(scraper, "parse_report", parse)
        await picker.until_up()
        monkeypatch.undo()
        await picker.until_up(*(each.address for each in picker.server.pool.endpoints))


@pytest.mark.parametrize(
    ("interval_s", "num_failed", "expected"),
    [(0.1, 0, 0.1), (0.1, 2, 0.4), (0.1, 9, 1.0), (5.0, 0, 5.0), (5.0, 9, 5.0)],
)
def test_failed_scrapes_are_less_frequent_but_not_less_than_configured(
    interval_s, num_failed, expected
):
    assert scraper.backoff_s(interval_s, num_failed) == expected


async def test_cookies_are_not_stored():
    replica = FakeReplica(set_cookie="id=1")
    async with picking(replica):
        await eventually(lambda: len(replica.requests) > 4)
    assert not any("cookie" in headers for _, _, headers in replica.requests)


async def test_metrics_with_names_make_a_list_of_models_unnecessary():
    text = 'specdec:num_requests_running{model_name="m"} 0\nspecdec:replica_ready 1\n'
    text += 'specdec:lora_requests_info{model_name="m",max_lora="2",loaded_lora_adapters="sql"} 1\n'
    replica = FakeReplica(metrics=text, models=None)
    async with picking(replica) as picker:
        [endpoint] = picker.server.pool.endpoints
        assert (endpoint.models, endpoint.adapters) == ({"m", "sql"}, {"sql"})
    assert "/v1/models" not in {path for path, _, _ in replica.requests}


async def test_a_server_that_hangs_goes_down(monkeypatch):
    monkeypatch.setattr(scraper, "_TIMEOUT_S", 0.05)
    replica = FakeReplica()
    async with picking(replica) as picker:
        replica.delay_s = 1.0
        await picker.until_up()
        replica.delay_s = 0.0
        await picker.until_up(replica.address)


async def test_the_models_are_unknown_where_they_are_not_readable(monkeypatch):
    monkeypatch.setattr(scraper, "_MODELS_PERIOD_S", 0.0)
    replica = FakeReplica()
    async with picking(replica, scrape=ScrapeConfig(INTERVAL_S, api_key="secret")) as picker:
        [endpoint] = picker.server.pool.endpoints
        await eventually(lambda: endpoint.models == {"m"})
        replica.models = None
        await eventually(lambda: endpoint.models is None)
    sent = {(path, headers.get("authorization")) for path, _, headers in replica.requests}
    assert ("/v1/models", "Bearer secret") in sent
    assert ("/metrics/replica", None) in sent, "the key is sent where it is needed only"


async def test_endpoints_with_tls_are_verified(tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    for path, data in zip((key, certificate), self_signed(), strict=True):
        path.write_bytes(data)
    replica = FakeReplica()
    async with replica.running(ssl_keyfile=key, ssl_certfile=certificate):
        for ca, is_up in ((str(certificate), True), ("", False)):
            scrape = ScrapeConfig(INTERVAL_S, ca_file=ca)
            async with running_picker(
                PickerConfig(endpoints=(replica.address,), scrape=scrape)
            ) as picker:
                await eventually(lambda picker=picker: picker.server.pool.is_synced)
                [endpoint] = picker.server.pool.endpoints
                assert endpoint.is_up == is_up


async def test_scrapes_of_an_endpoint_that_has_gone_end():
    replica = FakeReplica()
    async with picking(replica) as picker:
        picker.server.pool.set_addresses([])
        await asyncio.sleep(5 * INTERVAL_S)
        count = len(replica.requests)
        await asyncio.sleep(5 * INTERVAL_S)
        assert len(replica.requests) == count
