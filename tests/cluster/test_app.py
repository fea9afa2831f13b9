# Modules: cluster.serve.application
"""The builder that a Serve config file names, and the files under deploy/serve that name it."""

from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from cluster.app import application_settings, build
from cluster.config.serve_config import ServeConfig
from cluster.control.plane import ControlPlaneReplica
from cluster.serve.application import GRPC_SERVICER_FUNCTIONS
from specdec.types.errors import InvalidValueError
from tests.specdec.heads import fitted_medusa_dir

CONFIG_FILES = sorted(Path("deploy/serve").glob("*.yaml"))


def test_the_builder_does_not_read_the_model(tmp_path):
    """The model may be on other nodes, or not downloaded yet."""
    application = build({"model": "org/of-another-node", "state_dir": str(tmp_path)})
    config, control_plane, located, draft_pool = application._bound_deployment.init_args
    assert config["model"] == "org/of-another-node"
    assert config["ingress"] == "serve"
    assert control_plane._bound_deployment.name == "ControlPlane"
    assert located is None
    assert draft_pool is None


@pytest.mark.parametrize(
    ("settings", "fewest", "most"),
    [
        ({"replicas_per_draft_worker": 2}, 3, 3),
        ({"min_draft_workers": 2, "max_draft_workers": 2}, 2, 2),
        ({"max_draft_workers": 4, "target_draft_utilization": 0.5}, 1, 4),
    ],
)
def test_replicas_that_share_draft_workers_have_a_pool_of_them(tmp_path, settings, fewest, most):
    draft = {"method": "draft_model", "model": "org/small"}
    args = {"model": "org/big", "speculative_config": draft, "num_replicas": 5}
    bound = build({**args, **settings})._bound_deployment
    pool = bound.init_args[-1]._bound_deployment
    assert pool.name == "DraftPool"
    scaling = pool._deployment_config.autoscaling_config
    if fewest == most:
        assert scaling is None
        assert pool._deployment_config.num_replicas == most
    else:
        assert (scaling.min_replicas, scaling.max_replicas) == (fewest, most)
        assert scaling.target_ongoing_requests == 0.5
    assert pool.init_args == (bound.init_args[0], None)
    [bundle] = pool._replica_config.placement_group_bundles
    assert bundle["CPU"] == 0.35
    assert len(bound._replica_config.placement_group_bundles) == 2


def test_a_directory_on_the_node_of_the_builder_gives_method_and_target(tiny_model_dir, tmp_path):
    """So that the ControlPlane knows the methods, and the placement group the workers."""
    head = fitted_medusa_dir(tiny_model_dir, tmp_path / "head", [list(range(3, 30))])
    args = {"model": str(tiny_model_dir), "speculative_config": {"model": str(head)}}
    config, control_plane, *_ = build(args)._bound_deployment.init_args
    assert config["speculative_config"]["method"] == "medusa"
    _, limits, *_ = control_plane._bound_deployment.init_args
    assert limits.methods == ("medusa",)


def test_the_state_directory_is_resolved_on_the_head_node(monkeypatch, tmp_path):
    """The deploying user may be another one, on another machine."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "deployer"))
    _, control_plane, *_ = build({})._bound_deployment.init_args
    arguments = control_plane._bound_deployment.init_args
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "head"))
    ControlPlaneReplica(*arguments)
    assert [each.name for each in tmp_path.iterdir()] == ["head"]


def test_names_of_vllm_are_accepted(tmp_path):
    args = {"dtype": "half", "num-speculative-tokens": 5, "state_dir": str(tmp_path)}
    config, *_ = build(args)._bound_deployment.init_args
    assert config["dtype"] == "float16"
    assert config["speculative_config"]["num_speculative_tokens"] == 5


def test_the_deployment_follows_the_arguments(tmp_path):
    application = build({"max_replicas": 3, "drain_timeout_s": 7, "state_dir": str(tmp_path)})
    deployment = application._bound_deployment
    assert deployment._deployment_config.autoscaling_config.max_replicas == 3
    assert deployment._deployment_config.graceful_shutdown_timeout_s == 17


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"modle": "x"}, "did you mean model"),
        ({"http_port": 80}, "http_port is 80; it must be left out; set http_options"),
        ({"grpc_port": 80}, "grpc_options"),
        ({"host": "0.0.0.0"}, "http_options"),
        ({"port": 80}, "port is 80; it must be left out; set http_options"),
        ({"grpc_max_message_mib": 1}, "left out"),
        ({"tls_cert_file": "cert.pem"}, "terminate TLS"),
        ({"ingress": "embedded"}, "ingress is 'embedded'; it must be serve"),
        ({"device": "auto"}, "cpu or cuda"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0"),
    ],
)
def test_invalid_and_unsupported_settings_are_rejected(args, message):
    with pytest.raises(InvalidValueError, match=message):
        build(args)


@pytest.mark.parametrize("path", CONFIG_FILES, ids=lambda path: path.stem)
def test_serve_and_the_builder_accept_the_config_files(path):
    content = yaml.safe_load(path.read_text())
    schema = ServeDeploySchema.model_validate(content)
    assert schema.grpc_options.grpc_servicer_functions == list(GRPC_SERVICER_FUNCTIONS)
    routes = [each.route_prefix for each in schema.applications]
    assert routes[0] == "/"
    assert len(set(routes)) == len(routes)
    for application in schema.applications:
        assert application.import_path == "cluster.app:build"
        ServeConfig.from_sources(application_settings(application.args))


def test_there_are_config_files():
    assert CONFIG_FILES
