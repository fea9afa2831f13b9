"""Tests of the default pod security, credentials and network policies."""

import itertools
import json
import re

import pytest
import yaml

from cluster.api.http.origin import AllowedHosts
from cluster.api.serve_proxy.http import MAX_BODY_VARIABLE
from cluster.app import application_settings
from cluster.config.serve_config import ServeConfig
from specdec.types.errors import UnknownHostError
from tests.k8s.rendering import (
    EXAMPLES,
    cluster,
    of_kind,
    only,
    pod_specs,
    ray_templates,
    render,
    serve_config,
)
from tests.k8s.value_sets import VALUE_SETS

CASES = {
    **{path.stem: yaml.safe_load(path.read_text()) for path in EXAMPLES},
    "defaults": {},
    "keda": VALUE_SETS["keda"],
    "sidecar": VALUE_SETS["sidecar"],
    "model images": VALUE_SETS["model images"],
    "endpoint picker": VALUE_SETS["endpoint picker"],
    "ray autoscaler": VALUE_SETS["ray autoscaler"],
}

# https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted
RESTRICTED_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


def containers(spec):
    return itertools.chain(spec.get("initContainers", []), spec["containers"])


@pytest.mark.parametrize("name", CASES)
def test_every_pod_passes_the_restricted_standard(name):
    objects = render(CASES[name])
    for spec in pod_specs(objects).values():
        assert not any(spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC"))
        for volume in spec.get("volumes", []):
            assert set(volume) - {"name"} <= RESTRICTED_VOLUMES
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        for container in containers(spec):
            check_restricted(container["securityContext"])
            assert not any("hostPort" in port for port in container.get("ports", []))
    options = cluster(objects).get("autoscalerOptions")
    if options:
        check_restricted(options["securityContext"])


def check_restricted(context):
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert context["runAsNonRoot"] is True
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert context["readOnlyRootFilesystem"] is True


@pytest.mark.parametrize("name", CASES)
def test_no_pod_mounts_a_service_account_token(name):
    objects = render(CASES[name])
    for spec in pod_specs(objects).values():
        assert spec["automountServiceAccountToken"] is False
    accounts = of_kind(objects, "ServiceAccount")
    assert {each["automountServiceAccountToken"] for each in accounts} == {False}


def test_only_the_autoscalers_container_mounts_a_token():
    objects = render(VALUE_SETS["ray autoscaler"])
    mounts = cluster(objects)["autoscalerOptions"]["volumeMounts"]
    assert {"name": "api-token", "readOnly": True}.items() <= mounts[1].items()
    head = ray_templates(objects)["head"]["spec"]
    assert any(volume["name"] == "api-token" for volume in head["volumes"])
    for container in head["containers"]:
        assert all(each["name"] != "api-token" for each in container["volumeMounts"])


def test_writable_paths_are_volumes():
    """The root file system is read-only, and every mount has its volume."""
    for values in CASES.values():
        for spec in pod_specs(render(values)).values():
            volumes = {volume["name"] for volume in spec.get("volumes", [])}
            for container in containers(spec):
                assert {each["name"] for each in container.get("volumeMounts", [])} <= volumes


def test_no_secret_is_in_an_environment_or_configuration():
    objects = render()
    keys = only(objects, "Secret", "-api-keys")["data"]
    token = only(objects, "Secret", "-admin-token")["data"]
    rest = json.dumps([each for each in objects if each["kind"] != "Secret"])
    for value in (*keys.values(), *token.values()):
        assert value not in rest
    for template in ray_templates(objects).values():
        assert "secretKeyRef" not in json.dumps(template)


def test_existing_secrets_are_not_created():
    objects = render(VALUE_SETS["existing secrets"])
    assert of_kind(objects, "Secret") == []
    for template in ray_templates(objects).values():
        named = {
            volume["secret"]["secretName"]
            for volume in template["spec"]["volumes"]
            if "secret" in volume
        }
        assert named == {"keys", "admin"}


def rays_policy(objects):
    """Return the network policy of Ray's pods."""
    return only(objects, "NetworkPolicy", "specdec")


def test_the_network_policy_selects_rays_pods_and_allows_few_ports():
    objects = render()
    policy = rays_policy(objects)["spec"]
    selected = policy["podSelector"]["matchLabels"].items()
    for template in ray_templates(objects).values():
        assert selected <= template["metadata"]["labels"].items()
    own, operator, clients = policy["ingress"]
    assert "ports" not in own
    assert {port["port"] for port in operator["ports"]} == {8000, 8265, 52365}
    assert {port["port"] for port in clients["ports"]} == {8000, 9000}


def test_dns_is_allowed_on_openshift_too():
    """Its servers listen on 5353; policies apply to the port of the pod, not to the Service's."""
    _, to_names, _ = rays_policy(render())["spec"]["egress"]
    ports = {(each["port"], each["protocol"]) for each in to_names["ports"]}
    assert ports == set(itertools.product((53, 5353), ("UDP", "TCP")))
    spaces = [each["namespaceSelector"]["matchLabels"].values() for each in to_names["to"]]
    assert [*itertools.chain(*spaces)] == ["kube-system", "openshift-dns"]


def test_an_empty_list_of_peers_allows_no_peer():
    """In Kubernetes, `from: []` allows every peer."""
    peers = {"clients": [], "prometheus": [], "operator": [], "dns": []}
    values = {"networkPolicy": peers, "monitoring": {"serviceMonitor": {"enabled": True}}}
    for policy in of_kind(render(values), "NetworkPolicy"):
        assert all(rule["from"] for rule in policy["spec"].get("ingress", []))
        assert all(rule["to"] for rule in policy["spec"].get("egress", []))


def test_prometheus_can_connect_only_to_the_scraped_port():
    def ingress(is_scraped):
        values = {"monitoring": {"serviceMonitor": {"enabled": is_scraped}}}
        return json.dumps(rays_policy(render(values))["spec"]["ingress"])

    assert '"app.kubernetes.io/name": "prometheus"' in ingress(True)
    assert "prometheus" not in ingress(False)


def test_with_a_sidecar_clients_cannot_connect_to_plain_text_ports():
    policy = rays_policy(render(VALUE_SETS["sidecar"]))["spec"]
    clients = policy["ingress"][2]
    assert {port["port"] for port in clients["ports"]} == {8443, 9443}


def test_offline_pods_have_no_egress_to_the_internet():
    def egress(values):
        return json.dumps([each["spec"] for each in of_kind(render(values), "NetworkPolicy")])

    assert "0.0.0.0/0" in egress({})
    for name in ("offline", "offline with the autoscaler"):
        assert "0.0.0.0/0" not in egress(VALUE_SETS[name])


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [
        ("", 443),
        ("https://hub.internal", 443),
        ("http://hub.internal", 80),
        ("http://hub.internal:8080/hub", 8080),
        ("https://[fd00::12]:8443", 8443),
    ],
)
def test_pods_can_connect_to_the_port_of_the_hub(endpoint, port):
    rules = rays_policy(render({"hub": {"endpoint": endpoint}}))["spec"]["egress"]
    assert [rule["ports"] for rule in rules if "ipBlock" in rule["to"][0]] == [[{"port": port}]]


@pytest.mark.parametrize("name", ["ipv6", "ipv6 with a picker"])
def test_pods_with_ipv6_alone_listen_on_it_and_may_connect_by_it(name):
    text = json.dumps(render(VALUE_SETS[name]))
    assert not re.search(r"0[.]0[.]0[.]0|127[.]0[.]0[.]1", text)
    assert '"cidr": "::/0"' in text
    assert serve_config(render(VALUE_SETS[name]))["http_options"]["host"] == "::"


@pytest.mark.parametrize(
    ("name", "host", "listener"),
    [
        ("sidecar", "127.0.0.1", {"address": "0.0.0.0"}),
        ("ipv6", "[::1]", {"address": "::", "ipv4_compat": True}),
    ],
)
def test_hooks_and_envoy_use_the_ip_family(name, host, listener):
    objects = render(VALUE_SETS[name])
    head, *_ = ray_templates(objects)["head"]["spec"]["containers"]
    hook = head["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert f"RAY_DASHBOARD_ADDRESS=http://{host}:8265;" in hook
    envoy = yaml.safe_load(only(objects, "ConfigMap", "-envoy")["data"]["envoy.yaml"])
    listeners = envoy["static_resources"]["listeners"]
    assert [each["address"]["socket_address"] for each in listeners] == [
        {**listener, "port_value": port} for port in (8443, 9443)
    ]


def test_only_the_head_with_autoscaler_can_connect_to_the_api_server():
    assert of_kind(render(), "NetworkPolicy", "-autoscaler") == []
    objects = render({**VALUE_SETS["ray autoscaler"], "networkPolicy": {"hubCidr": "192.0.2.0/24"}})
    policy = only(objects, "NetworkPolicy", "-autoscaler")["spec"]
    [rule] = policy["egress"]
    assert rule["to"] == [{"ipBlock": {"cidr": "0.0.0.0/0"}}]
    assert {port["port"] for port in rule["ports"]} == {443, 6443}
    selected = policy["podSelector"]["matchLabels"].items()
    matching = [
        name
        for name, each in ray_templates(objects).items()
        if selected <= each["metadata"]["labels"].items()
    ]
    assert matching == ["head"]
    assert "0.0.0.0/0" not in json.dumps(rays_policy(objects))


@pytest.mark.parametrize(
    ("name", "port", "peer"),
    [
        ("redis", 6379, {"podSelector": {}}),
        ("redis with a password", 6380, {"namespaceSelector": {"matchLabels": {"a": "b"}}}),
    ],
)
def test_rays_pods_can_connect_to_their_redis_only_where_there_is_one(name, port, peer):
    rule = {"to": [peer], "ports": [{"port": port}]}
    assert rule in rays_policy(render(VALUE_SETS[name]))["spec"]["egress"]
    assert rule not in rays_policy(render())["spec"]["egress"]


OPERATORS = (
    # helm-chart/kuberay-operator and ray-operator/config/manager of ray-project/kuberay
    {"app.kubernetes.io/name": "kuberay-operator", "app.kubernetes.io/instance": "kuberay"},
    {"app.kubernetes.io/name": "kuberay", "app.kubernetes.io/component": "kuberay-operator"},
)
A_RAY_POD = {
    "app.kubernetes.io/name": "kuberay",
    "app.kubernetes.io/created-by": "kuberay-operator",
}


def test_kuberays_operator_is_allowed_for_every_way_of_installation():
    _, operator, _ = rays_policy(render())["spec"]["ingress"]
    let_in = [peer["podSelector"]["matchLabels"].items() for peer in operator["from"]]
    for labels in OPERATORS:
        assert any(each <= labels.items() for each in let_in)
    assert not any(each <= A_RAY_POD.items() for each in let_in)


@pytest.mark.parametrize("name", ["defaults", "sidecar", "several-models"])
def test_the_test_pod_is_not_selected_as_rays_and_may_call_the_service(name):
    objects = render(CASES[name])
    labels = only(objects, "Pod", "-test")["metadata"]["labels"].items()
    policy = rays_policy(objects)["spec"]
    assert not policy["podSelector"]["matchLabels"].items() <= labels
    for service in of_kind(objects, "Service"):
        assert not service["spec"]["selector"].items() <= labels
    own = only(objects, "NetworkPolicy", "-test")["spec"]
    assert own["podSelector"]["matchLabels"].items() <= labels
    to_service, to_names = own["egress"]
    assert to_names in policy["egress"]
    [peer] = to_service["to"]
    assert peer["podSelector"] == policy["podSelector"]
    clients = policy["ingress"][2]
    assert to_service["ports"] == clients["ports"]
    let_in = [each["podSelector"] for each in clients["from"] if "namespaceSelector" not in each]
    assert any(each.get("matchLabels", {"": ""}).items() <= labels for each in let_in)


def test_the_test_pod_starts_without_a_ca_in_the_secret():
    [volume] = [
        each
        for each in only(render(VALUE_SETS["sidecar"]), "Pod", "-test")["spec"]["volumes"]
        if each["name"] == "tls"
    ]
    assert volume["secret"]["optional"] is True
    assert [each["key"] for each in volume["secret"]["items"]] == ["ca.crt"]


def test_ray_requires_its_token():
    assert cluster(render())["authOptions"] == {"mode": "token"}
    assert cluster(render(VALUE_SETS["ray secret"]))["authOptions"]["secretName"] == "ray"
    assert "authOptions" not in cluster(render(VALUE_SETS["ray open"]))


def test_every_default_can_be_overridden():
    values = {
        "security": {
            "podSecurityContext": {"runAsUser": 2000},
            "containerSecurityContext": {"readOnlyRootFilesystem": False},
        },
        "networkPolicy": {"enabled": False},
        "auth": {"apiKeys": {"enabled": False}, "adminToken": {"enabled": False}},
    }
    objects = render(values)
    assert of_kind(objects, "NetworkPolicy") == []
    for spec in pod_specs(objects).values():
        assert spec["securityContext"]["runAsUser"] == 2000
        for container in containers(spec):
            assert container["securityContext"]["readOnlyRootFilesystem"] is False


def test_ids_that_openshift_assigns_can_be_null_and_all_else_is_kept():
    default = pod_specs(render())
    ids = ("runAsUser", "runAsGroup", "fsGroup")
    values = {"security": {"podSecurityContext": dict.fromkeys(ids)}}
    for name, spec in pod_specs(render(values)).items():
        kept = default[name]["securityContext"].items()
        assert spec["securityContext"] == {key: each for key, each in kept if key not in ids}


NO_KEYS = VALUE_SETS["no keys"]
SERVICE_NAMES = [
    "demo-specdec-serve-svc",
    "demo-specdec-serve-svc.llm",
    "demo-specdec-serve-svc.llm.svc",
    "demo-specdec-serve-svc.llm.svc.cluster.local",
]


def hosts_of(values):
    """Return the hosts that the first application allows; None: the default."""
    [first, *_] = serve_config(render(values))["applications"]
    return first["args"].get("allowed_hosts")


def test_with_api_keys_every_host_name_is_allowed():
    assert hosts_of({}) is None
    assert hosts_of(VALUE_SETS["ingress"]) is None


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({}, []),
        (VALUE_SETS["ingress"], ["llm.example.com"]),
        (VALUE_SETS["gateway"], ["llm.example.com"]),
        (VALUE_SETS["sidecar by cert-manager"], ["llm.internal"]),
        ({"auth": {**NO_KEYS["auth"], "allowedHosts": ["*.example.org"]}}, ["a.example.org"]),
    ],
)
def test_without_api_keys_the_names_of_the_release_are_allowed(values, names):
    allowed = hosts_of({**NO_KEYS, **values})
    config = ServeConfig.from_sources(application_settings({"allowed_hosts": allowed}))
    hosts = AllowedHosts.of(config, has_keys=False)
    for name in (*SERVICE_NAMES, *names, "10.0.3.7"):  # a kubelet probes by address
        hosts.check(name)
    with pytest.raises(UnknownHostError):
        hosts.check("rebound.example")


def test_a_gateway_without_host_names_allows_every_name():
    gateway = {**VALUE_SETS["gateway"]["gatewayApi"], "hostnames": []}
    assert "*" in hosts_of({**NO_KEYS, "gatewayApi": gateway}).split(",")


@pytest.mark.parametrize(
    ("limits", "expected"), [((), None), ((None, 64), "64"), ((8, None), "16"), ((8, 4), "8")]
)
def test_the_proxies_accept_the_largest_body_of_a_model(limits, expected):
    models = [
        {"name": f"m{index}", "model": "org/m", "settings": {"http_max_body_mib": limit}}
        if limit
        else {"name": f"m{index}", "model": "org/m"}
        for index, limit in enumerate(limits or (None,))
    ]
    for template in ray_templates(render({"models": models})).values():
        env = {each["name"]: each.get("value") for each in template["spec"]["containers"][0]["env"]}
        assert env.get(MAX_BODY_VARIABLE) == expected
