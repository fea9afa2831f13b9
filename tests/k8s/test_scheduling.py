"""Tests of the nodes on which pods may run."""

import pytest

from tests.k8s.rendering import cluster, pod_specs, ray_templates, render
from tests.k8s.value_sets import CLAIM, KEDA, VALUE_SETS

TOLERATIONS = [{"key": "llm", "operator": "Exists", "effect": "NoSchedule"}]
PLACED = {
    "nodeSelector": {"pool": "cpu"},
    "tolerations": TOLERATIONS,
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "high",
}
GROUP = {"tolerations": TOLERATIONS}


@pytest.mark.parametrize("storage", [{}, {"models": {**CLAIM, "accessModes": ["ReadWriteOnce"]}}])
def test_pods_beside_ray_run_where_the_head_may(storage):
    """On a cluster whose nodes are all tainted no pod would start without the tolerations."""
    values = {
        **VALUE_SETS["endpoint picker"],
        "head": {**PLACED, "schedulable": True},
        "storage": storage,
    }
    specs = pod_specs(render(values))
    for name in ("demo-specdec-picker", "demo-specdec-test"):
        assert {key: specs[name].get(key) for key in PLACED} == PLACED


def test_every_pod_may_run_on_tainted_nodes():
    keda = {"keda": KEDA, "head": GROUP, "workerGroups": {"target": GROUP}}
    picker = {**VALUE_SETS["endpoint picker"], "head": GROUP, "workerGroups": {"target": GROUP}}
    for values in (keda, picker):
        for name, spec in pod_specs(render(values)).items():
            assert spec["tolerations"] == TOLERATIONS, name


def test_a_slice_of_a_gpu_is_a_gpu():
    """KubeRay counts nvidia.com/mig-* as GPUs of Ray."""
    objects = render(VALUE_SETS["slices of a gpu"])
    [container] = ray_templates(objects)["target"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/mig-3g.40gb"] == 1
    assert container["image"].endswith("-cuda")


@pytest.mark.parametrize(
    ("resource", "is_counted"),
    [
        ("nvidia.com/gpu", True),
        ("nvidia.com/mig-1g.10gb", True),
        ("nvidia.com/mig-1g.10gb.me", False),
        ("nvidia.com/mig-1c.3g.40gb", False),
        ("nvidia.com/mig-1g.10gb.shared", False),
        ("nvidia.com/gpu.shared", False),
    ],
)
def test_gpus_that_kuberay_does_not_count_are_passed_to_ray(resource, is_counted):
    """It counts names that end in gpu, and those of slices without attributes."""
    group = {"gpu": {"count": 1, "resource": resource}, "rayStartParams": {"num-cpus": "3"}}
    for given in ({}, {"num-gpus": "2"}):
        params = group["rayStartParams"] | given
        values = {"workerGroups": {"target": {**group, "rayStartParams": params}}}
        [spec] = cluster(render(values))["workerGroupSpecs"]
        ours = {} if is_counted else {"num-gpus": "1"}
        assert spec["rayStartParams"] == ours | params
        limits = spec["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert limits[resource] == 1


def test_a_pod_has_one_slice():
    two = {"workerGroups": {"target": {"gpu": {"count": 2, "resource": "nvidia.com/mig-1g.10gb"}}}}
    with pytest.raises(Exception, match=r"target\.gpu\.count: a process can use only one"):
        render(two)
