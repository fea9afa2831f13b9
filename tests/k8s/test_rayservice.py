"""Tests of the RayService: its applications, pods and timeouts."""

import json

import pytest
import yaml

from cluster.app import application_settings
from cluster.config.serve_config import ServeConfig
from cluster.serve.application import GRPC_SERVICER_FUNCTIONS
from tests.k8s.rendering import EXAMPLES, cluster, only, ray_templates, render, serve_config
from tests.k8s.value_sets import DRAFT, FIRST, GPU, SECOND, VALUE_SETS, with_model


def args_of(values):
    [application] = serve_config(render(values))["applications"]
    return application["args"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_service_accepts_the_arguments_of_every_example(path):
    for application in serve_config(render(yaml.safe_load(path.read_text())))["applications"]:
        args = {
            key: value for key, value in application["args"].items() if not key.endswith("_file")
        }
        args.pop("state_dir")
        config = ServeConfig.from_mapping(application_settings(args))
        expected = [application["args"][name] for name in ("model", "drain_timeout_s")]
        assert [config.model, config.drain_timeout_s] == expected


def test_serve_registers_the_grpc_servicers_of_the_service():
    config = serve_config(render())
    assert config["grpc_options"]["grpc_servicer_functions"] == list(GRPC_SERVICER_FUNCTIONS)


def test_one_application_for_each_model():
    models = [FIRST, SECOND, {**SECOND, "name": "Org/Third.1"}]
    found = serve_config(render({"models": models}))["applications"]
    assert [each["name"] for each in found] == ["first", "second", "org-third-1"]
    assert [each["route_prefix"] for each in found] == ["/", "/second", "/org-third-1"]
    assert [each["args"]["served_model_name"] for each in found][2] == "Org/Third.1"


def test_large_numbers_are_not_rendered_in_exponent_notation():
    assert args_of(with_model(settings={"max_model_len": 1_000_000}))["max_model_len"] == 1_000_000
    assert "1e+06" not in json.dumps(args_of(with_model(settings={"max_model_len": 1_000_000})))


@pytest.mark.parametrize(
    ("given", "requests", "limits"),
    [
        ({}, {"cpu": "4", "memory": "8Gi"}, {"cpu": "4", "memory": "8Gi"}),
        (
            {"requests": {"cpu": "500m", "memory": "64Gi"}},
            {"cpu": "500m", "memory": "64Gi"},
            {"cpu": "4", "memory": "64Gi"},
        ),
        (
            {"limits": {"cpu": 2, "memory": "16Gi"}},
            {"cpu": 2, "memory": "8Gi"},
            {"cpu": 2, "memory": "16Gi"},
        ),
    ],
)
def test_no_default_of_a_group_contradicts_a_given_resource(given, requests, limits):
    """Kubernetes refuses a limit below the request."""
    templates = ray_templates(render({"workerGroups": {"big": {"resources": given}}}))
    resources = templates["big"]["spec"]["containers"][0]["resources"]
    assert resources == {"requests": requests, "limits": limits}


@pytest.mark.parametrize("name", ["head", "target", "draft", "big"])
def test_null_removes_a_limit(name):
    """A limit of CPUs throttles. The chart's own groups are in values.yaml, "big" is not."""
    given = {"resources": {"limits": {"cpu": None}}}
    group = {"workerGroups": {name: {"enabled": True, **given}}}
    values = {"head": given} if name == "head" else group
    resources = ray_templates(render(values))[name]["spec"]["containers"][0]["resources"]
    assert set(resources["requests"]) == {"cpu", "memory"}
    assert set(resources["limits"]) == {"memory"}


ALL = {"requests": {"cpu": "4", "memory": "8Gi"}, "limits": {"cpu": "4", "memory": "8Gi"}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ALL),
        ({"limits": None}, {"requests": ALL["requests"]}),
        ({"requests": None, "limits": {"cpu": None}}, {"limits": {"memory": "8Gi"}}),
        ({"requests": None, "limits": None}, {}),
    ],
)
@pytest.mark.parametrize("name", ["target", "draft"])
def test_null_removes_the_limits_or_restores_all_resources(name, given, expected):
    values = {"workerGroups": {name: {"enabled": True, "resources": given}}}
    [container] = ray_templates(render(values))[name]["spec"]["containers"]
    assert container["resources"] == expected


@pytest.mark.parametrize("text", ["123", "1e3", "no", "null", "0x1f"])
def test_names_that_could_be_of_another_type_are_strings(text):
    values = {
        "models": [{**FIRST, "name": text}],
        "workerGroups": {"target": {"enabled": False}, f"e{text}": {}, "on": {}},
        "fullnameOverride": text.lstrip("0123456789"),  # begins with a letter
        "image": {"pullSecrets": [text]},
        "serviceAccount": {"create": False, "name": text},
        "auth": {"apiKeys": {"existingSecret": text}, "adminToken": {"existingSecret": text}},
        "hub": {"token": {"name": text, "key": text}},
        "storage": {"models": {"type": "claim", "existingClaim": text}},
        "head": {"priorityClassName": text, "runtimeClassName": text},
        "tls": {"mode": "sidecar", "secretName": text},
        "monitoring": {"serviceMonitor": {"enabled": True}},
    }
    objects = render(values, namespace=text)
    for key, found in leaves([objects, serve_config(objects)]):
        if key.lower().endswith(("name", "names", "namespace", "component", "-group", "prefix")):
            assert isinstance(found, str), key


def leaves(value, key=""):
    """Yield the scalars of a tree, each with the key that leads to it."""
    children = value.items() if isinstance(value, dict) else ((key, each) for each in value)
    for own, child in children:
        if isinstance(child, (dict, list)):
            yield from leaves(child, own)
        else:
            yield own, child


def test_false_and_zero_override_defaults():
    values = with_model(settings={"enable_prefix_caching": False, "max_queue_len": 0})
    assert args_of(values)["enable_prefix_caching"] is False
    assert args_of(values)["max_queue_len"] == 0
    groups = {"target": {"minReplicas": 0, "replicas": 0, "maxReplicas": 0}}
    [group] = cluster(render({"workerGroups": groups}))["workerGroupSpecs"]
    assert group["maxReplicas"] == 0


def test_the_tables_of_the_head_are_in_a_redis_where_one_is_given():
    assert "gcsFaultToleranceOptions" not in cluster(render())
    plain = cluster(render(VALUE_SETS["redis"]))["gcsFaultToleranceOptions"]
    assert plain == {"redisAddress": "redis:6379"}
    secret = cluster(render(VALUE_SETS["redis with a password"]))["gcsFaultToleranceOptions"]
    assert secret == {
        "redisAddress": "rediss://redis.data.svc.cluster.local:6380",
        "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "redis", "key": "secret"}}},
    }


def test_the_tables_of_the_head_are_on_a_volume_where_one_has_a_size():
    found = cluster(render(VALUE_SETS["volume of the head"]))["gcsFaultToleranceOptions"]
    assert found == {"backend": "rocksdb", "storage": {"size": "2Gi", "storageClassName": "fast"}}


def test_replicas_are_fixed_or_autoscaled():
    fixed = args_of(with_model(replicas=3))
    assert fixed["num_replicas"] == 3
    assert "max_replicas" not in fixed
    scaled = args_of(with_model(autoscaling={"enabled": True, "maxReplicas": 5}))
    assert (scaled["min_replicas"], scaled["max_replicas"]) == (1, 5)
    assert "num_replicas" not in scaled


def test_speculative_config_is_passed_on_unless_auto():
    assert "speculative_config" not in args_of({})
    assert args_of(with_model(speculativeConfig="none"))["speculative_config"] == "none"
    assert args_of(with_model(speculativeConfig=DRAFT))["speculative_config"] == DRAFT


def test_the_device_of_a_model_derives_from_the_worker_groups():
    gpu = {"workerGroups": {"target": {"gpu": {"count": 1}}}}
    assert args_of({})["device"] == "cpu"
    assert args_of(gpu)["device"] == "cuda"
    assert args_of({**gpu, **with_model(device="cpu")})["device"] == "cpu"


@pytest.mark.parametrize(("drain_s", "migration_s"), [(0, 0), (30, 300), (600, 20)])
def test_every_timeout_derives_from_drain_and_migration_seconds(drain_s, migration_s):
    waits = {"drainSeconds": drain_s, "migrationSeconds": migration_s}
    tls = {"tls": {"mode": "sidecar", "secretName": "cert"}}
    objects = render({**waits, **tls, "upgrade": {"oldClusterSeconds": 600}})
    assert serve_config(objects)["applications"][0]["args"]["drain_timeout_s"] == drain_s
    for name, template in ray_templates(objects).items():
        longest_s = drain_s + 30 + (0 if name == "head" else migration_s)
        for container in template["spec"]["containers"]:
            hook = container["lifecycle"]["preStop"]["exec"]["command"][-1]
            assert f"$SECONDS -lt {longest_s} ]" in hook
            # From here on Serve stops a replica, with or without a replacement.
            if "drain-node" in hook:
                assert f"--deadline-remaining-seconds {longest_s} " in hook
                assert longest_s - (drain_s + 10) >= migration_s
        # The grace period includes the time of the hook.
        assert template["spec"]["terminationGracePeriodSeconds"] == longest_s + 30


def test_applications_are_deleted_before_the_proxies_stop():
    [head] = ray_templates(render({}))["head"]["spec"]["containers"]
    hook = head["lifecycle"]["preStop"]["exec"]["command"][-1]
    steps = [hook.index(step) for step in ("serve deploy", "serve status", "serve shutdown")]
    assert steps == sorted(steps)


def test_targets_and_drafts_are_placed_on_pods_of_their_role():
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


def test_replicas_share_draft_workers():
    assert args_of(VALUE_SETS["shared draft workers"])["replicas_per_draft_worker"] == 3
    assert "replicas_per_draft_worker" not in args_of(VALUE_SETS["draft on cpu"])
    pool = args_of(VALUE_SETS["pool of draft workers"])
    assert (pool["min_draft_workers"], pool["max_draft_workers"]) == (2, 3)
    assert pool["target_draft_utilization"] == 0.6
    assert "max_draft_workers" not in args_of(VALUE_SETS["draft on cpu"])


def test_gpus_are_set_as_limits_and_select_nodes():
    gpu = {"count": 4, "product": "NVIDIA-H100", "resource": "nvidia.com/gpu"}
    spec = ray_templates(render({"workerGroups": {"target": {"gpu": gpu}}}))["target"]["spec"]
    assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert spec["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100"}


def test_the_service_has_no_endpoint_on_a_draft_worker():
    """Pods without a port of that name are not endpoints of a named port."""
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


def test_both_backends_of_envoy_have_limits_that_the_service_does_not_reach():
    """Serve closes a connection that is idle for 90 seconds; Envoy must close it before."""
    files = only(render(VALUE_SETS["sidecar"]), "ConfigMap", "-envoy")["data"]
    clusters = yaml.safe_load(files["envoy.yaml"])["static_resources"]["clusters"]
    assert [each["name"] for each in clusters] == ["http", "grpc"]
    for each in clusters:
        [limits] = each["circuit_breakers"]["thresholds"]
        assert min(limits.values()) > 1024
    [options] = clusters[0]["typed_extension_protocol_options"].values()
    assert 0 < int(options["common_http_protocol_options"]["idle_timeout"].rstrip("s")) < 90


def test_with_a_sidecar_the_service_targets_only_its_ports():
    objects = render({"tls": {"mode": "sidecar", "secretName": "cert"}})
    ports = only(objects, "RayService")["spec"]["serveService"]["spec"]["ports"]
    assert {port["targetPort"] for port in ports} == {"tls-http", "tls-grpc"}
    for template in ray_templates(objects).values():
        ray, tls = template["spec"]["containers"]
        assert tls["name"] == "tls"
        # KubeRay adds ports to the Service by the names of this container's ports.
        assert {"serve", "serve-grpc"} <= {port["name"] for port in ray["ports"]}


def test_pods_do_not_depend_on_models_and_the_charts_version(tmp_path):
    """KubeRay starts a new cluster if pods change."""
    before = cluster(render())
    for values in (
        with_model(settings={"max_num_seqs": 8}, speculativeConfig="none"),
        {"models": [FIRST, SECOND]},
        {"commonLabels": {"team": "ml"}},
        {"monitoring": {"serviceMonitor": {"enabled": True}}, "keda": VALUE_SETS["keda"]["keda"]},
    ):
        assert cluster(render(values)) == before
    assert "helm.sh/chart" not in json.dumps(before)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_with_gpus_the_default_image_is_the_one_with_cuda(path):
    objects = render(yaml.safe_load(path.read_text()))
    [image] = {
        template["spec"]["containers"][0]["image"] for template in ray_templates(objects).values()
    }
    assert image.endswith("-cuda") == (path.stem != "laptop")


def test_an_explicit_tag_or_digest_is_used_unchanged():
    for image, end in (({"tag": "x"}, ":x"), ({"digest": "sha256:" + "0" * 64}, "0")):
        objects = render({"image": image, "workerGroups": {"target": GPU}})
        assert ray_templates(objects)["head"]["spec"]["containers"][0]["image"].endswith(end)


def test_the_expectations_of_helm_test_derive_from_the_values():
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
