"""Values that say how the service is reached, watched and kept up."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tools.chart.kinds import Count, Duration, KubernetesObject, Labels, Port, Resources, Values


class Service(Values):
    """The Service that clients call; KubeRay makes it, named RELEASE-serve-svc."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = Field("ClusterIP", description="Type")
    http_port: Port = Field(8000, description="Port of the HTTP API")
    grpc_port: Port = Field(9000, description="Port of gRPC")
    annotations: Labels = Field(default_factory=dict, description="Annotations")


class Ingress(Values):
    """An Ingress for HTTP and one for gRPC."""

    enabled: bool = Field(False, description="Whether there are some")
    class_name: str = Field("", description="Ingress class; empty for the default one")
    host: str = Field("", description="Host name of HTTP; needed")
    grpc_host: str = Field("", description="Host name of gRPC; empty for no gRPC by ingress")
    annotations: Labels = Field(default_factory=dict, description="Of both")
    grpc_annotations: Labels = Field(
        default_factory=lambda: {"nginx.ingress.kubernetes.io/backend-protocol": "GRPC"},
        description="Of gRPC's: what tells the controller that the backend speaks gRPC",
    )


class Gateway(Values):
    """A Gateway of the release's own."""

    create: bool = Field(False, description="Whether the chart makes one")
    class_name: str = Field("", description="Class of it; needed then")
    annotations: Labels = Field(default_factory=dict, description="Annotations of it")


class GatewayApi(Values):
    """Gateway API: an HTTPRoute and a GRPCRoute."""

    enabled: bool = Field(False, description="Whether there are routes")
    gateway: Gateway = Field(default_factory=Gateway, description="One of the release's own")
    parent_refs: list[KubernetesObject] = Field(
        default_factory=list, description="Gateways that there are; needed unless gateway.create"
    )
    hostnames: list[str] = Field(default_factory=list, description="Of HTTP; empty for any")
    grpc_hostnames: list[str] = Field(
        default_factory=list, description="Of gRPC; no name may be in both lists"
    )
    request_timeout: Duration = Field("3600s", description="How long an answer may take")


class ServiceMonitor(Values):
    """Scraping by the Prometheus operator."""

    enabled: bool = Field(False, description="Whether there is one")
    interval: Duration = Field("15s", description="Time between scrapes")
    labels: Labels = Field(default_factory=dict, description="By which Prometheus selects it")


class Rules(Values):
    """Alerts by the Prometheus operator."""

    enabled: bool = Field(False, description="Whether there is a PrometheusRule")
    labels: Labels = Field(default_factory=dict, description="By which Prometheus selects it")


class Dashboard(Values):
    """Grafana's dashboard."""

    enabled: bool = Field(False, description="Whether there is a ConfigMap with it")
    labels: Labels = Field(
        default_factory=lambda: {"grafana_dashboard": "1"}, description="What the sidecar looks for"
    )
    annotations: Labels = Field(default_factory=dict, description="Such as the folder")


class Monitoring(Values):
    """What watches the service."""

    service_monitor: ServiceMonitor = Field(default_factory=ServiceMonitor, description="Scraping")
    rules: Rules = Field(default_factory=Rules, description="Alerts")
    dashboard: Dashboard = Field(default_factory=Dashboard, description="Grafana's dashboard")


class PodDisruptionBudget(Values):
    """How many pods may be away for maintenance."""

    enabled: bool = Field(True, description="Whether there are budgets")
    max_unavailable_workers: Count = Field(
        1,
        description="Pods of each worker group that may be away, of those that are sure to have a "
        "replica",
    )
    protect_head: bool = Field(
        False, description="Whether the head may never be evicted, which ends the cluster"
    )


class Keda(Values):
    """Warm nodes ahead of need: KEDA keeps placeholder pods by queue and time to first token.

    Replicas are Ray Serve's to scale, since RayService has no scale subresource. Placeholders have
    the node autoscaler bring nodes early; worker pods then displace them.
    """

    enabled: bool = Field(False, description="Whether there is a ScaledObject")
    prometheus_url: str = Field(
        "", pattern=r"^(https?://.+)?$", description="Prometheus to ask; needed"
    )
    group: str = Field("target", min_length=1, description="Worker group that they stand in for")
    max_placeholders: int = Field(1, ge=1, le=1024, description="Most nodes kept warm")
    waiting_requests: int = Field(
        4, ge=1, description="Waiting requests for which there is one placeholder"
    )
    first_token_seconds: float = Field(
        2.0, gt=0, description="95th percentile of the time to the first token that calls for one"
    )
    priority_class_name: str = Field(
        "", description="Class of negative priority, so that worker pods displace them; needed"
    )
    polling_interval_seconds: int = Field(15, ge=1, description="Time between two looks")
    cooldown_seconds: int = Field(300, ge=0, description="How long they stay after the last need")


class Expected(Values):
    """How speculation has to stand for `helm test` to pass."""

    mode: Literal["", "auto", "on", "off"] = Field(
        "", description="Mode; empty: as operators have set it"
    )


class Tests(Values):
    """`helm test`: streams over gRPC and HTTP, and looks at the state of speculation."""

    enabled: bool = Field(True, description="Whether there is a test")
    prompt: str = Field("Why is the sky blue?", min_length=1, description="What it asks")
    max_tokens: int = Field(16, ge=1, le=4096, description="Tokens of an answer")
    timeout_seconds: int = Field(120, ge=1, description="How long a call may take")
    server_name: str = Field(
        "",
        pattern=r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?$",
        description="Name in the certificate of tls.mode sidecar; empty: the Service's, "
        "RELEASE-serve-svc.NAMESPACE.svc",
    )
    expected_speculation: Expected = Field(
        default_factory=Expected, description="What it looks for"
    )
    resources: Resources = Field(
        default_factory=lambda: Resources(
            requests={"cpu": "250m", "memory": "512Mi"}, limits={"cpu": "1", "memory": "1Gi"}
        ),
        description="What it takes",
    )
