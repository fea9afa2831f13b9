"""The InferencePool and its endpoint picker: they fit each other, the pods and the command."""

import re

import pytest
from click.testing import CliRunner

from cluster.api.endpoint_picker import server
from cluster.api.endpoint_picker.kubernetes import SERVICE_ACCOUNT
from cluster.api.endpoint_picker.server import LIVENESS, READINESS
from cluster.cli.main import main
from cluster.config.objective import Objective
from specdec.types.errors import InvalidValueError
from tests.k8s.rendering import of_kind, only, pod_specs, ray_templates, render
from tests.k8s.value_sets import CLAIM, FIRST, SECOND, VALUE_SETS, with_model

ALONE = VALUE_SETS["endpoint picker"]
PICKER = {"enabled": True}
OF_SEVERAL = VALUE_SETS["endpoint picker of several releases"]
SCALED = OF_SEVERAL["endpointPicker"]


def picker(objects):
    """Return the pod template of the picker."""
    return only(objects, "Deployment", "-picker")["spec"]["template"]


def test_nothing_of_it_is_created_by_default():
    objects = render()
    assert not of_kind(objects, "InferencePool")
    assert not of_kind(objects, "Role")
    assert not of_kind(objects, "Deployment")


@pytest.mark.parametrize("values", [ALONE, OF_SEVERAL])
def test_the_pool_selects_the_pods_with_replicas(values):
    objects = render(values)
    spec = only(objects, "InferencePool")["spec"]
    templates = ray_templates(objects)
    selected = {
        name
        for name, template in templates.items()
        if spec["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    }
    assert selected == {"target"}
    ports = templates["target"]["spec"]["containers"][0]["ports"]
    assert {"name": "serve", "containerPort": spec["targetPorts"][0]["number"]} in ports


def test_the_pool_refers_to_the_pickers_service():
    objects = render(OF_SEVERAL)
    reference = only(objects, "InferencePool")["spec"]["endpointPickerRef"]
    assert reference["failureMode"] == "FailOpen"
    service = only(objects, "Service", "-picker")
    port, _ = service["spec"]["ports"]
    assert reference["name"] == service["metadata"]["name"]
    assert reference["port"]["number"] == port["port"]
    pod = picker(objects)
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    [container] = pod["spec"]["containers"]
    assert {"name": port["targetPort"], "containerPort": 9002} in container["ports"]
    rays = only(objects, "NetworkPolicy", "specdec")["spec"]["podSelector"]["matchLabels"]
    assert not rays.items() <= pod["metadata"]["labels"].items(), "it is no pod of Ray"


@pytest.mark.parametrize("values", [ALONE, OF_SEVERAL])
def test_the_command_accepts_its_arguments(values, monkeypatch):
    configs = []

    async def serve(config):
        configs.append(config)

    monkeypatch.setattr(server, "serve", serve)
    objects = render(values)
    [container] = picker(objects)["spec"]["containers"]
    done = CliRunner().invoke(main, [*container["command"][1:], *container["args"]])
    assert done.exit_code == 0, done.output
    [config] = configs
    given = values["endpointPicker"]
    labels = only(objects, "InferencePool")["spec"]["selector"]["matchLabels"]
    assert dict(each.split("=") for each in config.pod_selector.split(",")) == labels
    assert config.tls_self_signed == given.get("selfSignedTls", True)
    assert config.max_waiting == given.get("maxWaiting")
    assert config.slo == given.get("slo")
    assert config.scrape.interval_s == given.get("scrapeIntervalMs", 100) / 1000
    assert picker(objects)["spec"]["terminationGracePeriodSeconds"] > config.drain_timeout_s + 20
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    expected = {"ext-proc": config.port, "health": config.health_port}
    assert ports == {**expected, "metrics": config.metrics_port}
    for probe, name in (("livenessProbe", LIVENESS), ("readinessProbe", READINESS)):
        assert container[probe]["grpc"] == {"port": config.health_port, "service": name}


def test_it_may_read_pods_of_its_namespace_and_nothing_else():
    objects = render(ALONE)
    role = only(objects, "Role")
    verbs = ["list", "watch"]
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": verbs}]
    binding = only(objects, "RoleBinding")
    account = only(objects, "ServiceAccount", "-picker")["metadata"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    [subject] = binding["subjects"]
    assert (subject["name"], subject["namespace"]) == (account["name"], account["namespace"])
    spec = picker(objects)["spec"]
    assert spec["serviceAccountName"] == account["name"]
    mounts = spec["containers"][0]["volumeMounts"]
    assert {"name": "api-token", "mountPath": str(SERVICE_ACCOUNT), "readOnly": True} in mounts
    others = {name: each for name, each in pod_specs(objects).items() if each != spec}
    assert not any(
        volume["name"] == "api-token" for each in others.values() for volume in each["volumes"]
    )


def test_network_policies_let_the_picker_scrape_and_the_gateway_call_it():
    values = {**ALONE, "networkPolicy": {"clients": [{"namespaceSelector": {"matchLabels": {}}}]}}
    objects = render(values)
    labels = picker(objects)["metadata"]["labels"]
    clients = only(objects, "NetworkPolicy", "specdec")["spec"]["ingress"][-1]
    assert {"podSelector": {"matchLabels": labels}} in clients["from"]
    own = only(objects, "NetworkPolicy", "-picker")["spec"]
    assert own["podSelector"]["matchLabels"] == labels
    [gateway] = own["ingress"]
    assert (gateway["from"], gateway["ports"]) == (
        values["networkPolicy"]["clients"],
        [{"port": 9002}],
    )
    to_pods, to_api = own["egress"]
    assert to_pods["ports"] == [{"port": 8000}]
    assert {each["port"] for each in to_api["ports"]} == {443, 6443}
    several = only(render(OF_SEVERAL), "NetworkPolicy", "-picker")["spec"]["ingress"]
    assert [rule["ports"] for rule in several] == [[{"port": port}] for port in (9002, 9090, 9002)]
    assert several[-1]["from"] == [
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "keda"}},
            "podSelector": {"matchLabels": {"app": "keda-operator"}},
        }
    ]
    closed = render({**ALONE, "networkPolicy": {"clients": []}})
    assert "ingress" not in only(closed, "NetworkPolicy", "-picker")["spec"], "no peer is allowed"


def test_a_release_without_the_picker_admits_that_of_its_pool():
    values = {"endpointPicker": {"selector": OF_SEVERAL["endpointPicker"]["selector"]}}
    assert not of_kind(render(values), "InferencePool")
    labels = picker(render(OF_SEVERAL))["metadata"]["labels"]
    for each in (values, OF_SEVERAL):
        rules = only(render(each), "NetworkPolicy", "specdec")["spec"]["ingress"]
        [clients] = [rule["from"] for rule in rules if {"port": 9000} in rule.get("ports", [])]
        selectors = [peer.get("podSelector", {}).get("matchLabels") for peer in clients]
        assert any(selector and selector.items() <= labels.items() for selector in selectors)


def test_prometheus_scrapes_the_picker():
    values = {**ALONE, "monitoring": {"serviceMonitor": {"enabled": True}}}
    monitors = of_kind(render(values), "ServiceMonitor")
    [monitor] = [each for each in monitors if each["metadata"]["name"].endswith("-picker")]
    service = only(render(values), "Service", "-picker")
    assert (
        monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    )
    ports = {each["name"]: each["targetPort"] for each in service["spec"]["ports"]}
    [endpoint] = monitor["spec"]["endpoints"]
    assert ports[endpoint["port"]] == "metrics"
    assert not [each for each in of_kind(render(ALONE), "ServiceMonitor") if "picker" in str(each)]


@pytest.mark.parametrize("is_encrypted", [True, False])
def test_keda_scales_the_pool_by_the_pickers_number(is_encrypted):
    given = {**OF_SEVERAL["endpointPicker"], "selfSignedTls": is_encrypted}
    objects = render({**OF_SEVERAL, "endpointPicker": given})
    spec = only(objects, "ScaledObject")["spec"]
    assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "chat"}
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (1, 8)
    [trigger] = spec["triggers"]
    assert trigger["type"] == "external"
    service = only(objects, "Service", "-picker")
    address, _, port = trigger["metadata"]["scalerAddress"].partition(":")
    assert address == f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc"
    assert int(port) == service["spec"]["ports"][0]["port"]
    assert ("enableTLS" in trigger["metadata"]) == is_encrypted
    assert not of_kind(render(ALONE), "ScaledObject")


def test_numbers_of_replicas_have_no_effect_without_keda():
    given = {**ALONE["endpointPicker"], "scaledObject": {"minReplicas": 9}}
    assert not of_kind(render({**ALONE, "endpointPicker": given}), "ScaledObject")


@pytest.mark.parametrize(
    "slo",
    [
        *("ttft:2000 tpot:40", "ttft:0.5 tpot:40", "ttft:10.5 tpot:007", "ttft:0 tpot:40"),
        *("ttft:2000 tpot:0.00", "ttft:1.2.3 tpot:4", "ttft:. tpot:4", "ttft:2000", "ttft: tpot:1"),
    ],
)
def test_the_schema_accepts_the_objectives_that_the_picker_accepts(slo):
    try:
        Objective.parse(slo)
    except InvalidValueError:
        with pytest.raises(Exception, match="slo"):
            render({**ALONE, "endpointPicker": {**PICKER, "slo": slo}})
    else:
        assert f"--slo={slo}" in str(render({**ALONE, "endpointPicker": {**PICKER, "slo": slo}}))


def test_the_route_leads_to_the_pool():
    objects = render(ALONE)
    [backend] = only(objects, "HTTPRoute")["spec"]["rules"][0]["backendRefs"]
    pool = only(objects, "InferencePool")
    assert backend == {
        "group": pool["apiVersion"].split("/")[0],
        "kind": "InferencePool",
        "name": pool["metadata"]["name"],
    }


WRONG = {
    "a choice of Serve after that of the picker": (
        {**with_model(replicas=2), "endpointPicker": PICKER},
        "Ray Serve's proxies choose among the replicas of a release",
    ),
    "an autoscaled model": (
        {**with_model(autoscaling={"enabled": True}), "endpointPicker": PICKER},
        "one model with one replica",
    ),
    "two models": (
        {"models": [FIRST, SECOND], "endpointPicker": PICKER},
        "one model with one replica",
    ),
    "TLS in the pods": (
        {"tls": {"mode": "sidecar", "secretName": "cert"}, "endpointPicker": PICKER},
        "write tls.mode: gateway or none",
    ),
    "two groups": (
        {"workerGroups": {"spot": {"role": "any"}}, "endpointPicker": PICKER},
        "endpointPicker.selector: required with 2 worker groups",
    ),
    "KEDA without an objective": (
        {"endpointPicker": {**PICKER, "scaledObject": {"enabled": True, "name": "chat"}}},
        "and endpointPicker.slo, such as ttft:2000 tpot:40",
    ),
    "fewer replicas at most than at least": (
        {
            "endpointPicker": {
                **SCALED,
                "scaledObject": {**SCALED["scaledObject"], "minReplicas": 9},
            }
        },
        "endpointPicker.scaledObject.minReplicas: 9 must be at most maxReplicas (8); lower it",
    ),
    "an API server at any address": (
        {
            **with_model(model="/models/a"),
            "hub": {"offline": True},
            "storage": {"models": {**CLAIM, "existingClaim": "weights"}},
            "endpointPicker": PICKER,
        },
        "networkPolicy.apiServerCidr",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_values_that_do_not_go_together_are_rejected(name):
    values, message = WRONG[name]
    with pytest.raises(Exception, match=re.escape(message)):
        render(values)
