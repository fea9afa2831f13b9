"""What the cluster and its applications are told, by the values that they follow from."""

import json

import pytest
import yaml

from cluster.app import application_settings
from cluster.config import ServeConfig
from cluster.deployment import GRPC_SERVICER_FUNCTIONS
from tests.k8s.rendering import (
    EXAMPLES,
    cluster,
    example,
    of_kind,
    only,
    ray_templates,
    render,
    serve_config,
)
from tests.k8s.value_sets import DRAFT, FIRST, GPU, ONE_NODE, SECOND, VALUE_SETS, with_model


def args_of(values):
    [application] = serve_config(render(values))["applications"]
    return application["args"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_service_accepts_the_arguments_of_every_example(path):
    for application in serve_config(render(yaml.safe_load(path.read_text())))["applications"]:
        of_files = {
            key: value for key, value in application["args"].items() if not key.endswith("_file")
        }
        of_files.pop("state_dir")
        ServeConfig.from_mapping(application_settings({**of_files, "device": "cpu"}))


def test_serve_is_told_of_grpc_what_the_service_says():
    config = serve_config(render())
    assert config["grpc_options"]["grpc_servicer_functions"] == list(GRPC_SERVICER_FUNCTIONS)


def test_one_application_for_each_model():
    models = [FIRST, SECOND, {**SECOND, "name": "Org/Third.1"}]
    found = serve_config(render({"models": models}))["applications"]
    assert [each["name"] for each in found] == ["first", "second", "org-third-1"]
    assert [each["route_prefix"] for each in found] == ["/", "/second", "/org-third-1"]
    assert [each["args"]["served_model_name"] for each in found][2] == "Org/Third.1"


def test_a_large_number_stays_whole():
    assert args_of(with_model(settings={"max_model_len": 1_000_000}))["max_model_len"] == 1_000_000
    assert "1e+06" not in json.dumps(args_of(with_model(settings={"max_model_len": 1_000_000})))


def test_false_and_zero_are_values():
    values = with_model(settings={"enable_prefix_caching": False, "max_queue_len": 0})
    assert args_of(values)["enable_prefix_caching"] is False
    assert args_of(values)["max_queue_len"] == 0
    groups = {"target": {"minReplicas": 0, "replicas": 0, "maxReplicas": 0}}
    [group] = cluster(render({"workerGroups": groups}))["workerGroupSpecs"]
    assert group["maxReplicas"] == 0


def test_replicas_or_autoscaling():
    fixed = args_of(with_model(replicas=3))
    assert fixed["num_replicas"] == 3
    assert "max_replicas" not in fixed
    scaled = args_of(with_model(autoscaling={"enabled": True, "maxReplicas": 5}))
    assert (scaled["min_replicas"], scaled["max_replicas"]) == (1, 5)
    assert "num_replicas" not in scaled


def test_speculation_is_passed_on_or_left_to_the_service():
    assert "speculative_config" not in args_of({})
    assert args_of(with_model(speculativeConfig="none"))["speculative_config"] == "none"
    assert args_of(with_model(speculativeConfig=DRAFT))["speculative_config"] == DRAFT


def test_a_models_device_follows_from_the_worker_groups():
    gpu = {"workerGroups": {"target": {"gpu": {"count": 1}}}}
    assert args_of({})["device"] == "cpu"
    assert args_of(gpu)["device"] == "cuda"
    assert args_of({**gpu, **with_model(device="cpu")})["device"] == "cpu"


@pytest.mark.parametrize(("drain_s", "migration_s"), [(0, 0), (30, 300), (600, 20)])
def test_every_wait_follows_from_drain_and_migration(drain_s, migration_s):
    waits = {"drainSeconds": drain_s, "migrationSeconds": migration_s}
    tls = {"tls": {"mode": "sidecar", "secretName": "cert"}}
    objects = render({**waits, **tls, "upgrade": {"oldClusterSeconds": 600}})
    assert serve_config(objects)["applications"][0]["args"]["drain_timeout_s"] == drain_s
    for name, template in ray_templates(objects).items():
        longest_s = drain_s + 30 + (0 if name == "head" else migration_s)
        for container in template["spec"]["containers"]:
            hook = container["lifecycle"]["preStop"]["exec"]["command"][-1]
            assert f"seq {longest_s})" in hook
            # From here on Serve stops a replica, wherever its replacement is.
            if "drain-node" in hook:
                assert f"--deadline-remaining-seconds {longest_s} " in hook
                assert longest_s - (drain_s + 10) >= migration_s
        # The hook's time counts as the grace period's.
        assert template["spec"]["terminationGracePeriodSeconds"] == longest_s + 30


def test_shards_and_drafts_go_to_pods_of_their_role():
    values = VALUE_SETS["gpus"]
    objects = render(values)
    labels = {each["groupName"]: each["labels"] for each in cluster(objects)["workerGroupSpecs"]}
    assert {name: each["specdec-role"] for name, each in labels.items()} == {
        "target": "target",
        "draft": "draft",
    }
    assert args_of(values)["target_labels"] == "specdec-role=target"
    assert args_of(values)["draft_labels"] == "specdec-role=draft"
    on_cpu = args_of({**VALUE_SETS["cpu beside gpus"]})
    assert "target_labels" not in on_cpu
    chosen = with_model(settings={"target_labels": "specdec-group=spot"})
    assert args_of(chosen)["target_labels"] == "specdec-group=spot"


def test_gpus_are_limits_and_choose_nodes():
    gpu = {"count": 4, "product": "NVIDIA-H100", "resource": "nvidia.com/gpu"}
    spec = ray_templates(render({"workerGroups": {"target": {"gpu": gpu}}}))["target"]["spec"]
    assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert spec["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100"}


def test_the_service_has_no_endpoint_on_a_draft_worker():
    """Kubernetes leaves out of a named port's endpoints the pods that have no port of the name."""
    objects = render({"workerGroups": {"draft": {"enabled": True}}})
    ports = only(objects, "RayService")["spec"]["serveService"]["spec"]["ports"]
    wanted = {port["targetPort"] for port in ports}
    named = {
        name: {port["name"] for port in template["spec"]["containers"][0]["ports"]}
        for name, template in ray_templates(objects).items()
    }
    assert wanted <= named["head"]
    assert wanted <= named["target"]
    assert not wanted & named["draft"]


def test_with_a_sidecar_the_service_reaches_it_alone():
    objects = render({"tls": {"mode": "sidecar", "secretName": "cert"}})
    ports = only(objects, "RayService")["spec"]["serveService"]["spec"]["ports"]
    assert {port["targetPort"] for port in ports} == {"tls-http", "tls-grpc"}
    for template in ray_templates(objects).values():
        ray, tls = template["spec"]["containers"]
        assert tls["name"] == "tls"
        # KubeRay makes ports of the Service by the names of this container's.
        assert {"serve", "serve-grpc"} <= {port["name"] for port in ray["ports"]}


def test_models_and_versions_of_the_chart_leave_the_pods_as_they_are(tmp_path):
    """KubeRay answers a change of pods with a whole new cluster."""
    before = cluster(render())
    for values in (
        with_model(settings={"max_num_seqs": 8}, speculativeConfig="none"),
        {"models": [FIRST, SECOND]},
        {"commonLabels": {"team": "ml"}},
        {"monitoring": {"serviceMonitor": {"enabled": True}}, "keda": VALUE_SETS["keda"]["keda"]},
    ):
        assert cluster(render(values)) == before
    assert "helm.sh/chart" not in json.dumps(before)


def test_the_head_of_a_new_cluster_comes_to_where_the_state_is():
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
    """What other pods a pod has to be on a node with."""
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
def test_pods_that_share_a_claim_of_one_node_are_placed_on_one(values):
    """And no others: a head with its state alone may be where there is no GPU."""
    templates = ray_templates(render(values))
    for name, template in templates.items():
        sharing = {
            other
            for other, each in templates.items()
            if claims_of(template) & claims_of(each) - {"state"}
        }
        terms = [each for each in together(template) if not selects_only_the_head(each, templates)]
        for term in terms:
            # The first of them finds no other, and is placed since it is what it looks for.
            assert selects(term, template)
            assert {other for other, each in templates.items() if selects(term, each)} == sharing
        assert bool(terms) == bool(sharing), name


def selects_only_the_head(term, templates):
    return [name for name, each in templates.items() if selects(term, each)] == ["head"]


def test_pods_with_a_claim_of_many_nodes_go_where_they_please():
    shared = {"storage": {"models": {"type": "claim"}}}
    for name in ("target", "draft"):
        workers = {"workerGroups": {"draft": {"enabled": True}}}
        assert together(ray_templates(render({**shared, **workers}))[name]) == []


def test_an_affinity_of_the_groups_own_is_kept():
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
def test_a_head_without_models_mounts_nothing_of_them(name):
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


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_where_there_are_gpus_the_image_is_the_one_with_cuda(path):
    objects = render(yaml.safe_load(path.read_text()))
    [image] = {
        template["spec"]["containers"][0]["image"] for template in ray_templates(objects).values()
    }
    assert image.endswith("-cuda") == (path.stem != "laptop")


def test_a_tag_or_digest_is_taken_as_it_is():
    for image, end in (({"tag": "x"}, ":x"), ({"digest": "sha256:" + "0" * 64}, "0")):
        objects = render({"image": image, "workerGroups": {"target": GPU}})
        assert ray_templates(objects)["head"]["spec"]["containers"][0]["image"].endswith(end)


def test_budgets_select_the_pods_of_their_group_and_count_them():
    """By a number: Kubernetes takes no maxUnavailable for pods of an owner without /scale."""
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
    """minAvailable by the group's name."""
    objects = render({"workerGroups": groups, "models": models, **values})
    return {
        each["metadata"]["name"].removeprefix("demo-specdec-"): each["spec"]["minAvailable"]
        for each in of_kind(objects, "PodDisruptionBudget")
    }


def gpu_group(num_pods, gpus, **values):
    pods = dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), num_pods)
    return {"enabled": True, "gpu": {"count": gpus}, **pods, **values}


def test_a_budget_counts_only_pods_that_cannot_be_idle():
    """Pods without a replica are never ready: with them an eviction would be forbidden for ever."""
    two, three = {**FIRST, "replicas": 2}, {**FIRST, "replicas": 3}
    assert kept_pods({"target": gpu_group(3, 1)}, [two]) == {"target": 1}
    assert kept_pods({"target": gpu_group(3, 1)}, [three]) == {"target": 2}
    assert kept_pods({"target": gpu_group(3, 1)}, [FIRST]) == {}
    # Four shards of one GPU each may be on two pods.
    assert kept_pods({"target": gpu_group(4, 2)}, [{**FIRST, "replicas": 4}]) == {"target": 1}
    sharded = {**FIRST, "replicas": 3, "tensorParallelSize": 2}
    assert kept_pods({"target": gpu_group(4, 2)}, [sharded]) == {"target": 2}
    # Replicas on CPUs may all be on one pod.
    assert kept_pods({"target": gpu_group(3, 0)}, [three]) == {}


def test_a_budget_counts_what_other_groups_of_the_role_may_take():
    groups = {"target": gpu_group(3, 1), "more": gpu_group(1, 1)}
    assert kept_pods(groups, [{**FIRST, "replicas": 4}]) == {"target": 2}
    assert kept_pods(groups, [{**FIRST, "replicas": 3}]) == {"target": 1}


def test_drafts_are_ready_and_counted_whatever_they_do():
    groups = {"target": gpu_group(1, 1), "draft": gpu_group(3, 1, role="draft")}
    assert kept_pods(groups, [{**FIRST, "speculativeConfig": DRAFT}]) == {"draft": 2}


def test_with_rays_autoscaler_the_fewest_pods_and_replicas_count():
    scaled = {**FIRST, "autoscaling": {"enabled": True, "minReplicas": 3, "maxReplicas": 4}}
    groups = {"target": gpu_group(4, 1, minReplicas=2)}
    assert kept_pods(groups, [scaled], ray={"autoscaler": {"enabled": True}}) == {"target": 1}


def test_claims_are_kept_unless_told_otherwise():
    objects = render(VALUE_SETS["claims"])
    kept = {
        each["metadata"]["name"]: each["metadata"].get("annotations", {})
        for each in of_kind(objects, "PersistentVolumeClaim")
    }
    assert kept["demo-specdec-models"] == {"helm.sh/resource-policy": "keep"}
    assert kept["demo-specdec-state"] == {"helm.sh/resource-policy": "keep"}
    assert kept["demo-specdec-cache"] == {}


def test_models_of_images_are_copied_before_ray_starts():
    objects = render(VALUE_SETS["model images"])
    copies = ray_templates(objects)["target"]["spec"]["initContainers"]
    assert [each["image"] for each in copies] == ["r/a:1", "r/b@sha256:" + "1" * 64]
    assert [each["env"][1]["value"] for each in copies] == ["/models/a", "/models/b.c"]


def test_what_the_test_expects_follows_from_the_configuration():
    values = {
        "models": [
            {**FIRST, "speculativeConfig": {"method": "ngram", "num_speculative_tokens": 3}},
            {**SECOND, "speculativeConfig": "none"},
        ]
    }
    plan = json.loads(only(render(values), "ConfigMap", "-test")["data"]["plan.json"])
    first, second = plan["models"]
    assert (first["speculation_method"], first["num_speculative_tokens"]) == ("ngram", 3)
    assert (second["speculation_method"], second["num_speculative_tokens"]) == (None, 0)
    assert second["route_prefix"] == "/second"
