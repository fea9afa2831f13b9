"""Tests of the Ingresses."""

import pytest

from cluster.config.serve_config import ServeConfig
from tests.k8s.rendering import of_kind, render
from tests.k8s.value_sets import VALUE_SETS, with_model

NGINX = "nginx.ingress.kubernetes.io"


@pytest.mark.parametrize(("max_body_mib", "forwarded_mib"), [(None, 17), (64, 65), (4, 17)])
def test_nginx_leaves_the_limits_of_requests_to_the_service(max_body_mib, forwarded_mib):
    """Its own are 1 MiB for a body, and a minute for a response that is not streamed."""
    assert max(ServeConfig.http_max_body_mib, ServeConfig.grpc_max_message_mib) < 17
    settings = {} if max_body_mib is None else {"http_max_body_mib": max_body_mib}
    values = {**VALUE_SETS["ingress with tls"], **with_model(settings=settings)}
    http, grpc = of_kind(render(values), "Ingress")
    for each in (http, grpc):
        annotations = each["metadata"]["annotations"]
        assert annotations[f"{NGINX}/proxy-body-size"] == f"{forwarded_mib}m"
        assert annotations[f"{NGINX}/proxy-read-timeout"] == "3600"
    protocol = f"{NGINX}/backend-protocol"
    assert grpc["metadata"]["annotations"][protocol] == "GRPC"
    assert protocol not in http["metadata"]["annotations"]


def test_annotations_of_users_are_added():
    given = {f"{NGINX}/proxy-body-size": "65m", "a": "b"}
    ingress = {**VALUE_SETS["ingress"]["ingress"], "annotations": given}
    [http] = of_kind(render({"ingress": ingress}), "Ingress")
    assert http["metadata"]["annotations"] == {f"{NGINX}/proxy-read-timeout": "3600", **given}
