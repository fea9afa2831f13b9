"""Values that could not work are refused before anything is made, with what to write instead."""

import pytest

from tests.k8s.rendering import render
from tests.k8s.value_sets import DRAFT, FIRST, GPU, KEDA, ONE_NODE, with_model

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
    "a word that is none of a setting's": (with_model(settings={"dtype": "fp8"}), "float32"),
    "no models": ({"models": []}, "models"),
    "a model without a name": ({"models": [{"model": "org/name"}]}, "name"),
    "a model's name with spaces": (with_model(name="my model"), "name"),
    "no shards": (with_model(tensorParallelSize=0), "tensorParallelSize"),
    "an unknown device": (with_model(device="tpu"), "device"),
    "an unknown key of speculation": (
        with_model(speculativeConfig={"methods": "ngram"}),
        "speculativeConfig",
    ),
    "an unknown word for speculation": (
        with_model(speculativeConfig="off"),
        "speculativeConfig",
    ),
    "a digest that is none": ({"image": {"digest": "latest"}}, "digest"),
    "a negative drain": ({"drainSeconds": -1}, "drainSeconds"),
    "a port that is none": ({"service": {"httpPort": 70000}}, "httpPort"),
    "a size in words": ({"storage": {"models": {"size": "big"}}}, "size"),
    "an unknown access mode": ({"storage": {"models": {"accessModes": ["RWX"]}}}, "accessModes"),
    "a database that two nodes could write": (
        {"storage": {"state": {"accessModes": ["ReadWriteMany"]}}},
        "accessModes",
    ),
    "an unknown kind of volume": ({"storage": {"cache": {"type": "nfs"}}}, "type"),
    "a resource that is no GPU": (
        {"workerGroups": {"target": {"gpu": {"resource": "cpu"}}}},
        "resource",
    ),
    "an unknown role": ({"workerGroups": {"target": {"role": "verifier"}}}, "role"),
    "an unknown mode of TLS": ({"tls": {"mode": "on"}}, "mode"),
    "an unknown upgrade": ({"upgrade": {"strategy": "Recreate"}}, "strategy"),
    "an upgrade that carries no gRPC": (
        {"upgrade": {"strategy": "NewClusterWithIncrementalUpgrade"}},
        "strategy",
    ),
    "an interval without its unit": (
        {"monitoring": {"serviceMonitor": {"interval": "15"}}},
        "interval",
    ),
}

TWICE = {"models": [FIRST, {**FIRST, "name": "First"}]}
NO_GPUS = with_model(device="cuda")
FOUR_SHARDS = {**with_model(tensorParallelSize=4), "workerGroups": {"target": GPU}}
SPLIT_DRAFT = {**DRAFT, "draft_tensor_parallel_size": 2}
DRAFT_WITHOUT_GPU = {**with_model(speculativeConfig=DRAFT), "workerGroups": {"target": GPU}}

BY_A_TEMPLATE = {
    "two models of one name": (TWICE, "give each a name of its own"),
    "two models of one path": (
        {"models": [FIRST, {**FIRST, "name": "b", "routePrefix": "/"}]},
        "write /b, or leave it empty",
    ),
    "no model at /": (with_model(routePrefix="/a"), "leave it empty for the first"),
    "fewest above most": (
        with_model(autoscaling={"enabled": True, "minReplicas": 3, "maxReplicas": 2}),
        "write at most that",
    ),
    "int8 on GPUs": (
        {**with_model(settings={"quantization": "int8"}), "workerGroups": {"target": GPU}},
        "leave it out, or set models[0].device to cpu",
    ),
    "w8a8 by torch": (
        with_model(settings={"quantization": "w8a8", "kernels": "torch"}),
        "write int8, or leave models[0].settings.kernels out",
    ),
    "nowhere to run": (
        {"workerGroups": {"target": {"enabled": False}}},
        "enable one below workerGroups, or write true",
    ),
    "a group called head": ({"workerGroups": {"head": {}}}, "write another name"),
    "a group's name that Ray does not take": ({"workerGroups": {"A_B": {}}}, "write another"),
    "fewest pods above most": (
        {"workerGroups": {"target": {"minReplicas": 2}}},
        "write at most that",
    ),
    "pods beyond most": ({"workerGroups": {"target": {"replicas": 2}}}, "raise maxReplicas"),
    "pods that nothing adds": (
        {"workerGroups": {"target": {"maxReplicas": 3}}},
        "write 1, or enable ray.autoscaler",
    ),
    "cuda without GPUs": (NO_GPUS, "set gpu.count below workerGroups, or write cpu"),
    "more shards than a pod has GPUs": (FOUR_SHARDS, "or raise a gpu.count"),
    "no GPU left for the draft": (DRAFT_WITHOUT_GPU, "the models take 2 GPUs"),
    "no GPU left for the draft on pods of its role": (
        {
            **with_model(speculativeConfig=DRAFT, replicas=2),
            "workerGroups": {
                "target": {"gpu": {"count": 8}},
                "draft": {"enabled": True, **GPU},
            },
        },
        "on pods with specdec-role=draft the models take 2 GPUs, and those have 1",
    ),
    "targets that would have to go to the draft's pods": (
        {
            **with_model(tensorParallelSize=4, speculativeConfig=SPLIT_DRAFT),
            "workerGroups": {
                "target": {"gpu": {"count": 1}, "replicas": 3, "maxReplicas": 3},
                "draft": {"enabled": True, "gpu": {"count": 4}},
            },
        },
        "models[0].tensorParallelSize: 4 shards have to be in one pod, and the largest with "
        "specdec-role=target has 1 GPUs",
    ),
    "more shards of a draft than a pod has GPUs": (
        {
            **with_model(speculativeConfig=SPLIT_DRAFT),
            "workerGroups": {
                "target": {"gpu": {"count": 4}},
                "draft": {"enabled": True, "gpu": {"count": 1}, "replicas": 4, "maxReplicas": 4},
            },
        },
        "models[0].speculativeConfig.draft_tensor_parallel_size: 2 shards",
    ),
    "a group of one's own that has too few": (
        {
            **with_model(tensorParallelSize=2, settings={"target_labels": "specdec-group=spot"}),
            "workerGroups": {"target": {"gpu": {"count": 8}}, "spot": GPU},
        },
        "the largest with specdec-group=spot has 1 GPUs",
    ),
    "warm nodes with GPUs for models on CPUs": (
        {**with_model(device="cpu"), "workerGroups": {"target": GPU}, "keda": KEDA},
        "no model runs on GPUs",
    ),
    "a claim for an emptyDir": (
        {"storage": {"models": {"existingClaim": "weights"}}},
        "write type: claim",
    ),
    "an empty directory to read": (
        {"storage": {"cache": {"readOnly": True}}},
        "write type: claim, or false",
    ),
    "images copied to where nothing may be written": (
        {
            "modelImages": [{"name": "a", "image": "a"}],
            "storage": {"models": {"type": "claim", "existingClaim": "w", "readOnly": True}},
        },
        "leave modelImages out",
    ),
    "one directory over another": (
        {"storage": {"cache": {"mountPath": "/models"}}},
        "write another path",
    ),
    "a claim of one pod for two": (
        {
            "storage": {"models": {"type": "claim", "accessModes": ["ReadWriteOncePod"]}},
            "workerGroups": {"draft": {"enabled": True}},
        },
        "2 pods mount it, and ReadWriteOncePod is for one; write ReadWriteOnce",
    ),
    "a claim of one node for two kinds of GPU": (
        {
            "storage": {"cache": ONE_NODE},
            "workerGroups": {
                "target": {"gpu": {"count": 1, "product": "A"}},
                "draft": {"enabled": True, "gpu": {"count": 1, "product": "B"}},
            },
        },
        "storage.cache.accessModes: a claim for one node",
    ),
    "warm nodes that workers may not go to": (
        {"storage": {"models": ONE_NODE}, "keda": KEDA},
        "write ReadWriteMany for its accessModes",
    ),
    "CUDA for AMD": (
        {"workerGroups": {"target": {"gpu": {"count": 1, "resource": "amd.com/gpu"}}}},
        "write the tag or digest of an image of your own",
    ),
    "offline without models": ({"hub": {"offline": True}}, "write its path below /models"),
    "offline without the draft model": (
        {
            **with_model(model="/models/a", speculativeConfig=DRAFT),
            "hub": {"offline": True},
        },
        'models[0].speculativeConfig.model: "org/small" has to be fetched',
    ),
    "offline, and the API everywhere": (
        {
            **with_model(model="/models/a"),
            "hub": {"offline": True},
            "ray": {"autoscaler": {"enabled": True}},
        },
        "write the address of Kubernetes' API",
    ),
    "code by whoever is labelled so": (
        {"ray": {"authMode": "disabled"}},
        "networkPolicy.operator[0].namespaceSelector",
    ),
    "an ingress for every host": ({"ingress": {"enabled": True}}, "write the service's name"),
    "one host for HTTP and gRPC": (
        {"ingress": {"enabled": True, "host": "a.b", "grpcHost": "a.b"}},
        "write another, or leave it empty",
    ),
    "routes without a gateway": ({"gatewayApi": {"enabled": True}}, "name one"),
    "a gateway without a class": (
        {"gatewayApi": {"enabled": True, "gateway": {"create": True}}},
        "kubectl get gatewayclass",
    ),
    "one name for both routes": (
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
    "gRPC's route without a name": (
        {"gatewayApi": {"enabled": True, "parentRefs": [{"name": "a"}]}},
        "write one",
    ),
    "TLS in the pods and before them": (
        {
            "tls": {"mode": "sidecar", "secretName": "a"},
            "ingress": {"enabled": True, "host": "a.b"},
        },
        "write gateway",
    ),
    "TLS where nothing would speak it": (
        {"tls": {"mode": "gateway", "secretName": "a"}},
        "or write sidecar or none",
    ),
    "TLS without a certificate": (
        {"tls": {"mode": "sidecar"}},
        "or set tls.certManager.enabled",
    ),
    "a certificate for nobody": (
        {"tls": {"certManager": {"enabled": True, "issuerName": "a"}}},
        "write tls.mode: gateway or sidecar",
    ),
    "a certificate from nobody": (
        {"tls": {"mode": "sidecar", "certManager": {"enabled": True}}},
        "kubectl get issuer",
    ),
    "an old cluster that ends before its requests": (
        {"drainSeconds": 300},
        "write at least that",
    ),
    "KEDA without Prometheus": (
        {"keda": {**KEDA, "prometheusUrl": ""}},
        "write Prometheus' address",
    ),
    "placeholders that do not give way": (
        {"keda": {**KEDA, "priorityClassName": ""}},
        "name a PriorityClass",
    ),
    "placeholders for nobody": ({"keda": {**KEDA, "group": "draft"}}, "write one of workerGroups"),
}


@pytest.mark.parametrize("name", BY_THE_SCHEMA)
def test_the_schema_refuses(name):
    values, what = BY_THE_SCHEMA[name]
    with pytest.raises(Exception, match="- at '") as refused:
        render(values)
    assert what in str(refused.value)


@pytest.mark.parametrize("name", BY_A_TEMPLATE)
def test_a_template_refuses_and_says_what_to_write(name):
    values, advice = BY_A_TEMPLATE[name]
    with pytest.raises(Exception, match="execution error") as refused:
        render(values)
    assert advice in str(refused.value)
