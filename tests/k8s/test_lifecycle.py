"""Tests the lifecycle of a release, with Helm and a fake API server."""

import json

import pytest
import yaml

from tests.k8s.api_server import running_api_server
from tests.k8s.binaries import HELMS, helm
from tests.k8s.rendering import CHART
from tests.k8s.value_sets import GPU, KEDA

pytestmark = pytest.mark.slow

PLAIN = {"storage": {"models": {"type": "claim"}}}
CHANGED = {
    **PLAIN,
    "models": [
        {"name": "one", "model": "smollm2-135m-instruct", "settings": {"max_num_seqs": 8}},
        {"name": "two", "model": "smollm2-135m-instruct"},
    ],
}
SCHEMA_FAULT = {"extraVolumes": [{"name": "x", "emptyDirectory": {}}]}


class Release:
    """A release that one version of Helm manages."""

    def __init__(self, which, folder, kubeconfig):
        self._which, self._folder, self._kubeconfig = which, folder, kubeconfig

    def run(self, verb, *arguments):
        flags = ["--kubeconfig", self._kubeconfig, "--namespace", "llm"]
        return helm(self._which, verb, "chat", *arguments, *flags)

    def apply(self, verb, values):
        path = self._folder / "values.yaml"
        path.write_text(json.dumps(values))
        return self.run(verb, CHART, "--values", path, "--disable-openapi-validation")


@pytest.fixture(params=HELMS)
def release(request, tmp_path):
    with running_api_server(tmp_path) as (api, kubeconfig):
        release = Release(request.param, tmp_path, kubeconfig)
        release.api = api
        yield release


def succeeded(done):
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def service(release):
    return release.api.one("RayService", "chat-specdec")["spec"]


def models_of(release):
    config = yaml.safe_load(service(release)["serveConfigV2"])
    return [each["args"]["served_model_name"] for each in config["applications"]]


def test_from_install_to_uninstall(release):
    installed = succeeded(release.apply("install", PLAIN))
    assert "helm test chat" in installed.stdout
    assert models_of(release) == ["smollm2-135m-instruct"]
    keys = release.api.one("Secret", "chat-specdec-api-keys")["data"]
    pods = service(release)["rayClusterConfig"]

    succeeded(release.apply("upgrade", CHANGED))
    assert models_of(release) == ["one", "two"]
    # No new cluster, and the keys are unchanged.
    assert service(release)["rayClusterConfig"] == pods
    assert release.api.one("Secret", "chat-specdec-api-keys")["data"] == keys

    succeeded(release.run("rollback", "1"))
    assert models_of(release) == ["smollm2-135m-instruct"]
    assert release.api.one("Secret", "chat-specdec-api-keys")["data"] == keys

    claims = ["chat-specdec-models", "chat-specdec-state"]
    assert release.api.names("PersistentVolumeClaim") == claims
    gone = succeeded(release.run("uninstall"))
    assert "kept due to the resource policy" in gone.stdout + gone.stderr
    assert release.api.names("PersistentVolumeClaim") == claims
    left = {each["kind"] for each in release.api.objects.values()}
    assert left == {"PersistentVolumeClaim"}

    # A new installation uses the kept objects.
    again = release.apply("install", {**PLAIN, **_with_claims(claims)})
    succeeded(again)


def _with_claims(claims):
    models, state = claims
    return {
        "storage": {
            "models": {"type": "claim", "existingClaim": models},
            "state": {"type": "claim", "existingClaim": state},
        }
    }


def test_a_key_with_another_name_is_added_to_the_existing_secret(release):
    succeeded(release.apply("install", {}))
    secrets = ("chat-specdec-api-keys", "chat-specdec-admin-token")
    before = [release.api.one("Secret", name)["data"] for name in secrets]
    renamed = {"auth": {"apiKeys": {"key": "k.yaml"}, "adminToken": {"key": "token"}}}
    succeeded(release.apply("upgrade", renamed))
    after = [release.api.one("Secret", name)["data"] for name in secrets]
    assert [set(each) for each in after] == [{"api-keys.yaml", "k.yaml"}, {"admin-token", "token"}]
    for old, new in zip(before, after, strict=True):
        assert old.items() <= new.items()


def test_an_upgrade_deletes_objects_that_are_disabled(release):
    values = {
        "models": [{"name": "one", "model": "smollm2-135m-instruct", "replicas": 2}],
        "workerGroups": {"target": {**GPU, "replicas": 2, "maxReplicas": 2}},
    }
    succeeded(release.apply("install", values))
    assert release.api.names("PodDisruptionBudget") == ["chat-specdec-target"]
    succeeded(release.apply("upgrade", {"networkPolicy": {"enabled": False}}))
    assert release.api.names("PodDisruptionBudget") == []
    assert release.api.names("NetworkPolicy") == []


def test_objects_that_the_api_rejects_are_not_installed(release):
    """Verify that the fake API server validates objects."""
    refused = release.apply("install", SCHEMA_FAULT)
    assert refused.returncode != 0
    assert "emptyDirectory" in refused.stderr


def test_an_error_names_a_kind_that_the_cluster_lacks(release):
    values = {"keda": KEDA}
    refused = release.apply("install", values)
    assert refused.returncode != 0
    assert "ScaledObject" in refused.stderr
