"""Tests of the volumes of pods, and of the placement that follows from them."""

import re

import pytest

from tests.k8s.rendering import example, of_kind, ray_templates, render
from tests.k8s.value_sets import HOST_PATH, ONE_NODE, VALUE_SETS


def test_the_head_of_a_new_cluster_is_placed_on_the_node_of_the_state():
    [term] = ray_templates(render())["head"]["spec"]["affinity"]["podAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    labels = ray_templates(render())["head"]["metadata"]["labels"]
    assert term["labelSelector"]["matchLabels"].items() <= labels.items()
    existing = {"storage": {"state": {"existingClaim": "of-many-nodes"}}}
    assert "affinity" in ray_templates(render(existing))["head"]["spec"]
    passing = {"storage": {"state": {"type": "emptyDir"}}}
    assert "affinity" not in ray_templates(render(passing))["head"]["spec"]
    [claim] = of_kind(render(), "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]


def together(template):
    """Return the selectors of the pods with which a pod must share a node."""
    affinity = template["spec"].get("affinity", {}).get("podAffinity", {})
    terms = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", [])
    assert {term["topologyKey"] for term in terms} <= {"kubernetes.io/hostname"}
    return [term["labelSelector"] for term in terms]


def selects(selector, template):
    labels = template["metadata"]["labels"]
    excluded = [
        labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", [])
    ]
    return selector["matchLabels"].items() <= labels.items() and not any(excluded)


def claims_of(template):
    volumes = template["spec"]["volumes"]
    return {each["name"] for each in volumes if "persistentVolumeClaim" in each}


@pytest.mark.parametrize(
    "values",
    [
        VALUE_SETS["claims of one node"],
        VALUE_SETS["claims of one node, the head's too"],
        example("two-gpus"),
        example("eight-gpus"),
    ],
    ids=["claims", "head too", "two-gpus", "eight-gpus"],
)
def test_pods_that_share_a_read_write_once_claim_are_placed_on_one_node(values):
    """Other pods are not: a head that mounts only its state may be on a node without GPUs."""
    templates = ray_templates(render(values))
    for name, template in templates.items():
        sharing = {
            other
            for other, each in templates.items()
            if claims_of(template) & claims_of(each) - {"state"}
        }
        terms = [each for each in together(template) if not selects_only_the_head(each, templates)]
        for term in terms:
            # The first pod matches its own affinity, so it can be scheduled.
            assert selects(term, template)
            assert {other for other, each in templates.items() if selects(term, each)} == sharing
        assert bool(terms) == bool(sharing), name


def selects_only_the_head(term, templates):
    return [name for name, each in templates.items() if selects(term, each)] == ["head"]


def test_pods_with_a_read_write_many_claim_have_no_affinity():
    read = {"accessModes": ["ReadWriteOnce", "ReadOnlyMany"], "existingClaim": "weights"}
    for claim, is_for_many in (
        ({}, True),
        ({**read, "readOnly": True}, True),
        ({**read, "readOnly": False}, False),
    ):
        storage = {"models": {"type": "claim", **claim}}
        values = {"storage": storage, "workerGroups": {"draft": {"enabled": True}}}
        templates = ray_templates(render(values))
        assert [together(templates[name]) == [] for name in ("target", "draft")] == [
            is_for_many,
            is_for_many,
        ]


def test_the_configured_affinity_of_a_group_is_kept():
    own = {"labelSelector": {"matchLabels": {"a": "b"}}, "topologyKey": "kubernetes.io/hostname"}
    given = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [own]}}
    node = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}
    values = {
        "storage": {"models": ONE_NODE},
        "workerGroups": {"target": {"affinity": {**given, "nodeAffinity": node}}},
    }
    template = ray_templates(render(values))["target"]
    assert len(together(template)) == 2
    assert together(template)[0] == own["labelSelector"]
    assert template["spec"]["affinity"]["nodeAffinity"] == node


@pytest.mark.parametrize("name", ["model images", "hub", "claims"])
def test_a_head_without_models_mounts_no_model_volumes(name):
    of_models = {"models", "cache", "hub-token"}
    values = {"modelImages": [], **VALUE_SETS[name]}
    for is_schedulable in (False, True):
        head = ray_templates(render({**values, "head": {"schedulable": is_schedulable}}))["head"]
        [container] = head["spec"]["containers"]
        mounted = {each["name"] for each in container["volumeMounts"]}
        assert mounted <= {each["name"] for each in head["spec"]["volumes"]}
        assert bool(mounted & of_models) is is_schedulable
        assert bool({each["name"] for each in head["spec"]["volumes"]} & of_models) is (
            is_schedulable
        )
        expected = len(values["modelImages"]) if is_schedulable else 0
        assert len(head["spec"].get("initContainers", [])) == expected
        variables = {each["name"] for each in container["env"]}
        assert ("HF_HOME" in variables) is is_schedulable


def test_claims_are_kept_on_uninstall_by_default():
    objects = render(VALUE_SETS["claims"])
    kept = {
        each["metadata"]["name"]: each["metadata"].get("annotations", {})
        for each in of_kind(objects, "PersistentVolumeClaim")
    }
    assert kept["demo-specdec-models"] == {"helm.sh/resource-policy": "keep"}
    assert kept["demo-specdec-state"] == {"helm.sh/resource-policy": "keep"}
    assert kept["demo-specdec-cache"] == {}


def test_model_images_are_copied_before_ray_starts():
    objects = render(VALUE_SETS["model images"])
    copies = ray_templates(objects)["target"]["spec"]["initContainers"]
    assert [each["image"] for each in copies] == ["r/a:1", "r/b@sha256:" + "1" * 64]
    assert [each["env"][1]["value"] for each in copies] == ["/models/a", "/models/b.c"]


def test_models_in_a_directory_of_the_node():
    """The head does not mount it, no claim is made for it, and the Hub's cache may be there."""
    objects = render(VALUE_SETS["offline with a directory of the node"])
    templates = ray_templates(objects)
    volumes = {name: each["spec"]["volumes"] for name, each in templates.items()}
    volume = {"name": "models", "hostPath": {"path": "/srv"}}
    assert volume in volumes["target"]
    assert "models" not in {each["name"] for each in volumes["head"]}
    [container] = templates["target"]["spec"]["containers"]
    mount = {"name": "models", "mountPath": "/models", "readOnly": True}
    assert mount in container["volumeMounts"]
    assert not of_kind(objects, "PersistentVolumeClaim", "-models")


@pytest.mark.parametrize("name", ["existing claims", "offline", "defaults"])
def test_the_hub_is_asked_unless_it_is_offline(name):
    """With a read-only volume too, from which the cached commit is used."""
    [container] = ray_templates(render(VALUE_SETS[name]))["target"]["spec"]["containers"]
    is_offline = {"name": "HF_HUB_OFFLINE", "value": "1"} in container["env"]
    assert is_offline is (name == "offline")


@pytest.mark.parametrize(
    ("extra", "field", "key"),
    [
        ("extraEnv", "env", "name"),
        ("extraVolumes", "volumes", "name"),
        ("extraVolumeMounts", "volumeMounts", "mountPath"),
    ],
)
def test_extra_entries_replace_those_of_the_chart(extra, field, key):
    """The API server rejects a second entry with the same name or mount path."""
    given = VALUE_SETS["extras in place of the chart's"][extra]
    spec = ray_templates(render({extra: given}))["target"]["spec"]
    plain = ray_templates(render())["target"]["spec"]
    entries, own = (
        each[field] if field in each else each["containers"][0][field] for each in (spec, plain)
    )
    assert entries[-1:] == given
    assert entries[:-1] == [each for each in own if each[key] != given[0][key]]
    assert len(entries) == len(own)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"storage": {"cache": {"type": "volume"}}},
            "storage.cache.volume: required with type volume",
        ),
        (
            {"storage": {"models": {**HOST_PATH, "type": "emptyDir", "readOnly": False}}},
            "storage.models.volume: required with type volume, and with it alone",
        ),
        (
            {"storage": {"cache": {"type": "volume", "volume": {"name": "a", "emptyDir": {}}}}},
            "storage.cache.volume.name: must be left out",
        ),
        (
            {"modelImages": [{"name": "a", "image": "a"}], "storage": {"models": HOST_PATH}},
            "or remove modelImages",
        ),
        (
            {"extraVolumes": [{"name": "models", "hostPath": {"path": "/srv"}}]},
            "extraVolumes: the chart's volume models is that of storage.models; set it there",
        ),
        (
            {"extraEnv": [{"name": "HF_HOME", "value": "/a"}, {"name": "HF_HOME", "value": "/b"}]},
            "extraEnv: two entries have the name HF_HOME; remove one",
        ),
        (
            {"extraVolumeMounts": [{"name": name, "mountPath": "/srv"} for name in ("a", "b")]},
            "extraVolumeMounts: two entries have the mountPath /srv; remove one",
        ),
    ],
)
def test_volumes_and_extra_entries_that_contradict_others(values, message):
    with pytest.raises(Exception, match=re.escape(message)):
        render(values)
