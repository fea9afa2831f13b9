"""Values of the Service, ingress, monitoring, disruption budgets and `helm test`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tools.chart.kinds import Count, Duration, KubernetesObject, Labels, Port, Resources, Values

_NGINX = "nginx.ingress.kubernetes.io"
_MILLISECONDS = r"0*[1-9][0-9]{0,6}(\.[0-9]+)?"
"""A decimal number from 1; the picker knows the upper limit."""


class Service(Values):
    """The Service that clients call; KubeRay creates it as RELEASE-serve-svc."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = Field(
        "ClusterIP", description="Type of the Service"
    )
    http_port: Port = Field(8000, description="Port of the HTTP API")
    grpc_port: Port = Field(9000, description="Port of gRPC")
    annotations: Labels = Field(default_factory=dict, description="Annotations of the Service")


class Ingress(Values):
    """An Ingress for HTTP and one for gRPC."""

    enabled: bool = Field(False, description="Create Ingresses")
    class_name: str = Field("", description="Ingress class; empty for the default class")
    host: str = Field("", description="Host name for HTTP; required")
    grpc_host: str = Field("", description="Host name for gRPC; empty: no Ingress for gRPC")
    annotations: Labels = Field(
        default_factory=lambda: {f"{_NGINX}/proxy-read-timeout": "3600"},
        description="Annotations of both. By default NGINX waits an hour instead of a minute for "
        "the response, and forwards all requests that the service accepts (proxy-body-size)",
    )
    grpc_annotations: Labels = Field(
        default_factory=lambda: {f"{_NGINX}/backend-protocol": "GRPC"},
        description="Annotations of the gRPC Ingress, which select gRPC as the backend protocol",
    )


class Gateway(Values):
    """A Gateway that belongs to the release."""

    create: bool = Field(False, description="Create a Gateway")
    class_name: str = Field("", description="Gateway class; required with create")
    annotations: Labels = Field(default_factory=dict, description="Annotations of the Gateway")


class GatewayApi(Values):
    """Gateway API: an HTTPRoute and a GRPCRoute."""

    enabled: bool = Field(False, description="Create the routes")
    gateway: Gateway = Field(default_factory=Gateway, description="Gateway of this release")
    parent_refs: list[KubernetesObject] = Field(
        default_factory=list, description="Existing Gateways; required unless gateway.create"
    )
    hostnames: list[str] = Field(
        default_factory=list, description="Host names for HTTP; empty for any"
    )
    grpc_hostnames: list[str] = Field(
        default_factory=list, description="Host names for gRPC; must not overlap with hostnames"
    )
    request_timeout: Duration = Field("3600s", description="Timeout of a request")


class ScaledObject(Values):
    """KEDA's ScaledObject for the pods of the pool, by the picker's number of replicas needed."""

    enabled: bool = Field(False, description="Create a ScaledObject, with endpointPicker.slo")
    api_version: str = Field("apps/v1", min_length=1, description="API version of the workload")
    kind: str = Field("Deployment", min_length=1, description="Kind of the workload")
    name: str = Field(
        "",
        description="Name of the workload whose pods endpointPicker.selector selects, one replica "
        "each; required. A RayService cannot be scaled so",
    )
    min_replicas: int = Field(1, ge=1, le=1024, description="Minimum number of replicas")
    max_replicas: int = Field(4, ge=1, le=1024, description="Maximum number of replicas")


class EndpointPicker(Values):
    """An InferencePool of Gateway API's inference extension, and its endpoint picker.

    Ray Serve's proxies choose among the replicas of a release, so each release has one replica, and
    the pool selects the pods of several releases.
    """

    enabled: bool = Field(False, description="Create the InferencePool and the picker")
    selector: Labels = Field(
        default_factory=dict,
        description="Labels of the pods of all replicas, such as those in podLabels of their "
        "worker groups; empty: those of this release's target pods. Set it in each release of the "
        "pool: its network policy then admits pickers of other releases",
    )
    failure_mode: Literal["FailClose", "FailOpen"] = Field(
        "FailClose",
        description="What the gateway does with requests while the picker does not respond: reject "
        "them, or choose itself",
    )
    self_signed_tls: bool = Field(
        True, description="TLS from the gateway to the picker, with a certificate that it makes"
    )
    scrape_interval_ms: int = Field(
        100, ge=20, le=10000, description="Milliseconds between two scrapes of a replica"
    )
    max_waiting: int = Field(
        0,
        ge=0,
        description="Queued requests of every replica at which requests are refused with 429; 0: "
        "no limit",
    )
    slo: str = Field(
        "",
        pattern=rf"^(ttft:{_MILLISECONDS} tpot:{_MILLISECONDS})?$",
        description="Latency objective in milliseconds, such as ttft:2000 tpot:40, by whose "
        "expected goodput replicas are chosen and counted; empty: by tokens, not counted",
    )
    scaled_object: ScaledObject = Field(
        default_factory=ScaledObject, description="Scaling of the pool by KEDA"
    )
    resources: Resources = Field(
        default_factory=lambda: Resources(
            requests={"cpu": "500m", "memory": "256Mi"}, limits={"cpu": "2", "memory": "1Gi"}
        ),
        description="Resources of the picker",
    )


class ServiceMonitor(Values):
    """Scraping configuration for the Prometheus operator."""

    enabled: bool = Field(False, description="Create ServiceMonitors")
    interval: Duration = Field("15s", description="Scrape interval")
    labels: Labels = Field(
        default_factory=dict, description="Labels by which Prometheus selects it"
    )


class Rules(Values):
    """Alerting and recording rules for the Prometheus operator."""

    enabled: bool = Field(False, description="Create a PrometheusRule")
    labels: Labels = Field(
        default_factory=dict, description="Labels by which Prometheus selects it"
    )


class Dashboard(Values):
    """The Grafana dashboard."""

    enabled: bool = Field(False, description="Create a ConfigMap with the dashboard")
    labels: Labels = Field(
        default_factory=lambda: {"grafana_dashboard": "1"},
        description="Labels by which Grafana's sidecar selects it",
    )
    annotations: Labels = Field(default_factory=dict, description="Annotations, such as the folder")


class Monitoring(Values):
    """Monitoring with Prometheus and Grafana."""

    service_monitor: ServiceMonitor = Field(default_factory=ServiceMonitor, description="Scraping")
    rules: Rules = Field(default_factory=Rules, description="Alerts")
    dashboard: Dashboard = Field(default_factory=Dashboard, description="Grafana dashboard")


class PodDisruptionBudget(Values):
    """Limits on voluntary disruptions, such as draining a node."""

    enabled: bool = Field(True, description="Create PodDisruptionBudgets")
    max_unavailable_workers: Count = Field(
        1,
        description="Maximum number of unavailable pods in each worker group, of those that are "
        "certain to have a replica",
    )
    protect_head: bool = Field(
        False, description="Never evict the head; evicting it ends the Ray cluster"
    )


class Keda(Values):
    """Overprovisioning of nodes: KEDA scales placeholder pods by queue and time to first token.

    Ray Serve scales replicas, since RayService has no scale subresource. Placeholders make the node
    autoscaler add nodes early; worker pods then preempt them.
    """

    enabled: bool = Field(False, description="Create a ScaledObject")
    prometheus_url: str = Field(
        "", pattern=r"^(https?://.+)?$", description="URL of Prometheus; required"
    )
    group: str = Field(
        "target", min_length=1, description="Worker group whose pods they reserve for"
    )
    max_placeholders: int = Field(1, ge=1, le=1024, description="Maximum number of placeholders")
    waiting_requests: int = Field(4, ge=1, description="Number of waiting requests per placeholder")
    first_token_seconds: float = Field(
        2.0, gt=0, description="p95 time to first token above which a placeholder is added"
    )
    priority_class_name: str = Field(
        "", description="Class of negative priority, so that worker pods preempt them; required"
    )
    polling_interval_seconds: int = Field(15, ge=1, description="Polling interval")
    cooldown_seconds: int = Field(300, ge=0, description="Delay before scaling to zero")


class Expected(Values):
    """State of speculation that `helm test` expects."""

    mode: Literal["", "auto", "on", "off"] = Field(
        "", description="Mode; empty: any, as operators have set it"
    )


class Tests(Values):
    """`helm test`, which streams over gRPC and HTTP and checks the state of speculation."""

    enabled: bool = Field(True, description="Create the test pod")
    prompt: str = Field("Why is the sky blue?", min_length=1, description="Prompt")
    max_tokens: int = Field(16, ge=1, le=4096, description="Maximum number of output tokens")
    timeout_seconds: int = Field(120, ge=1, description="Timeout of a call")
    server_name: str = Field(
        "",
        pattern=r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?$",
        description="Name in the certificate, with tls.mode sidecar; empty: the Service's name, "
        "RELEASE-serve-svc.NAMESPACE.svc",
    )
    expected_speculation: Expected = Field(
        default_factory=Expected, description="Expected state of speculation"
    )
    resources: Resources = Field(
        default_factory=lambda: Resources(
            requests={"cpu": "250m", "memory": "512Mi"}, limits={"cpu": "1", "memory": "1Gi"}
        ),
        description="Resources of the test pod",
    )
