"""Tests of the Ingresses."""

from cluster.config.serve_config import ServeConfig
from tests.k8s.rendering import of_kind, render
from tests.k8s.value_sets import VALUE_SETS

NGINX = "nginx.ingress.kubernetes.io"


def test_nginx_leaves_the_limits_of_requests_to_the_service():
    """Its own are 1 MiB for a body, and a minute for a response that is not streamed."""
    http, grpc = of_kind(render(VALUE_SETS["ingress with tls"]), "Ingress")
    for each in (http, grpc):
        annotations = each["metadata"]["annotations"]
        largest = max(ServeConfig.http_max_body_mib, ServeConfig.grpc_max_message_mib)
        assert annotations[f"{NGINX}/proxy-body-size"] == f"{largest + 1}m"
        assert annotations[f"{NGINX}/proxy-read-timeout"] == "3600"
    protocol = f"{NGINX}/backend-protocol"
    assert grpc["metadata"]["annotations"][protocol] == "GRPC"
    assert protocol not in http["metadata"]["annotations"]


def test_annotations_of_users_are_added():
    given = {f"{NGINX}/proxy-body-size": "65m", "a": "b"}
    ingress = {**VALUE_SETS["ingress"]["ingress"], "annotations": given}
    [http] = of_kind(render({"ingress": ingress}), "Ingress")
    assert http["metadata"]["annotations"] == {f"{NGINX}/proxy-read-timeout": "3600", **given}
