"""Values of authentication, TLS, pod security and network policies."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tools.chart.kinds import Duration, HostName, KubernetesObject, Labels, Resources, Values

_NAMESPACE_NAME = "kubernetes.io/metadata.name"
"""The label that Kubernetes sets on every namespace."""


class ServiceAccount(Values):
    """The ServiceAccount of the pods."""

    create: bool = Field(True, description="Create the ServiceAccount")
    name: str = Field("", description="Name; empty: the release's")
    annotations: Labels = Field(
        default_factory=dict, description="Annotations, such as a cloud role"
    )


class Security(Values):
    """Security contexts; the defaults meet Kubernetes' restricted pod security standard."""

    pod_security_context: KubernetesObject = Field(
        default_factory=lambda: {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "runAsGroup": 10001,
            "fsGroup": 10001,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        description="Security context of every pod",
    )
    container_security_context: KubernetesObject = Field(
        default_factory=lambda: {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        description="Security context of every container",
    )


class Keys(Values):
    """Credentials of clients in a Secret, which is mounted in the pods."""

    enabled: bool = Field(True, description="Require the credentials")
    existing_secret: str = Field(
        "", description="Existing Secret; empty: the chart generates one, and keeps it on upgrades"
    )


class ApiKeys(Keys):
    """API keys for the OpenAI API and InferenceService."""

    key: str = Field(
        "api-keys.yaml", min_length=1, description="Key in the Secret: a YAML list of name and key"
    )


class AdminToken(Keys):
    """The admin token of operators."""

    key: str = Field("admin-token", min_length=1, description="Key in the Secret")


class Auth(Values):
    """Authentication over HTTP and gRPC."""

    api_keys: ApiKeys = Field(default_factory=ApiKeys, description="API keys of clients")
    admin_token: AdminToken = Field(default_factory=AdminToken, description="Admin token")
    allowed_hosts: list[HostName] = Field(
        default_factory=list,
        description="Host names of the HTTP API besides those of the Service, the Ingress and the "
        'Gateway, such as llm.example.com or *.example.com; "*" allows every name. Checked against '
        "DNS rebinding if this is not empty, or without apiKeys",
    )


class CertManager(Values):
    """A certificate that cert-manager issues."""

    enabled: bool = Field(False, description="Create tls.secretName with cert-manager")
    issuer_kind: Literal["Issuer", "ClusterIssuer"] = Field("Issuer", description="Kind of issuer")
    issuer_name: str = Field("", description="Issuer of the certificate")
    dns_names: list[str] = Field(
        default_factory=list, description="DNS names besides those of the Service in the cluster"
    )
    duration: Duration = Field("2160h", description="Validity of the certificate")
    renew_before: Duration = Field("360h", description="Renewal time before expiry")


class Sidecar(Values):
    """The Envoy sidecar of every pod that receives client requests."""

    image: str = Field(
        "envoyproxy/envoy:v1.35.6", min_length=1, description="Image; must contain bash"
    )
    resources: Resources = Field(
        default_factory=lambda: Resources(
            requests={"cpu": "250m", "memory": "128Mi"}, limits={"cpu": "1", "memory": "256Mi"}
        ),
        description="Resources of the sidecar",
    )


class Tls(Values):
    """TLS termination, which Ray Serve does not support itself."""

    mode: Literal["none", "gateway", "sidecar"] = Field(
        "none",
        description="none: plain text; gateway: TLS ends at the Ingress or Gateway, with "
        "secretName; sidecar: TLS ends at Envoy in each pod, so traffic between pods and clients "
        "is encrypted",
    )
    secret_name: str = Field("", description="Secret of type kubernetes.io/tls")
    cert_manager: CertManager = Field(
        default_factory=CertManager, description="Certificate by cert-manager"
    )
    sidecar: Sidecar = Field(default_factory=Sidecar, description="Envoy, for mode sidecar")


class NetworkPolicy(Values):
    """Network policies of the pods. Peers are NetworkPolicyPeer objects."""

    enabled: bool = Field(True, description="Create NetworkPolicies")
    clients: list[KubernetesObject] = Field(
        default_factory=lambda: [{"podSelector": {}}],
        description="Peers that may call the service, including Ingress and Gateway controllers; "
        "by default all pods of the namespace",
    )
    prometheus: list[KubernetesObject] = Field(
        default_factory=lambda: [
            {
                "namespaceSelector": {},
                "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}},
            }
        ],
        description="Peers that may scrape metrics, with monitoring.serviceMonitor",
    )
    keda: list[KubernetesObject] = Field(
        default_factory=lambda: [
            {
                "namespaceSelector": {"matchLabels": {_NAMESPACE_NAME: "keda"}},
                "podSelector": {"matchLabels": {"app": "keda-operator"}},
            }
        ],
        description="KEDA's operator, with endpointPicker.scaledObject; by default in the "
        "namespace keda",
    )
    operator: list[KubernetesObject] = Field(
        default_factory=lambda: [
            {
                "namespaceSelector": {},
                "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}},
            },
            {
                "namespaceSelector": {},
                "podSelector": {
                    "matchLabels": {
                        "app.kubernetes.io/name": "kuberay",
                        "app.kubernetes.io/component": "kuberay-operator",
                    }
                },
            },
        ],
        description="KubeRay's operator, which submits the applications; by default pods with the "
        "labels of its Helm chart or kustomization, in any namespace",
    )
    dns: list[KubernetesObject] = Field(
        default_factory=lambda: [
            {"namespaceSelector": {"matchLabels": {_NAMESPACE_NAME: name}}}
            for name in ("kube-system", "openshift-dns")
        ],
        description="DNS servers, on ports 53 and 5353; for a cache on the nodes, such as "
        "NodeLocal DNSCache, an ipBlock with its address",
    )
    redis: list[KubernetesObject] = Field(
        default_factory=lambda: [{"podSelector": {}}],
        description="The Redis of ray.gcsFaultTolerance; by default all pods of the namespace, on "
        "its port",
    )
    hub_cidr: str = Field(
        "",
        pattern=r"^([0-9a-fA-F:.]+/[0-9]+)?$",
        description="Hosts from which models are downloaded, on port 443; empty: all of ipFamily. "
        "Unused with hub.offline",
    )
    api_server_cidr: str = Field(
        "",
        pattern=r"^([0-9a-fA-F:.]+/[0-9]+)?$",
        description="Kubernetes API server, on ports 443 and 6443; empty: all of ipFamily. Only "
        "for the head, and only with Ray's autoscaler",
    )
    extra_egress: list[KubernetesObject] = Field(
        default_factory=list,
        description="Additional egress rules, for example to a trace collector",
    )
