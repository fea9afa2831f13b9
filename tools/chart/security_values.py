"""Values that say who may do what."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tools.chart.kinds import Duration, KubernetesObject, Labels, Resources, Values

_NAMESPACE_NAME = "kubernetes.io/metadata.name"
"""The label that Kubernetes itself gives every namespace."""


class ServiceAccount(Values):
    """Whom the pods are to Kubernetes."""

    create: bool = Field(True, description="Whether the chart makes it")
    name: str = Field("", description="Its name; empty: of the release")
    annotations: Labels = Field(default_factory=dict, description="Such as a cloud's role")


class Security(Values):
    """What containers may do; the default passes Kubernetes' restricted pod security."""

    pod_security_context: KubernetesObject = Field(
        default_factory=lambda: {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "runAsGroup": 10001,
            "fsGroup": 10001,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        description="Of every pod",
    )
    container_security_context: KubernetesObject = Field(
        default_factory=lambda: {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        description="Of every container",
    )


class Keys(Values):
    """A secret of callers, as a file in the pods."""

    enabled: bool = Field(True, description="Whether callers need one")
    existing_secret: str = Field(
        "", description="Secret that has it; empty: the chart makes one up, and keeps it"
    )


class ApiKeys(Keys):
    """Keys of the OpenAI API and of InferenceService."""

    key: str = Field(
        "api-keys.yaml", min_length=1, description="Key of the Secret: a YAML list of name and key"
    )


class AdminToken(Keys):
    """The operators' token."""

    key: str = Field("admin-token", min_length=1, description="Key of the Secret")


class Auth(Values):
    """What callers have to show, over HTTP and gRPC."""

    api_keys: ApiKeys = Field(default_factory=ApiKeys, description="Keys of callers")
    admin_token: AdminToken = Field(default_factory=AdminToken, description="Operators' token")


class CertManager(Values):
    """A certificate by cert-manager."""

    enabled: bool = Field(False, description="Whether cert-manager makes tls.secretName")
    issuer_kind: Literal["Issuer", "ClusterIssuer"] = Field("Issuer", description="Kind of issuer")
    issuer_name: str = Field("", description="Issuer of the certificate")
    dns_names: list[str] = Field(
        default_factory=list, description="Names beside those of the service in the cluster"
    )
    duration: Duration = Field("2160h", description="How long a certificate is valid")
    renew_before: Duration = Field("360h", description="How long before its end it is made anew")


class Sidecar(Values):
    """Envoy, in every pod that takes requests."""

    image: str = Field("envoyproxy/envoy:v1.35.6", min_length=1, description="Image; has bash")
    resources: Resources = Field(
        default_factory=lambda: Resources(
            requests={"cpu": "250m", "memory": "128Mi"}, limits={"cpu": "1", "memory": "256Mi"}
        ),
        description="What it takes",
    )


class Tls(Values):
    """Where TLS ends, since Ray Serve speaks none."""

    mode: Literal["none", "gateway", "sidecar"] = Field(
        "none",
        description="none: plain text in the cluster; gateway: at ingress or gateway, with "
        "secretName; sidecar: Envoy in the pods, so that nothing is plain outside of one",
    )
    secret_name: str = Field("", description="Secret of type kubernetes.io/tls")
    cert_manager: CertManager = Field(
        default_factory=CertManager, description="Who makes the secret"
    )
    sidecar: Sidecar = Field(default_factory=Sidecar, description="For mode sidecar")


class NetworkPolicy(Values):
    """Who may talk to the pods, and they to whom. Peers are NetworkPolicyPeer objects."""

    enabled: bool = Field(True, description="Whether there is one")
    clients: list[KubernetesObject] = Field(
        default_factory=lambda: [{"podSelector": {}}],
        description="Who may call the service, controllers of Ingresses and Gateways included; by "
        "default pods of its namespace",
    )
    prometheus: list[KubernetesObject] = Field(
        default_factory=lambda: [
            {
                "namespaceSelector": {},
                "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}},
            }
        ],
        description="Who may scrape metrics, with monitoring.serviceMonitor",
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
        description="KubeRay's operator, which submits the applications; by default pods that are "
        "labelled as its Helm chart or its kustomization does, in any namespace",
    )
    dns: list[KubernetesObject] = Field(
        default_factory=lambda: [
            {
                "namespaceSelector": {
                    "matchLabels": {"kubernetes.io/metadata.name": "kube-system"}
                },
            }
        ],
        description="Who answers for names, on port 53",
    )
    hub_cidr: str = Field(
        "0.0.0.0/0",
        pattern=r"^[0-9a-fA-F:.]+/[0-9]+$",
        description="Where models are fetched from, on port 443; not with hub.offline",
    )
    api_server_cidr: str = Field(
        "0.0.0.0/0",
        pattern=r"^[0-9a-fA-F:.]+/[0-9]+$",
        description="Kubernetes' API, on ports 443 and 6443; only for the head, and only with "
        "Ray's autoscaler",
    )
    extra_egress: list[KubernetesObject] = Field(
        default_factory=list, description="Further egress rules, to a trace collector say"
    )
