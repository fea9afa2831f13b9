"""Combinations of values by name, each with values that no example sets, or not together."""

from __future__ import annotations

from typing import Any

DRAFT = {"method": "draft_model", "model": "org/small", "num_speculative_tokens": 4}
GPU = {"gpu": {"count": 1}}
SECOND = {"name": "second", "model": "smollm2-135m-instruct"}
FIRST = {"name": "first", "model": "smollm2-135m-instruct"}
CLAIM = {"type": "claim"}
HOST_PATH = {"type": "volume", "volume": {"hostPath": {"path": "/srv"}}, "readOnly": True}
ONE_NODE = {**CLAIM, "accessModes": ["ReadWriteOnce"]}
AUTOSCALER = {"ray": {"autoscaler": {"enabled": True}}}


def with_model(**values: Any) -> dict[str, Any]:
    """Return values with one model that has these values."""
    return {"models": [{**FIRST, **values}]}


TLS = {"tls": {"mode": "gateway", "secretName": "cert"}}
INGRESS = {"ingress": {"enabled": True, "host": "llm.example.com"}}
GATEWAY = {
    "gatewayApi": {
        "enabled": True,
        "parentRefs": [{"name": "shared", "namespace": "gateways"}],
        "hostnames": ["llm.example.com"],
        "grpcHostnames": ["grpc.example.com"],
    }
}
KEDA = {"enabled": True, "prometheusUrl": "http://prometheus:9090", "priorityClassName": "low"}

VALUE_SETS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "names": {"nameOverride": "llm", "fullnameOverride": "chat", "commonLabels": {"team": "ml"}},
    "image": {
        "image": {"repository": "r.example.com/specdec", "tag": "2", "pullSecrets": ["a", "b"]}
    },
    "digest": {"image": {"digest": "sha256:" + "0" * 64, "pullPolicy": "Always"}},
    "head only": {"head": {"schedulable": True}, "workerGroups": {"target": {"enabled": False}}},
    "no speculation": with_model(speculativeConfig="none"),
    "lookup": with_model(speculativeConfig={"method": "suffix", "num_speculative_tokens": 7}),
    "draft on cpu": with_model(speculativeConfig=DRAFT),
    "own prefix": {"models": [FIRST, {**SECOND, "routePrefix": "/models/second"}]},
    "three models": {"models": [FIRST, SECOND, {**SECOND, "name": "Org/Third.1"}]},
    "replicas": with_model(replicas=3),
    "serve autoscaling": with_model(autoscaling={"enabled": True, "maxReplicas": 5}),
    "settings": with_model(settings={"max_model_len": 1_000_000, "dtype": "bfloat16"}),
    "gpus": {
        **with_model(tensorParallelSize=4, speculativeConfig=DRAFT),
        "workerGroups": {"target": {"gpu": {"count": 4}}, "draft": {"enabled": True, **GPU}},
    },
    "shared draft workers": {
        **with_model(replicas=3, speculativeConfig=DRAFT, draft={"replicasPerWorker": 3}),
        "workerGroups": {"target": {"gpu": {"count": 3}}, "draft": {"enabled": True, **GPU}},
    },
    "pool of draft workers": {
        **with_model(
            replicas=3,
            speculativeConfig=DRAFT,
            draft={"minWorkers": 2, "maxWorkers": 3, "targetUtilization": 0.6},
        ),
        "workerGroups": {
            "target": {"gpu": {"count": 3}},
            "draft": {"enabled": True, "replicas": 2, "maxReplicas": 2, **GPU},
        },
    },
    "slices of a gpu": {
        "workerGroups": {"target": {"gpu": {"count": 1, "resource": "nvidia.com/mig-3g.40gb"}}}
    },
    "amd gpus": {
        "image": {"repository": "r.example.com/specdec", "tag": "0.1.0-rocm"},
        "workerGroups": {"target": {"gpu": {"count": 2, "resource": "amd.com/gpu"}}},
    },
    "cpu beside gpus": {**with_model(device="cpu"), "workerGroups": {"target": GPU}},
    "more groups": {"workerGroups": {"spot": {"role": "any", "rayStartParams": {"num-cpus": "2"}}}},
    "ray autoscaler": {
        **AUTOSCALER,
        "workerGroups": {"target": {"minReplicas": 0, "maxReplicas": 4, "idleTimeoutSeconds": 60}},
    },
    "ray autoscaler v1": {
        "ray": {"autoscaler": {"enabled": True, "version": "v1", "upscalingMode": "Aggressive"}}
    },
    "scheduling": {
        "workerGroups": {
            "target": {
                "replicas": 2,
                "maxReplicas": 2,
                "nodeSelector": {"pool": "gpu"},
                "tolerations": [{"operator": "Exists"}],
                "affinity": {"nodeAffinity": {}},
                "topologySpreadConstraints": [
                    {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
                ],
                "runtimeClassName": "nvidia",
                "priorityClassName": "high",
                "podLabels": {"billing": "ml"},
                "podAnnotations": {"note": "x"},
            }
        }
    },
    "head affinity": {"head": {"affinity": {"podAffinity": {}}, "podAnnotations": {"a": "b"}}},
    "claims": {"storage": {"models": CLAIM, "cache": {**CLAIM, "keep": False}}},
    "existing claims": {
        "storage": {
            "models": {**CLAIM, "existingClaim": "weights", "readOnly": True},
            "state": {**CLAIM, "existingClaim": "state"},
        }
    },
    "storage class": {"storage": {"state": {"storageClassName": "fast"}}},
    "claims of one node": {
        "storage": {"models": ONE_NODE, "cache": ONE_NODE},
        "workerGroups": {"target": GPU, "draft": {"enabled": True, **GPU}},
    },
    "claims of one node, the head's too": {
        "storage": {"models": ONE_NODE},
        "head": {"schedulable": True},
    },
    "nothing kept": {"storage": {"state": {"type": "emptyDir"}}},
    "other paths": {"storage": {"models": {"mountPath": "/data"}, "cache": {"mountPath": "/c"}}},
    "model images": {
        **with_model(model="/models/a"),
        "modelImages": [
            {"name": "a", "image": "r/a:1"},
            {"name": "b.c", "image": "r/b@sha256:" + "1" * 64, "path": "/weights"},
        ],
    },
    "offline": {
        **with_model(model="/models/a"),
        "hub": {"offline": True},
        "storage": {"models": {**CLAIM, "existingClaim": "weights"}},
    },
    "offline with a directory of the node": {
        **with_model(model="org/name"),
        "hub": {"offline": True},
        "storage": {"models": HOST_PATH},
    },
    "hub": {"hub": {"endpoint": "https://hub.internal", "token": {"name": "hf", "key": "t"}}},
    "long drain": {
        "drainSeconds": 600,
        "migrationSeconds": 3600,
        "upgrade": {"oldClusterSeconds": 900},
    },
    "ipv6": {
        **AUTOSCALER,
        "ipFamily": "IPv6",
        "tls": {"mode": "sidecar", "secretName": "cert"},
    },
    "ipv6 with a picker": {"ipFamily": "IPv6", "endpointPicker": {"enabled": True}},
    "redis": {"ray": {"gcsFaultTolerance": {"redisAddress": "redis:6379"}}},
    "redis with a password": {
        "ray": {
            "gcsFaultTolerance": {
                "redisAddress": "rediss://redis.data.svc.cluster.local:6380",
                "password": {"name": "redis", "key": "secret"},
            }
        },
        "networkPolicy": {"redis": [{"namespaceSelector": {"matchLabels": {"a": "b"}}}]},
    },
    "volume of the head": {
        "ray": {"gcsFaultTolerance": {"volume": {"size": "2Gi", "storageClassName": "fast"}}}
    },
    "ray secret": {"ray": {"authSecretName": "ray", "version": "2.61.0"}},
    "ray open": {
        "ray": {"authMode": "disabled"},
        "networkPolicy": {"operator": [{"namespaceSelector": {"matchLabels": {"a": "b"}}}]},
    },
    "ray open to all": {
        "ray": {"authMode": "disabled"},
        "networkPolicy": {"enabled": False},
    },
    "offline with the autoscaler": {
        **with_model(model="/models/a"),
        **AUTOSCALER,
        "hub": {"offline": True},
        "networkPolicy": {"apiServerCidr": "10.0.0.1/32"},
    },
    "no upgrades": {"upgrade": {"strategy": "None"}},
    "load balancer": {
        "service": {"type": "LoadBalancer", "httpPort": 80, "annotations": {"a": "b"}}
    },
    "existing secrets": {
        "auth": {
            "apiKeys": {"existingSecret": "keys", "key": "k.yaml"},
            "adminToken": {"existingSecret": "admin"},
        }
    },
    "no keys": {"auth": {"apiKeys": {"enabled": False}, "adminToken": {"enabled": False}}},
    "sidecar": {"tls": {"mode": "sidecar", "secretName": "cert"}},
    "sidecar with a public name": {
        "tls": {"mode": "sidecar", "secretName": "cert"},
        "tests": {"serverName": "llm.example.com"},
    },
    "sidecar by cert-manager": {
        "tls": {
            "mode": "sidecar",
            "certManager": {"enabled": True, "issuerName": "ca", "dnsNames": ["llm.internal"]},
        }
    },
    "service account": {"serviceAccount": {"create": False, "name": "runner"}},
    "own account": {"serviceAccount": {"annotations": {"role": "arn"}}},
    "user": {"security": {"podSecurityContext": {"runAsUser": 2000, "fsGroup": 2000}}},
    "writable root": {"security": {"containerSecurityContext": {"readOnlyRootFilesystem": False}}},
    "no network policy": {"networkPolicy": {"enabled": False}},
    "network peers": {
        "networkPolicy": {
            "clients": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
            "prometheus": [{"namespaceSelector": {}}],
            "operator": [],
            "dns": [],
            "extraEgress": [{"ports": [{"port": 4317}]}],
            "hubCidr": "192.0.2.0/24",
        },
        "monitoring": {"serviceMonitor": {"enabled": True}},
    },
    "ingress": {**INGRESS},
    "ingress with tls": {
        **TLS,
        "ingress": {**INGRESS["ingress"], "grpcHost": "grpc.example.com", "className": "nginx"},
    },
    "gateway": {**GATEWAY},
    "own gateway": {
        **TLS,
        "gatewayApi": {
            **GATEWAY["gatewayApi"],
            "gateway": {"create": True, "className": "istio", "annotations": {"a": "b"}},
        },
    },
    "monitoring": {
        "monitoring": {
            "serviceMonitor": {"enabled": True, "interval": "5s", "labels": {"release": "p"}},
            "rules": {"enabled": True, "labels": {"release": "p"}},
            "dashboard": {"enabled": True, "annotations": {"grafana_folder": "LLM"}},
        }
    },
    "monitoring of two": {
        "models": [FIRST, SECOND],
        "monitoring": {"serviceMonitor": {"enabled": True}},
    },
    "budgets": {
        **with_model(replicas=3),
        "workerGroups": {"target": {**GPU, "replicas": 3, "maxReplicas": 3}},
        "podDisruptionBudget": {"protectHead": True},
    },
    "no budgets": {"podDisruptionBudget": {"enabled": False, "protectHead": True}},
    "endpoint picker": {**GATEWAY, "endpointPicker": {"enabled": True}},
    "endpoint picker of several releases": {
        "endpointPicker": {
            "enabled": True,
            "selector": {"pool": "chat"},
            "failureMode": "FailOpen",
            "selfSignedTls": False,
            "scrapeIntervalMs": 50,
            "maxWaiting": 20,
            "slo": "ttft:2000 tpot:40",
            "scaledObject": {"enabled": True, "name": "chat", "maxReplicas": 8},
        },
        "workerGroups": {"target": {"podLabels": {"pool": "chat"}}, "spot": {"role": "any"}},
        "monitoring": {"serviceMonitor": {"enabled": True}},
    },
    "keda": {"keda": KEDA, "workerGroups": {"target": GPU}},
    "tests": {
        "tests": {
            "prompt": 'Answer "yes".',
            "expectedSpeculation": {"mode": "auto"},
            "maxTokens": 4,
        }
    },
    "no tests": {"tests": {"enabled": False}},
    "extras": {
        "extraEnv": [{"name": "OMP_NUM_THREADS", "value": "4"}],
        "extraVolumes": [{"name": "weights", "hostPath": {"path": "/srv"}}],
        "extraVolumeMounts": [{"name": "weights", "mountPath": "/srv"}],
    },
    "extras in place of the chart's": {
        "extraEnv": [{"name": "HF_HOME", "value": "/srv/hub"}],
        "extraVolumes": [{"name": "ray-logs", "hostPath": {"path": "/var/log/ray"}}],
        "extraVolumeMounts": [{"name": "models", "mountPath": "/models", "subPath": "llm"}],
    },
    "as a dependency": {"global": {"storageClass": "x"}},
}
