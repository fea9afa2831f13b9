"""The picker's own metrics, and their documentation."""

import re
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cluster.api.base.routing_hint import RoutingHint
from cluster.api.endpoint_picker.choice import PickRequest
from cluster.api.endpoint_picker.metrics import registry_of
from cluster.api.endpoint_picker.pool import Pool
from cluster.api.endpoint_picker.pool_scaler import PoolScaler
from cluster.api.endpoint_picker.reports import EndpointReport
from cluster.config.objective import Objective
from specdec.types.errors import NotReadyError

DOCUMENTATION = Path(__file__).parents[4] / "docs" / "metrics.md"


def families(pool, scaler=None):
    text = generate_latest(registry_of(pool, scaler)).decode()
    return {each.name: each for each in text_string_to_metric_families(text)}


def values(pool, name):
    samples = families(pool)[f"specdec:endpoint_picker_{name}"].samples
    return {tuple(each.labels.values()): each.value for each in samples}


def test_what_happened_is_counted_by_endpoint():
    pool = Pool(lambda: 10.0)
    pool.set_addresses(["a:1", "b:1"])
    pool.get("a:1").apply(EndpointReport(), is_ready=True, now_s=9.5)
    pool.get("b:1").fail_scrape(is_refused=True)
    for _ in range(2):
        pool.pick(PickRequest(RoutingHint.of((), b"x" * 1000, 1)))
    pool.get("a:1").respond(has_failed=True, now_s=10.0)
    for subset in ({"b:1"}, set()):
        with pytest.raises(NotReadyError):
            pool.pick(PickRequest(), subset)
    assert values(pool, "choices") == {("a:1", "load"): 1, ("a:1", "prefix"): 1}
    assert values(pool, "open_requests") == {("a:1",): 2, ("b:1",): 0}
    assert values(pool, "endpoint_up") == {("a:1",): 1, ("b:1",): 0}
    assert values(pool, "scrape_errors") == {("a:1",): 0, ("b:1",): 1}
    assert values(pool, "failed_responses") == {("a:1",): 1, ("b:1",): 0}
    assert values(pool, "report_age_seconds") == {("a:1",): 0.5}
    assert values(pool, "refusals") == {("429",): 0, ("503",): 2}


def test_an_endpoint_that_is_gone_has_no_series():
    pool = Pool(lambda: 0.0)
    pool.set_addresses(["a:1"])
    pool.set_addresses([])
    assert values(pool, "endpoint_up") == {}


def test_the_documentation_has_every_metric():
    _, _, after = DOCUMENTATION.read_text().partition("the prefix `specdec:endpoint_picker_`")
    section, _, _ = after.partition("\n## ")
    rows = re.findall(r"\| `(\w+)(?:\{\w+(?:, \w+)*\})?` \| (\w+) \|", section)
    documented = {f"specdec:endpoint_picker_{name}": kind for name, kind in rows}
    pool = Pool(lambda: 0.0)
    scaler = PoolScaler(pool, Objective(1.0, 1.0))
    assert "specdec:endpoint_picker_replicas_needed" not in families(pool, scaler)
    scaler.number = 3
    found = {
        each.name + ("_total" if each.type == "counter" else ""): each.type
        for each in families(pool, scaler).values()
    }
    assert documented == found
