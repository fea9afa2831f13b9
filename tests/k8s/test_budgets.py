"""Tests that pod disruption budgets require no more pods than are certain to be ready."""

from tests.k8s.rendering import of_kind, ray_templates, render
from tests.k8s.value_sets import DRAFT, FIRST, VALUE_SETS


def test_budgets_select_the_pods_of_their_group():
    """minAvailable is a number: maxUnavailable needs an owner with the scale subresource."""
    objects = render(VALUE_SETS["budgets"])
    templates = ray_templates(objects)
    found = {
        each["metadata"]["name"]: each["spec"] for each in of_kind(objects, "PodDisruptionBudget")
    }
    assert {name: spec["minAvailable"] for name, spec in found.items()} == {
        "demo-specdec-target": 2,
        "demo-specdec-head": 1,
    }
    for name, spec in found.items():
        group = name.removeprefix("demo-specdec-")
        selected = spec["selector"]["matchLabels"].items()
        matching = [
            each
            for each, pods in templates.items()
            if selected <= pods["metadata"]["labels"].items()
        ]
        assert matching == [group]


def kept_pods(groups, models, **values):
    """Return minAvailable by name of the group."""
    objects = render({"workerGroups": groups, "models": models, **values})
    return {
        each["metadata"]["name"].removeprefix("demo-specdec-"): each["spec"]["minAvailable"]
        for each in of_kind(objects, "PodDisruptionBudget")
    }


def gpu_group(num_pods, gpus, **values):
    pods = dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), num_pods)
    return {"enabled": True, "gpu": {"count": gpus}, **pods, **values}


def test_a_budget_counts_only_pods_that_cannot_be_idle():
    """Pods without a replica are never ready, and would block every eviction."""
    two, three = {**FIRST, "replicas": 2}, {**FIRST, "replicas": 3}
    assert kept_pods({"target": gpu_group(3, 1)}, [two]) == {"target": 1}
    assert kept_pods({"target": gpu_group(3, 1)}, [three]) == {"target": 2}
    assert kept_pods({"target": gpu_group(3, 1)}, [FIRST]) == {}
    # Four ranks with one GPU each fit on two pods.
    assert kept_pods({"target": gpu_group(4, 2)}, [{**FIRST, "replicas": 4}]) == {"target": 1}
    sharded = {**FIRST, "replicas": 3, "tensorParallelSize": 2}
    assert kept_pods({"target": gpu_group(4, 2)}, [sharded]) == {"target": 2}
    # Of ranks that span pods only those beside a Router are in a pod that is ready.
    for placement in ("pack", "spread"):
        settings = {"target_placement": placement}
        spanning = {**sharded, "tensorParallelSize": 8, "settings": settings}
        assert kept_pods({"target": gpu_group(12, 2)}, [spanning]) == {}
    # Replicas on CPUs may all be on one pod.
    assert kept_pods({"target": gpu_group(3, 0)}, [three]) == {}


def test_a_budget_subtracts_the_room_in_other_groups_of_the_role():
    groups = {"target": gpu_group(3, 1), "more": gpu_group(1, 1)}
    assert kept_pods(groups, [{**FIRST, "replicas": 4}]) == {"target": 2}
    assert kept_pods(groups, [{**FIRST, "replicas": 3}]) == {"target": 1}


def test_draft_pods_always_count():
    groups = {"target": gpu_group(1, 1), "draft": gpu_group(3, 1, role="draft")}
    assert kept_pods(groups, [{**FIRST, "speculativeConfig": DRAFT}]) == {"draft": 2}


def test_with_rays_autoscaler_the_minimum_of_pods_and_replicas_counts():
    scaled = {**FIRST, "autoscaling": {"enabled": True, "minReplicas": 3, "maxReplicas": 4}}
    groups = {"target": gpu_group(4, 1, minReplicas=2)}
    assert kept_pods(groups, [scaled], ray={"autoscaler": {"enabled": True}}) == {"target": 1}
