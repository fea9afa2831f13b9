"""Values of the head, the worker groups, Ray and upgrades."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tools.chart.kinds import (
    Count,
    KubernetesObject,
    Labels,
    OptionalName,
    Resources,
    SecretKey,
    Values,
)


class Scheduling(Values):
    """Scheduling of a group's pods; the fields are those of Kubernetes."""

    node_selector: Labels = Field(default_factory=dict, description="Node selector of the pods")
    tolerations: list[KubernetesObject] = Field(
        default_factory=list, description="Tolerations of the pods"
    )
    affinity: KubernetesObject = Field(default_factory=dict, description="Affinity of the pods")
    topology_spread_constraints: list[KubernetesObject] = Field(
        default_factory=list,
        description="Spread constraints; labelSelector defaults to that of the group",
    )
    runtime_class_name: str = Field("", description="Runtime class, such as nvidia")
    priority_class_name: str = Field("", description="Priority class of the pods")
    pod_labels: Labels = Field(default_factory=dict, description="Additional labels of the pods")
    pod_annotations: Labels = Field(default_factory=dict, description="Annotations of the pods")
    ray_start_params: Labels = Field(
        default_factory=dict, description="Additional flags of `ray start`, without dashes"
    )


class Head(Scheduling):
    """The head pod: Ray's global control store, Serve's controller, and a proxy."""

    schedulable: bool = Field(
        False, description="Run models on the head too, for example without worker groups"
    )
    resources: Resources = Field(
        default_factory=lambda: Resources(
            requests={"cpu": "2", "memory": "4Gi"}, limits={"cpu": "2", "memory": "4Gi"}
        ),
        description="Resources of the head",
    )


class Gpu(Values):
    """The GPUs of a pod."""

    count: int = Field(0, ge=0, le=64, description="Number of GPUs per pod; 0: CPU only")
    resource: str = Field(
        "nvidia.com/gpu",
        pattern=r"^[a-z0-9.-]+/([a-z0-9.-]*gpu(\.shared)?|mig-[0-9]+[cg][a-z0-9.]*)$",
        description="Resource name, such as nvidia.com/mig-3g.40gb for slices of a GPU",
    )
    product: str = Field(
        "", description="Required value of the node label productLabel; empty: any"
    )
    product_label: str = Field(
        "nvidia.com/gpu.product", min_length=1, description="Node label that names the GPU model"
    )


class WorkerGroup(Scheduling):
    """A group of identical worker pods, on which Ray places target and draft workers."""

    enabled: bool = Field(True, description="Create the group")
    role: Literal["target", "draft", "any"] = Field(
        "target",
        description="Workers to run there. Pods of a draft group do not receive client requests",
    )
    replicas: Count = Field(1, description="Initial number of pods")
    min_replicas: Count = Field(1, description="Minimum number of pods, for Ray's autoscaler")
    max_replicas: Count = Field(1, description="Maximum number of pods, for Ray's autoscaler")
    idle_timeout_seconds: int = Field(
        0,
        ge=0,
        description="Idle time after which a pod is removed; 0: as ray.autoscaler",
    )
    gpu: Gpu = Field(default_factory=Gpu, description="GPUs of each pod")
    resources: Resources = Field(
        default_factory=lambda: Resources(
            requests={"cpu": "4", "memory": "8Gi"}, limits={"cpu": "4", "memory": "8Gi"}
        ),
        description="Resources of each pod, without GPUs. Ray counts CPUs by the limit, or by the "
        "request without one",
    )


class RayAutoscaler(Values):
    """Ray's autoscaler, which adds and removes worker pods as Serve needs them."""

    enabled: bool = Field(False, description="Run it as a sidecar of the head")
    version: Literal["v1", "v2"] = Field("v2", description="Version of the autoscaler")
    idle_timeout_seconds: int = Field(
        300, ge=1, description="Idle time after which a worker pod is removed"
    )
    upscaling_mode: Literal["Default", "Aggressive", "Conservative"] = Field(
        "Default", description="How fast pods are added; see KubeRay's upscalingMode"
    )
    resources: Resources = Field(
        default_factory=lambda: Resources(
            requests={"cpu": "500m", "memory": "512Mi"}, limits={"cpu": "500m", "memory": "512Mi"}
        ),
        description="Resources of the sidecar",
    )


class RedisPassword(SecretKey):
    """Reference to the password in an existing Secret."""

    key: str = Field("password", description="Key in the Secret", min_length=1)


class GcsVolume(Values):
    """A volume of the head pod, which KubeRay claims for each Ray cluster and deletes with it."""

    size: str = Field(
        "",
        pattern=r"^([1-9][0-9]*[KMGT]i)?$",
        description="Size, such as 1Gi; empty: no volume. Alpha: needs KubeRay 1.7 with the "
        "feature gate GCSFaultToleranceEmbeddedStorage; an older one ignores it",
    )
    storage_class_name: OptionalName = Field(
        "",
        description="Storage class whose volumes the nodes of a new head can attach; empty for the "
        "default one",
    )


class GcsFaultTolerance(Values):
    """A place for the tables of Ray's global control store, which then outlive the head pod.

    Replicas keep running while KubeRay replaces a head pod that is lost. Each Ray cluster has its
    own key prefix in a Redis, and KubeRay removes its keys when the cluster is deleted.
    """

    redis_address: str = Field(
        "",
        pattern=r"^((rediss?://)?[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?:[0-9]{1,5})?$",
        description="HOST:PORT of a Redis, with prefix rediss:// for TLS; empty: a lost head pod "
        "ends the cluster. `networkPolicy.redis` must include it",
    )
    password: RedisPassword = Field(
        default_factory=RedisPassword, description="Password of the Redis"
    )
    volume: GcsVolume = Field(
        default_factory=GcsVolume, description="Volume in place of a Redis, for RocksDB"
    )


class Ray(Values):
    """The Ray cluster of the service."""

    version: str = Field(
        "",
        pattern=r"^([0-9]+\.[0-9]+\.[0-9]+)?$",
        description="Ray version of the image; empty: the chart's",
    )
    auth_mode: Literal["token", "disabled"] = Field(
        "token", description="token: connections to Ray require the cluster's token"
    )
    auth_secret_name: str = Field(
        "", description="Secret with the key auth_token; empty: KubeRay creates one"
    )
    autoscaler: RayAutoscaler = Field(
        default_factory=RayAutoscaler, description="Autoscaler of worker pods"
    )
    gcs_fault_tolerance: GcsFaultTolerance = Field(
        default_factory=GcsFaultTolerance, description="Survival of a lost head pod"
    )


class Upgrade(Values):
    """Upgrades that change pods; a change of models alone is always applied in place."""

    strategy: Literal["NewCluster", "None"] = Field(
        "NewCluster",
        description="NewCluster: start a second cluster and switch to it, which needs twice the "
        "GPUs meanwhile; None: apply the change when the RayCluster is deleted. KubeRay 1.7's "
        "incremental upgrade is not offered: it moves no gRPC traffic",
    )
    old_cluster_seconds: int = Field(
        60,
        ge=0,
        description="Delay between switch and deletion of the old cluster; at least the drain",
    )
