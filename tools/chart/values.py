"""All values of the chart: the schema, values.yaml and the README's table are made of these."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tools.chart.kinds import KubernetesObject, Labels, Values
from tools.chart.models_values import Hub, Model, ModelImage, Storage
from tools.chart.operation_values import (
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
    """The image of the service, for all of its pods."""

    repository: str = Field("specdec/specdec", min_length=1, description="Registry and repository")
    tag: str = Field(
        "",
        description="Tag; empty: the chart's appVersion, with -cuda behind it where a worker group "
        "has GPUs",
    )
    digest: str = Field(
        "", pattern=r"^(sha256:[0-9a-f]{64})?$", description="Digest, which wins over the tag"
    )
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        "IfNotPresent", description="When to pull it"
    )
    pull_secrets: list[str] = Field(
        default_factory=list, description="Secrets for a registry that asks for a login"
    )


def _worker_groups() -> dict[str, WorkerGroup]:
    return {"target": WorkerGroup(), "draft": WorkerGroup(enabled=False, role="draft")}


class ChartValues(Values):
    """Everything that can be set."""

    name_override: str = Field("", description="Instead of the chart's name")
    fullname_override: str = Field("", description="Instead of the name made of release and chart")
    common_labels: Labels = Field(
        default_factory=dict, description="Further labels of objects, except pods"
    )
    image: Image = Field(default_factory=Image, description="The image of the service")
    models: list[Model] = Field(
        default_factory=lambda: [Model(name=_DEMO, model=_DEMO)],
        min_length=1,
        description="What is served",
    )
    model_images: list[ModelImage] = Field(
        default_factory=list, description="Models that come as OCI images"
    )
    hub: Hub = Field(default_factory=Hub, description="The Hugging Face Hub")
    storage: Storage = Field(default_factory=Storage, description="What is kept, and where")
    drain_seconds: int = Field(
        30,
        ge=0,
        le=86400,
        description="How long running requests have to end when a pod or a replica stops; "
        "Serve's waits, preStop and the termination grace follow from it",
    )
    migration_seconds: int = Field(
        300,
        ge=0,
        le=86400,
        description="How long the replicas of a worker pod that stops are kept for want of others "
        "elsewhere, loading of models included; the drain comes after it",
    )
    head: Head = Field(default_factory=Head, description="The head pod")
    worker_groups: dict[str, WorkerGroup] = Field(
        default_factory=_worker_groups, description="Worker pods, by name of the group"
    )
    ray: Ray = Field(default_factory=Ray, description="The Ray cluster")
    upgrade: Upgrade = Field(default_factory=Upgrade, description="What changes do")
    service: Service = Field(default_factory=Service, description="What clients call")
    auth: Auth = Field(default_factory=Auth, description="What callers have to show")
    tls: Tls = Field(default_factory=Tls, description="Where TLS ends")
    service_account: ServiceAccount = Field(
        default_factory=ServiceAccount, description="Of the pods"
    )
    security: Security = Field(default_factory=Security, description="What containers may do")
    network_policy: NetworkPolicy = Field(
        default_factory=NetworkPolicy, description="Who may talk to whom"
    )
    ingress: Ingress = Field(default_factory=Ingress, description="By Ingress")
    gateway_api: GatewayApi = Field(default_factory=GatewayApi, description="By Gateway API")
    monitoring: Monitoring = Field(default_factory=Monitoring, description="What watches it")
    pod_disruption_budget: PodDisruptionBudget = Field(
        default_factory=PodDisruptionBudget, description="For maintenance of nodes"
    )
    keda: Keda = Field(default_factory=Keda, description="Warm nodes ahead of need")
    tests: Tests = Field(default_factory=Tests, description="`helm test`")
    extra_env: list[KubernetesObject] = Field(
        default_factory=list, description="Further environment of Ray's containers"
    )
    extra_volumes: list[KubernetesObject] = Field(
        default_factory=list, description="Further volumes of Ray's pods"
    )
    extra_volume_mounts: list[KubernetesObject] = Field(
        default_factory=list, description="Where Ray's containers mount them"
    )
