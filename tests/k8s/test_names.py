"""Tests of the names, labels and ports of objects."""

import pytest

from tests.k8s.rendering import of_kind, only, render
from tests.k8s.value_sets import VALUE_SETS

LABELS = {"team": "ml", "app.kubernetes.io/version": "2"}


def test_names_of_a_long_release_are_not_truncated_by_kuberay():
    objects = render(name="a" * 53)
    assert max(len(each["metadata"]["name"]) for each in objects) <= 63
    [service] = [each for each in objects if each["kind"] == "RayService"]
    assert len(service["spec"]["serveService"]["metadata"]["name"]) <= 50


@pytest.mark.parametrize("name", ["7b", "a.b"])
def test_a_release_name_that_kuberay_rejects(name):
    """Helm accepts it, and KubeRay would report it in an event of the RayService alone."""
    with pytest.raises(Exception, match="fullnameOverride: the RayService would have the name"):
        render(name=name)
    service = only(render({"fullnameOverride": "chat"}, name=name), "RayService")
    assert service["metadata"]["name"] == "chat"


def test_labels_of_users_replace_those_of_the_chart():
    """kubectl rejects a key that occurs twice, with which `helm template` would print them."""
    sets = ("monitoring", "endpoint picker of several releases")
    for objects in (render({**VALUE_SETS[name], "commonLabels": LABELS}) for name in sets):
        assert all(
            LABELS.items() <= each["metadata"]["labels"].items()
            for each in objects
            if each["kind"] != "Pod"
        )
    own = {"monitoring": {"rules": {"enabled": True, "labels": {"team": "sre"}}}}
    [rule] = of_kind(render({**own, "commonLabels": LABELS}), "PrometheusRule")
    assert rule["metadata"]["labels"].items() >= {**LABELS, "team": "sre"}.items()


ALL_LABELS = {"instance", "component", "part-of", "managed-by", "name", "version"}


@pytest.mark.parametrize(
    ("path", "rejected"),
    [
        ("commonLabels", {"instance", "component"}),
        ("head.podLabels", {"instance", "component", "part-of"}),
        ("workerGroups.target.podLabels", {"instance", "component", "part-of"}),
        ("monitoring.serviceMonitor.labels", set()),
        ("monitoring.rules.labels", set()),
        ("monitoring.dashboard.labels", set()),
    ],
)
def test_only_labels_by_which_the_chart_selects_cannot_be_replaced(path, rejected):
    def values_with(names):
        values = {f"app.kubernetes.io/{name}": "x" for name in names}
        for key in reversed(path.split(".")):
            values = {key: values}
        return values

    for name in sorted(rejected):
        with pytest.raises(Exception, match=rf"{path}: selectors .* need .*io/{name}; remove it"):
            render(values_with([name]))
    assert render(values_with(ALL_LABELS - rejected))


def test_both_ports_of_the_service_differ():
    with pytest.raises(Exception, match=r"service\.grpcPort: must differ from httpPort"):
        render({"service": {"httpPort": 80, "grpcPort": 80}})
