"""What the pods may do, and who may reach them, unless values say otherwise."""

import itertools
import json

import pytest
import yaml

from tests.k8s.rendering import (
    EXAMPLES,
    cluster,
    of_kind,
    only,
    pod_specs,
    ray_templates,
    render,
)
from tests.k8s.value_sets import VALUE_SETS

CASES = {
    **{path.stem: yaml.safe_load(path.read_text()) for path in EXAMPLES},
    "defaults": {},
    "keda": VALUE_SETS["keda"],
    "sidecar": VALUE_SETS["sidecar"],
    "model images": VALUE_SETS["model images"],
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
def test_no_pod_is_given_a_token_for_kubernetes(name):
    objects = render(CASES[name])
    for spec in pod_specs(objects).values():
        assert spec["automountServiceAccountToken"] is False
    assert only(objects, "ServiceAccount")["automountServiceAccountToken"] is False


def test_only_the_autoscalers_container_mounts_one():
    objects = render(VALUE_SETS["ray autoscaler"])
    mounts = cluster(objects)["autoscalerOptions"]["volumeMounts"]
    assert {"name": "api-token", "readOnly": True}.items() <= mounts[1].items()
    head = ray_templates(objects)["head"]["spec"]
    assert any(volume["name"] == "api-token" for volume in head["volumes"])
    for container in head["containers"]:
        assert all(each["name"] != "api-token" for each in container["volumeMounts"])


def test_whatever_is_written_to_is_a_volume():
    """With a read-only root nothing else could be; every mount has its volume."""
    for values in CASES.values():
        for spec in pod_specs(render(values)).values():
            volumes = {volume["name"] for volume in spec.get("volumes", [])}
            for container in containers(spec):
                assert {each["name"] for each in container.get("volumeMounts", [])} <= volumes


def test_no_secret_is_in_an_environment_or_in_the_configuration():
    objects = render()
    keys = only(objects, "Secret", "-api-keys")["data"]
    token = only(objects, "Secret", "-admin-token")["data"]
    rest = json.dumps([each for each in objects if each["kind"] != "Secret"])
    for value in (*keys.values(), *token.values()):
        assert value not in rest
    for template in ray_templates(objects).values():
        assert "secretKeyRef" not in json.dumps(template)


def test_secrets_that_exist_are_not_made_again():
    objects = render(VALUE_SETS["existing secrets"])
    assert of_kind(objects, "Secret") == []
    for template in ray_templates(objects).values():
        named = {
            volume["secret"]["secretName"]
            for volume in template["spec"]["volumes"]
            if "secret" in volume
        }
        assert named == {"keys", "admin"}


def test_the_network_policy_selects_rays_pods_and_opens_little():
    objects = render()
    policy = only(objects, "NetworkPolicy")["spec"]
    selected = policy["podSelector"]["matchLabels"].items()
    for template in ray_templates(objects).values():
        assert selected <= template["metadata"]["labels"].items()
    own, operator, clients = policy["ingress"]
    assert "ports" not in own
    assert {port["port"] for port in operator["ports"]} == {8000, 8265, 52365}
    assert {port["port"] for port in clients["ports"]} == {8000, 9000}


def test_an_empty_list_of_peers_stands_for_nobody():
    """To Kubernetes `from: []` is everybody."""
    peers = {"clients": [], "prometheus": [], "operator": [], "dns": []}
    values = {"networkPolicy": peers, "monitoring": {"serviceMonitor": {"enabled": True}}}
    policy = only(render(values), "NetworkPolicy")["spec"]
    assert all(rule["from"] for rule in policy["ingress"])
    assert all(rule["to"] for rule in policy["egress"])


def test_only_what_is_scraped_is_open_to_prometheus():
    def ingress(is_scraped):
        values = {"monitoring": {"serviceMonitor": {"enabled": is_scraped}}}
        return json.dumps(only(render(values), "NetworkPolicy")["spec"]["ingress"])

    assert '"app.kubernetes.io/name": "prometheus"' in ingress(True)
    assert "prometheus" not in ingress(False)


def test_with_a_sidecar_no_client_reaches_plain_text():
    policy = only(render(VALUE_SETS["sidecar"]), "NetworkPolicy")["spec"]
    clients = policy["ingress"][2]
    assert {port["port"] for port in clients["ports"]} == {8443, 9443}


def test_offline_nothing_goes_out():
    def egress(values):
        return json.dumps(only(render(values), "NetworkPolicy")["spec"]["egress"])

    assert "0.0.0.0/0" in egress({})
    assert "0.0.0.0/0" not in egress(VALUE_SETS["offline"])


def test_ray_asks_for_its_token():
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
