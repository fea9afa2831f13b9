"""Tests that invalid values are rejected before objects are created, with a fix in the message."""

import pytest

from tests.k8s.rendering import render
from tests.k8s.value_sets import DRAFT, FIRST, GPU, KEDA, ONE_NODE, SECOND, with_model

BY_THE_SCHEMA = {
    "an unknown key": ({"replicas": 2}, "replicas"),
    "an unknown key below": ({"image": {"name": "x"}}, "name"),
    "an unknown setting": (with_model(settings={"max_num_seq": 4}), "max_num_seq"),
    "a setting that follows from another value": (
        with_model(settings={"drain_timeout_s": 5}),
        "drain_timeout_s",
    ),
    "a setting of specdec's own servers": (with_model(settings={"http_port": 80}), "http_port"),
    "a setting beyond its limit": (with_model(settings={"max_num_seqs": 5000}), "max_num_seqs"),
    "a setting of another type": (with_model(settings={"block_size": "16"}), "block_size"),
    "an unknown option of a setting": (with_model(settings={"dtype": "fp8"}), "float32"),
    "no models": ({"models": []}, "models"),
    "a model without a name": ({"models": [{"model": "org/name"}]}, "name"),
    "a model's name with spaces": (with_model(name="my model"), "name"),
    "a tensor parallel size of 0": (with_model(tensorParallelSize=0), "tensorParallelSize"),
    "an unknown device": (with_model(device="tpu"), "device"),
    "an unknown key of speculation": (
        with_model(speculativeConfig={"methods": "ngram"}),
        "speculativeConfig",
    ),
    "an unknown value for speculation": (
        with_model(speculativeConfig="off"),
        "speculativeConfig",
    ),
    "an invalid digest": ({"image": {"digest": "latest"}}, "digest"),
    "a negative drain": ({"drainSeconds": -1}, "drainSeconds"),
    "an invalid port": ({"service": {"httpPort": 70000}}, "httpPort"),
    "a size in words": ({"storage": {"models": {"size": "big"}}}, "size"),
    "an unknown access mode": ({"storage": {"models": {"accessModes": ["RWX"]}}}, "accessModes"),
    "access modes of the state": (
        {"storage": {"state": {"accessModes": ["ReadWriteMany"]}}},
        "accessModes",
    ),
    "an unknown kind of volume": ({"storage": {"cache": {"type": "nfs"}}}, "type"),
    "a resource that is not a GPU": (
        {"workerGroups": {"target": {"gpu": {"resource": "cpu"}}}},
        "resource",
    ),
    "null for a limit without a default": (
        {"head": {"resources": {"limits": {"nvidia.com/foo": None}}}},
        "foo",  # helm 3 writes nvidia.com/foo, helm 4 nvidia.com~1foo
    ),
    "an unknown role": ({"workerGroups": {"target": {"role": "verifier"}}}, "role"),
    "an unknown TLS mode": ({"tls": {"mode": "on"}}, "mode"),
    "an unknown upgrade strategy": ({"upgrade": {"strategy": "Recreate"}}, "strategy"),
    "an upgrade strategy without gRPC": (
        {"upgrade": {"strategy": "NewClusterWithIncrementalUpgrade"}},
        "strategy",
    ),
    "a Redis without its port": (
        {"ray": {"gcsFaultTolerance": {"redisAddress": "redis"}}},
        "redisAddress",
    ),
    "an interval without its unit": (
        {"monitoring": {"serviceMonitor": {"interval": "15"}}},
        "interval",
    ),
}

SAME_NAME = {"models": [FIRST, {**FIRST, "name": "First"}]}
NO_GPUS = with_model(device="cuda")
FOUR_SHARDS = {**with_model(tensorParallelSize=4), "workerGroups": {"target": GPU}}
SPLIT_DRAFT = {**DRAFT, "draft_tensor_parallel_size": 2}
DRAFT_WITHOUT_GPU = {**with_model(speculativeConfig=DRAFT), "workerGroups": {"target": GPU}}

BY_A_TEMPLATE = {
    "two models with the same name": (SAME_NAME, "give each a different name"),
    "two models with the same route prefix": (
        {"models": [FIRST, {**FIRST, "name": "b", "routePrefix": "/"}]},
        "write /b, or leave it empty",
    ),
    "a route prefix of the API": (
        {"models": [FIRST, {**SECOND, "routePrefix": "/v1/second"}]},
        'models[1].routePrefix: "/v1/second" would hide an API path of the model at /',
    ),
    "a name whose route prefix is one of the API": (
        {"models": [FIRST, {**SECOND, "name": "Metrics"}]},
        "or give the model another name",
    ),
    "no model at /": (with_model(routePrefix="/a"), "leave it empty for the first"),
    "minReplicas of a model above maxReplicas": (
        with_model(autoscaling={"enabled": True, "minReplicas": 3, "maxReplicas": 2}),
        "3 must be at most maxReplicas (2); lower it",
    ),
    "replicas that share a draft worker of two ranks": (
        with_model(replicas=2, speculativeConfig=SPLIT_DRAFT, draft={"replicasPerWorker": 2}),
        "draft_model and one rank; change that, or write 1",
    ),
    "replicas that share a draft worker without a draft model": (
        with_model(replicas=2, draft={"replicasPerWorker": 2}),
        "draft_model and one rank; change that, or write 1",
    ),
    "more replicas for a draft worker than there are": (
        with_model(speculativeConfig=DRAFT, draft={"replicasPerWorker": 2}),
        "2 is more than the number of replicas (1); lower it",
    ),
    "a pool of draft workers without a draft model": (
        with_model(draft={"maxWorkers": 2}),
        "draft_model and one rank; change that, or write 0",
    ),
    "a pool with fewer draft workers than its minimum": (
        with_model(speculativeConfig=DRAFT, draft={"minWorkers": 3, "maxWorkers": 2}),
        "3 must be at most maxWorkers (2); lower it",
    ),
    "a pool of more draft workers than replicas": (
        with_model(replicas=2, speculativeConfig=DRAFT, draft={"maxWorkers": 3}),
        "3 is more than the number of replicas (2); lower it, or add replicas",
    ),
    "a pool of draft workers for some of the replicas each": (
        with_model(
            replicas=2, speculativeConfig=DRAFT, draft={"maxWorkers": 2, "replicasPerWorker": 2}
        ),
        "cannot be combined with replicasPerWorker; write 1 there",
    ),
    "no GPU left for the second worker of a pool": (
        {
            **with_model(
                replicas=2, speculativeConfig=DRAFT, draft={"minWorkers": 2, "maxWorkers": 2}
            ),
            "workerGroups": {
                "target": {"gpu": {"count": 2}},
                "draft": {"enabled": True, **GPU},
            },
        },
        "need 2 GPUs",
    ),
    "no GPU left for a second shared draft worker": (
        {
            **with_model(replicas=3, speculativeConfig=DRAFT, draft={"replicasPerWorker": 2}),
            "workerGroups": {"target": {"gpu": {"count": 3}}, "draft": {"enabled": True, **GPU}},
        },
        "need 2 GPUs",
    ),
    "w8a8 on GPUs": (
        {**with_model(settings={"quantization": "w8a8"}), "workerGroups": {"target": GPU}},
        "write int8 or int4, or set models[0].device to cpu",
    ),
    "w8a8 with torch kernels": (
        with_model(settings={"quantization": "w8a8", "kernels": "torch"}),
        "write int8, or remove models[0].settings.kernels",
    ),
    "no pod that can run models": (
        {"workerGroups": {"target": {"enabled": False}}},
        "enable one below workerGroups, or write true",
    ),
    "a group with the name head": ({"workerGroups": {"head": {}}}, "write another name"),
    "a group name that Ray rejects": ({"workerGroups": {"A_B": {}}}, "write another name"),
    "a request of CPUs above the default limit": (
        {"workerGroups": {"target": {"resources": {"requests": {"cpu": "4500m"}}}}},
        "workerGroups.target.resources.requests.cpu: 4500m must be at most the limit (4); lower it",
    ),
    "a limit of memory below the default request": (
        {"head": {"resources": {"limits": {"memory": "4000Mi"}}}},
        "head.resources.requests.memory: 4Gi must be at most the limit (4000Mi); lower it",
    ),
    "minReplicas of a group above maxReplicas": (
        {"workerGroups": {"target": {"minReplicas": 2}}},
        "2 must be at most maxReplicas (1); lower it",
    ),
    "replicas of a group above maxReplicas": (
        {"workerGroups": {"target": {"replicas": 2}}},
        "raise maxReplicas",
    ),
    "maxReplicas without an autoscaler": (
        {"workerGroups": {"target": {"maxReplicas": 3}}},
        "write 1, or enable ray.autoscaler",
    ),
    "cuda without GPUs": (NO_GPUS, "set gpu.count below workerGroups, or write cpu"),
    "more ranks than a pod has GPUs": (
        FOUR_SHARDS,
        "or raise a gpu.count below workerGroups, or for a target write pack in models[0]",
    ),
    "no GPU left for the draft": (DRAFT_WITHOUT_GPU, "the models need 2 GPUs, drafts included"),
    "no GPU left for the draft on pods of its role": (
        {
            **with_model(speculativeConfig=DRAFT, replicas=2),
            "workerGroups": {
                "target": {"gpu": {"count": 8}},
                "draft": {"enabled": True, **GPU},
            },
        },
        "the models need 2 GPUs on pods with specdec-role=draft, which have 1",
    ),
    "a target that fits only on draft pods": (
        {
            **with_model(tensorParallelSize=4, speculativeConfig=SPLIT_DRAFT),
            "workerGroups": {
                "target": {"gpu": {"count": 1}, "replicas": 3, "maxReplicas": 3},
                "draft": {"enabled": True, "gpu": {"count": 4}},
            },
        },
        "models[0].tensorParallelSize: 4 ranks need as many GPUs in one pod, and the largest pod "
        "with specdec-role=target has 1 GPUs",
    ),
    "more ranks of a draft than a pod has GPUs": (
        {
            **with_model(speculativeConfig=SPLIT_DRAFT),
            "workerGroups": {
                "target": {"gpu": {"count": 4}},
                "draft": {"enabled": True, "gpu": {"count": 1}, "replicas": 4, "maxReplicas": 4},
            },
        },
        "models[0].speculativeConfig.draft_tensor_parallel_size: 2 ranks",
    ),
    "a selected group with too few GPUs": (
        {
            **with_model(tensorParallelSize=2, settings={"target_labels": "specdec-group=spot"}),
            "workerGroups": {"target": {"gpu": {"count": 8}}, "spot": GPU},
        },
        "the largest pod with specdec-group=spot has 1 GPUs",
    ),
    "GPU placeholders for models on CPUs": (
        {**with_model(device="cpu"), "workerGroups": {"target": GPU}, "keda": KEDA},
        "no model runs on GPUs",
    ),
    "an existing claim for an emptyDir": (
        {"storage": {"models": {"existingClaim": "weights"}}},
        "write type: claim",
    ),
    "a read-only emptyDir": (
        {"storage": {"cache": {"readOnly": True}}},
        "write type: claim or volume, or false",
    ),
    "model images on a read-only volume": (
        {
            "modelImages": [{"name": "a", "image": "a"}],
            "storage": {"models": {"type": "claim", "existingClaim": "w", "readOnly": True}},
        },
        "or remove modelImages",
    ),
    "a mount path above another": (
        {"storage": {"cache": {"mountPath": "/models"}}},
        "write another path",
    ),
    "a ReadWriteOncePod claim for two pods": (
        {
            "storage": {"models": {"type": "claim", "accessModes": ["ReadWriteOncePod"]}},
            "workerGroups": {"draft": {"enabled": True}},
        },
        "2 pods mount it, and ReadWriteOncePod allows one; write ReadWriteOnce",
    ),
    "a ReadWriteOnce claim for two kinds of GPU": (
        {
            "storage": {"cache": ONE_NODE},
            "workerGroups": {
                "target": {"gpu": {"count": 1, "product": "A"}},
                "draft": {"enabled": True, "gpu": {"count": 1, "product": "B"}},
            },
        },
        "storage.cache.accessModes: only one node can mount the claim",
    ),
    "placeholders with a ReadWriteOnce claim": (
        {"storage": {"models": ONE_NODE}, "keda": KEDA},
        "write ReadWriteMany for its accessModes",
    ),
    "the CUDA image for AMD GPUs": (
        {"workerGroups": {"target": {"gpu": {"count": 1, "resource": "amd.com/gpu"}}}},
        "set the tag or digest of an image for it",
    ),
    "offline with a model on the Hub": ({"hub": {"offline": True}}, "write its path below /models"),
    "offline with a draft model on the Hub": (
        {
            **with_model(model="/models/a", speculativeConfig=DRAFT),
            "hub": {"offline": True},
        },
        'models[0].speculativeConfig.model: "org/small" would be downloaded',
    ),
    "offline with egress to every API server": (
        {
            **with_model(model="/models/a"),
            "hub": {"offline": True},
            "ray": {"autoscaler": {"enabled": True}},
        },
        "write the address of the Kubernetes API server",
    ),
    "Ray without authentication for any namespace": (
        {"ray": {"authMode": "disabled"}},
        "networkPolicy.operator[0].namespaceSelector",
    ),
    "a password without a Redis": (
        {"ray": {"gcsFaultTolerance": {"password": {"name": "redis"}}}},
        "write HOST:PORT of the Redis, or remove password.name",
    ),
    "a utilization of a pool that is not scaled": (
        with_model(
            replicas=2,
            speculativeConfig=DRAFT,
            draft={"minWorkers": 2, "maxWorkers": 2, "targetUtilization": 0.5},
        ),
        "the number of workers is fixed; leave it out",
    ),
    "a volume beside a Redis": (
        {"ray": {"gcsFaultTolerance": {"redisAddress": "redis:6379", "volume": {"size": "1Gi"}}}},
        "remove one of both",
    ),
    "a storage class without a volume": (
        {"ray": {"gcsFaultTolerance": {"volume": {"storageClassName": "fast"}}}},
        "write a size, such as 1Gi",
    ),
    "a volume for a Ray that has no RocksDB": (
        {"ray": {"version": "2.56.1", "gcsFaultTolerance": {"volume": {"size": "1Gi"}}}},
        "use 2.57.0 or later, or a Redis",
    ),
    "a Redis that no pod may reach": (
        {
            "ray": {"gcsFaultTolerance": {"redisAddress": "redis:6379"}},
            "networkPolicy": {"redis": []},
        },
        "networkPolicy.redis: no peer is allowed",
    ),
    "an ingress without a host": ({"ingress": {"enabled": True}}, "write the service's host name"),
    "the same host for HTTP and gRPC": (
        {"ingress": {"enabled": True, "host": "a.b", "grpcHost": "a.b"}},
        "write another name, or leave it empty",
    ),
    "routes without a gateway": ({"gatewayApi": {"enabled": True}}, "list one"),
    "a gateway without a class": (
        {"gatewayApi": {"enabled": True, "gateway": {"create": True}}},
        "kubectl get gatewayclass",
    ),
    "the same host name in both routes": (
        {
            "gatewayApi": {
                "enabled": True,
                "parentRefs": [{"name": "a"}],
                "hostnames": ["a.b"],
                "grpcHostnames": ["a.b"],
            }
        },
        "write another name",
    ),
    "a gRPC route without a host name": (
        {"gatewayApi": {"enabled": True, "parentRefs": [{"name": "a"}]}},
        "add a name",
    ),
    "TLS in the pods and at the ingress": (
        {
            "tls": {"mode": "sidecar", "secretName": "a"},
            "ingress": {"enabled": True, "host": "a.b"},
        },
        "write gateway",
    ),
    "TLS mode gateway without a gateway": (
        {"tls": {"mode": "gateway", "secretName": "a"}},
        "or write sidecar or none",
    ),
    "TLS without a certificate": (
        {"tls": {"mode": "sidecar"}},
        "or set tls.certManager.enabled",
    ),
    "a certificate without TLS": (
        {"tls": {"certManager": {"enabled": True, "issuerName": "a"}}},
        "write tls.mode: gateway or sidecar",
    ),
    "a certificate without an issuer": (
        {"tls": {"mode": "sidecar", "certManager": {"enabled": True}}},
        "kubectl get issuer",
    ),
    "an old cluster that ends before the drain": (
        {"drainSeconds": 300},
        "must be at least drainSeconds (300)",
    ),
    "KEDA without Prometheus": (
        {"keda": {**KEDA, "prometheusUrl": ""}},
        "write the URL of Prometheus",
    ),
    "placeholders without a priority class": (
        {"keda": {**KEDA, "priorityClassName": ""}},
        "set a PriorityClass",
    ),
    "placeholders for a disabled group": (
        {"keda": {**KEDA, "group": "draft"}},
        "write one of workerGroups",
    ),
}


@pytest.mark.parametrize("name", BY_THE_SCHEMA)
def test_the_schema_rejects(name):
    values, key = BY_THE_SCHEMA[name]
    with pytest.raises(Exception, match="- at '") as rejected:
        render(values)
    assert key in str(rejected.value)


@pytest.mark.parametrize("name", BY_A_TEMPLATE)
def test_a_template_rejects_with_the_fix(name):
    values, message = BY_A_TEMPLATE[name]
    with pytest.raises(Exception, match="execution error") as rejected:
        render(values)
    assert message in str(rejected.value)
