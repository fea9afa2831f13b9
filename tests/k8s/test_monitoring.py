"""What is scraped, and what KEDA asks Prometheus."""

import re

import promql_parser
import pytest

from cluster.observability.metric_definitions import (
    CONNECTION_METRICS,
    FLEET_METRICS,
    REPLICA_METRICS,
)
from tests.k8s.rendering import example, of_kind, only, ray_templates, render
from tests.k8s.value_sets import FIRST, KEDA, SECOND, VALUE_SETS
from tools.monitoring.prometheus_files import FLEET_JOB, REPLICA_JOB

EXPOSED = {
    name
    for each in (*REPLICA_METRICS, *FLEET_METRICS, *CONNECTION_METRICS)
    for name in (each.exposed_name, f"{each.exposed_name}_bucket")
}


def selectors(query):
    found = []

    def visit(node):
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)

    promql_parser.walk(promql_parser.parse(query), visit)
    return found


def endpoints(values):
    return only(render(values), "ServiceMonitor")["spec"]["endpoints"]


def test_metrics_of_all_models_are_scraped_once_and_each_control_plane_is_looked_at():
    found = endpoints({**VALUE_SETS["monitoring of two"]})
    assert [each["path"] for each in found] == [
        "/metrics",
        "/metrics/replica",
        "/second/metrics/replica",
    ]


def test_the_jobs_are_called_as_the_alerts_call_them():
    found = endpoints(VALUE_SETS["monitoring"])
    jobs = [each["relabelings"][0]["replacement"] for each in found]
    assert jobs == [FLEET_JOB, REPLICA_JOB]


def test_of_one_replica_only_what_the_fleet_does_not_tell_is_kept():
    [kept] = endpoints(VALUE_SETS["monitoring"])[1]["metricRelabelings"]
    assert kept["action"] == "keep"
    assert {name for name in EXPOSED if re.fullmatch(kept["regex"], name)} == {
        each.exposed_name for each in CONNECTION_METRICS
    }


def test_the_monitored_service_is_the_heads():
    """Every pod behind the other Service would tell of the whole fleet again."""
    objects = render(VALUE_SETS["monitoring"])
    service = only(objects, "Service", "-metrics")
    wanted = only(objects, "ServiceMonitor")["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= service["metadata"]["labels"].items()
    selected = service["spec"]["selector"].items()
    templates = ray_templates(objects)
    matching = [
        name for name, each in templates.items() if selected <= each["metadata"]["labels"].items()
    ]
    assert matching == ["head"]


@pytest.mark.parametrize("name", ["chat", "Org/Third.1"])
def test_keda_asks_for_metrics_that_there_are_of_the_models_that_are_served(name):
    values = {"models": [{**FIRST, "name": name}, SECOND], "keda": KEDA}
    [scaled] = of_kind(render(values), "ScaledObject")
    queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    assert len(queries) == 2
    for query in queries:
        [selector] = selectors(query)
        assert selector.name in EXPOSED
        [matcher] = selector.matchers.matchers
        assert re.fullmatch(matcher.value, name)
        assert re.fullmatch(matcher.value, "second")
        assert not re.fullmatch(matcher.value, "Org/ThirdX1")


def test_warm_nodes_are_for_the_models_that_run_on_what_they_have():
    for group, models in (("target", "chat|code"), ("cpu", "classify")):
        values = example("several-models")
        values["keda"]["group"] = group
        [scaled] = of_kind(render(values), "ScaledObject")
        for trigger in scaled["spec"]["triggers"]:
            [selector] = selectors(trigger["metadata"]["query"])
            assert [each.value for each in selector.matchers.matchers] == [models]


def test_what_keda_scales_is_there_and_takes_what_a_worker_takes():
    objects = render(VALUE_SETS["keda"])
    target = only(objects, "ScaledObject")["spec"]["scaleTargetRef"]["name"]
    placeholder = only(objects, "Deployment", target)["spec"]["template"]["spec"]
    worker = ray_templates(objects)["target"]["spec"]
    assert placeholder["containers"][0]["resources"] == worker["containers"][0]["resources"]
    assert placeholder["priorityClassName"] == KEDA["priorityClassName"]
    assert "replicas" not in only(objects, "Deployment", target)["spec"]
