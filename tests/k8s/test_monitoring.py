"""Tests of the scraping configuration, and of the queries of KEDA."""

import re

import promql_parser
import pytest
import yaml

from cluster.observability.metric_definitions import (
    CONNECTION_METRICS,
    FLEET_METRICS,
    REPLICA_METRICS,
)
from tests.k8s.rendering import CHART, example, of_kind, only, ray_templates, render
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


def test_all_metrics_are_scraped_once_and_the_control_plane_of_each_model():
    found = endpoints({**VALUE_SETS["monitoring of two"]})
    assert [each["path"] for each in found] == [
        "/metrics",
        "/metrics/replica",
        "/second/metrics/replica",
    ]


def test_the_job_names_match_those_of_the_alerts():
    found = endpoints(VALUE_SETS["monitoring"])
    jobs = [each["relabelings"][0]["replacement"] for each in found]
    assert jobs == [FLEET_JOB, REPLICA_JOB]


def test_only_link_metrics_are_kept_from_the_endpoints_of_single_models():
    [kept] = endpoints(VALUE_SETS["monitoring"])[1]["metricRelabelings"]
    assert kept["action"] == "keep"
    assert {name for name in EXPOSED if re.fullmatch(kept["regex"], name)} == {
        each.exposed_name for each in CONNECTION_METRICS
    }


def test_only_the_head_is_scraped():
    """Every pod of the clients' Service would export the metrics of the whole fleet again."""
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
def test_keda_queries_existing_metrics_of_the_served_models(name):
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


def test_keda_scales_by_the_models_that_run_on_the_groups_device():
    for group, models in (("target", "chat|code"), ("cpu", "classify")):
        values = example("several-models")
        values["keda"]["group"] = group
        [scaled] = of_kind(render(values), "ScaledObject")
        for trigger in scaled["spec"]["triggers"]:
            [selector] = selectors(trigger["metadata"]["query"])
            found = {each.name: each.value for each in selector.matchers.matchers}
            own = {"namespace": "llm", "service": "demo-specdec-metrics"}
            assert found == {"model_name": models, **own}
    del values["monitoring"]["serviceMonitor"]
    [scaled] = of_kind(render(values), "ScaledObject")
    assert "service=" not in str(scaled["spec"]["triggers"])


def test_placeholders_exist_and_request_the_resources_of_a_worker():
    objects = render(VALUE_SETS["keda"])
    target = only(objects, "ScaledObject")["spec"]["scaleTargetRef"]["name"]
    placeholder = only(objects, "Deployment", target)["spec"]["template"]["spec"]
    worker = ray_templates(objects)["target"]["spec"]
    assert placeholder["containers"][0]["resources"] == worker["containers"][0]["resources"]
    assert placeholder["priorityClassName"] == KEDA["priorityClassName"]
    assert "replicas" not in only(objects, "Deployment", target)["spec"]


def test_a_release_is_missed_even_if_others_are_scraped():
    rule = only(render(VALUE_SETS["monitoring"]), "PrometheusRule")["spec"]["groups"][0]["rules"]
    [expr] = [each["expr"] for each in rule if each["alert"] == "SpecdecNotScraped"]
    found = [{each.name: each.value for each in of.matchers.matchers} for of in selectors(expr)]
    own = {"namespace": "llm", "service": "demo-specdec-metrics"}
    assert found == [{**own, "job": FLEET_JOB}, {**own, "job": REPLICA_JOB}]


def test_other_rules_are_those_of_deploy_and_suit_scrape_jobs_of_users():
    """Without the ServiceMonitor no target may have the job names of SpecdecNotScraped."""
    spec = yaml.safe_load((CHART / "files" / "rules.yaml").read_text())
    [group] = spec["groups"]
    group["rules"] = [each for each in group["rules"] if each["alert"] != "SpecdecNotScraped"]
    alone = render({"monitoring": {"rules": {"enabled": True}}})
    assert only(alone, "PrometheusRule")["spec"] == spec
    [rendered] = only(render(VALUE_SETS["monitoring"]), "PrometheusRule")["spec"]["groups"]
    assert [each for each in rendered["rules"] if each in group["rules"]] == group["rules"]
    assert len(rendered["rules"]) == len(group["rules"]) + 1
