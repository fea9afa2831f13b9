"""Values that say on which pods, nodes and GPUs the models run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tools.chart.kinds import Count, KubernetesObject, Labels, Resources, Values


class Scheduling(Values):
    """Where pods of a group may go; Kubernetes' own fields."""

    node_selector: Labels = Field(default_factory=dict, description="Labels that nodes must have")
    tolerations: list[KubernetesObject] = Field(
        default_factory=list, description="Taints of nodes that are borne"
    )
    affinity: KubernetesObject = Field(default_factory=dict, description="Affinity of the pods")
    topology_spread_constraints: list[KubernetesObject] = Field(
        default_factory=list,
        description="How pods are spread; without labelSelector, the group's",
    )
    runtime_class_name: str = Field("", description="Runtime class, such as nvidia")
    priority_class_name: str = Field("", description="Priority class of the pods")
    pod_labels: Labels = Field(default_factory=dict, description="Further labels of the pods")
    pod_annotations: Labels = Field(default_factory=dict, description="Annotations of the pods")
    ray_start_params: Labels = Field(
        default_factory=dict, description="Further flags of `ray start`, without their dashes"
    )


class Head(Scheduling):
    """The pod that keeps the cluster together: Ray's control store, Serve's controller, a proxy."""

    schedulable: bool = Field(
        False, description="Whether models may run on it too, as on a laptop without worker groups"
    )
    resources: Resources = Field(
        default_factory=lambda: Resources(
            requests={"cpu": "2", "memory": "4Gi"}, limits={"cpu": "2", "memory": "4Gi"}
        ),
        description="What the head takes",
    )


class Gpu(Values):
    """The GPUs of a pod."""

    count: int = Field(0, ge=0, le=64, description="GPUs of each pod; 0 for CPUs alone")
    resource: str = Field(
        "nvidia.com/gpu", pattern=r"^[a-z0-9.-]+/[a-z0-9.-]*gpu$", description="Their resource name"
    )
    product: str = Field("", description="Kind of GPU, as productLabel of a node says it; any")
    product_label: str = Field(
        "nvidia.com/gpu.product", min_length=1, description="Label of nodes that says the kind"
    )


class WorkerGroup(Scheduling):
    """Pods of one kind, on which Ray places shards and draft workers."""

    enabled: bool = Field(True, description="Whether there is the group")
    role: Literal["target", "draft", "any"] = Field(
        "target",
        description="What it is meant for. A draft group gets no requests from outside",
    )
    replicas: Count = Field(1, description="Pods to start with")
    min_replicas: Count = Field(1, description="Fewest pods, for Ray's autoscaler")
    max_replicas: Count = Field(1, description="Most pods, for Ray's autoscaler")
    idle_timeout_seconds: int = Field(
        0,
        ge=0,
        description="How long a pod must be idle to be given up; 0: as ray.autoscaler",
    )
    gpu: Gpu = Field(default_factory=Gpu, description="GPUs of each pod")
    resources: Resources = Field(
        default_factory=lambda: Resources(
            requests={"cpu": "4", "memory": "8Gi"}, limits={"cpu": "4", "memory": "8Gi"}
        ),
        description="What each pod takes, GPUs aside",
    )


class RayAutoscaler(Values):
    """Ray's autoscaler, which adds and gives up worker pods as Serve needs them."""

    enabled: bool = Field(False, description="Whether it runs, as a sidecar of the head")
    version: Literal["v1", "v2"] = Field("v2", description="Which of Ray's autoscalers")
    idle_timeout_seconds: int = Field(
        300, ge=1, description="How long a worker pod must be idle to be given up"
    )
    upscaling_mode: Literal["Default", "Aggressive", "Conservative"] = Field(
        "Default", description="How many pods are asked for at once"
    )
    resources: Resources = Field(
        default_factory=lambda: Resources(
            requests={"cpu": "500m", "memory": "512Mi"}, limits={"cpu": "500m", "memory": "512Mi"}
        ),
        description="What the sidecar takes",
    )


class Ray(Values):
    """The Ray cluster below the service."""

    version: str = Field(
        "", pattern=r"^([0-9]+\.[0-9]+\.[0-9]+)?$", description="Ray of the image; empty: as built"
    )
    auth_mode: Literal["token", "disabled"] = Field(
        "token", description="token: who lacks the cluster's token cannot talk to Ray"
    )
    auth_secret_name: str = Field(
        "", description="Secret with the token as auth_token; empty lets KubeRay make one"
    )
    autoscaler: RayAutoscaler = Field(default_factory=RayAutoscaler, description="Of worker pods")


class Upgrade(Values):
    """What a change of pods does; a change of models alone is always made in place."""

    strategy: Literal["NewCluster", "None"] = Field(
        "NewCluster",
        description="NewCluster: a whole one beside the present, with twice the GPUs for a while; "
        "None: once the RayCluster is deleted",
    )
    old_cluster_seconds: int = Field(
        60, ge=0, description="How long the old cluster stays after the switch; at least the drain"
    )
