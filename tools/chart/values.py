"""All values of the chart; values.yaml, its schema and the README's table derive from these."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tools.chart.kinds import KubernetesObject, Labels, Values
from tools.chart.models_values import Hub, Model, ModelImage, Storage
from tools.chart.operation_values import (
    EndpointPicker,
    GatewayApi,
    Ingress,
    Keda,
    Monitoring,
    PodDisruptionBudget,
    Service,
    Tests,
)
from tools.chart.pod_values import Head, Ray, Upgrade, WorkerGroup
from tools.chart.security_values import Auth, NetworkPolicy, Security, ServiceAccount, Tls

_DEMO = "smollm2-135m-instruct"


class Image(Values):
    """The container image of all pods of the service."""

    repository: str = Field("specdec/specdec", min_length=1, description="Registry and repository")
    tag: str = Field(
        "",
        description="Tag; empty: the chart's appVersion, with the suffix -cuda if a worker group "
        "has GPUs",
    )
    digest: str = Field(
        "", pattern=r"^(sha256:[0-9a-f]{64})?$", description="Digest; overrides the tag"
    )
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        "IfNotPresent", description="Pull policy"
    )
    pull_secrets: list[str] = Field(
        default_factory=list, description="Secrets for a private registry"
    )


def _worker_groups() -> dict[str, WorkerGroup]:
    return {"target": WorkerGroup(), "draft": WorkerGroup(enabled=False, role="draft")}


class ChartValues(Values):
    """All values of the chart."""

    name_override: str = Field("", description="Name to use instead of the chart's")
    fullname_override: str = Field(
        "", description="Name prefix of all objects; empty: derived from release and chart"
    )
    common_labels: Labels = Field(
        default_factory=dict, description="Additional labels of all objects except pods"
    )
    image: Image = Field(default_factory=Image, description="Container image of the service")
    models: list[Model] = Field(
        default_factory=lambda: [Model(name=_DEMO, model=_DEMO)],
        min_length=1,
        description="Models to serve",
    )
    model_images: list[ModelImage] = Field(
        default_factory=list, description="OCI images that contain models"
    )
    hub: Hub = Field(default_factory=Hub, description="Hugging Face Hub")
    storage: Storage = Field(default_factory=Storage, description="Volumes")
    ip_family: Literal["IPv4", "IPv6"] = Field(
        "IPv4",
        description="IP family of the pods; with IPv6 servers listen on ::, and those that clients "
        "call take IPv4 too where a pod has both",
    )
    drain_seconds: int = Field(
        30,
        ge=0,
        le=86400,
        description="Seconds that running requests have to finish when a pod or replica stops; "
        "Serve's timeouts, the preStop hooks and the termination grace period derive from it",
    )
    migration_seconds: int = Field(
        300,
        ge=0,
        le=86400,
        description="Seconds that a stopping worker pod keeps its replicas until replacements are "
        "ready on other pods, loading of models included; the drain follows",
    )
    head: Head = Field(
        default_factory=Head,
        description="Head pod. The endpoint picker and the pod of `helm test` have its "
        "nodeSelector, tolerations, affinity and priorityClassName too",
    )
    worker_groups: dict[str, WorkerGroup] = Field(
        default_factory=_worker_groups, description="Worker pods, by name of the group"
    )
    ray: Ray = Field(default_factory=Ray, description="Ray cluster")
    upgrade: Upgrade = Field(default_factory=Upgrade, description="Upgrades of the Ray cluster")
    service: Service = Field(default_factory=Service, description="Service that clients call")
    auth: Auth = Field(default_factory=Auth, description="Authentication")
    tls: Tls = Field(default_factory=Tls, description="TLS")
    service_account: ServiceAccount = Field(
        default_factory=ServiceAccount, description="ServiceAccount of the pods"
    )
    security: Security = Field(default_factory=Security, description="Security contexts")
    network_policy: NetworkPolicy = Field(
        default_factory=NetworkPolicy, description="Network policies"
    )
    ingress: Ingress = Field(default_factory=Ingress, description="Ingress")
    gateway_api: GatewayApi = Field(default_factory=GatewayApi, description="Gateway API")
    endpoint_picker: EndpointPicker = Field(
        default_factory=EndpointPicker,
        description="InferencePool and endpoint picker, for gateways with the inference extension",
    )
    monitoring: Monitoring = Field(default_factory=Monitoring, description="Monitoring")
    pod_disruption_budget: PodDisruptionBudget = Field(
        default_factory=PodDisruptionBudget, description="Pod disruption budgets"
    )
    keda: Keda = Field(default_factory=Keda, description="Overprovisioning of nodes with KEDA")
    tests: Tests = Field(default_factory=Tests, description="`helm test`")
    extra_env: list[KubernetesObject] = Field(
        default_factory=list,
        description="Environment variables of Ray's containers, in addition to the chart's or in "
        "place of those of the same name",
    )
    extra_volumes: list[KubernetesObject] = Field(
        default_factory=list,
        description="Volumes of Ray's pods, likewise, except those of storage",
    )
    extra_volume_mounts: list[KubernetesObject] = Field(
        default_factory=list,
        description="Volume mounts of Ray's containers, likewise by mountPath",
    )
