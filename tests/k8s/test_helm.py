"""Tests with Helm 3 and 4: every example and combination of values, on Kubernetes 1.29 to 1.34."""

import json
import subprocess

import pytest
import yaml

from tests.k8s.binaries import HELMS, helm, template, tool
from tests.k8s.rendering import CHART, EXAMPLES, parsed
from tests.k8s.test_wrong_values import BY_A_TEMPLATE, BY_THE_SCHEMA
from tests.k8s.validity import VERSIONS, check
from tests.k8s.value_sets import VALUE_SETS

pytestmark = pytest.mark.slow

CASES = {
    **{path.stem: yaml.safe_load(path.read_text()) for path in EXAMPLES},
    **VALUE_SETS,
}
RANDOM = ("Secret",)
WRONG = {**BY_THE_SCHEMA, **BY_A_TEMPLATE}

EXPLAINED = {
    # Accepted findings of checkov, each with its reason.
    "CKV_K8S_8": "liveness: a placeholder sleeps, and a test ends",
    "CKV_K8S_9": "readiness: the same",
    "CKV_K8S_15": "pulling always: tags of versions do not move; image.pullPolicy has it",
    "CKV_K8S_43": "digests: image.digest has them",
}


@pytest.fixture
def values_file(tmp_path):
    def write(values):
        path = tmp_path / "values.yaml"
        path.write_text(json.dumps(values))
        return path

    return write


@pytest.mark.parametrize("name", CASES)
def test_both_render_the_same_valid_objects(name, values_file):
    path = values_file(CASES[name])
    rendered = []
    for which in HELMS:
        linted = helm(which, "lint", "--strict", CHART, "--values", path)
        assert linted.returncode == 0, linted.stdout + linted.stderr
        made = template(which, path)
        assert made.returncode == 0, made.stderr
        rendered.append([each for each in parsed(made.stdout) if each["kind"] not in RANDOM])
    assert sorted(map(json.dumps, rendered[0])) == sorted(map(json.dumps, rendered[1]))
    for version in VERSIONS:
        for each in rendered[0]:
            check(each, version)


@pytest.mark.parametrize("which", HELMS)
def test_both_reject_every_invalid_value(which, values_file):
    for values, message in WRONG.values():
        made = template(which, values_file(values))
        assert made.returncode != 0, values
        assert message in made.stderr, values


@pytest.mark.parametrize("which", HELMS)
def test_kubernetes_before_1_29_is_rejected(which, values_file):
    made = template(which, values_file({}), "--kube-version", "1.28.0")
    assert "incompatible with Kubernetes" in made.stderr


@pytest.mark.parametrize("which", HELMS)
def test_the_package_contains_only_the_chart(which, tmp_path):
    packed = helm(which, "package", CHART, "--destination", tmp_path)
    assert packed.returncode == 0, packed.stderr
    [archive] = tmp_path.glob("*.tgz")
    assert archive.stat().st_size < 100_000


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_checkov_reports_only_accepted_findings(path, tmp_path):
    checkov = tool("checkov/bin/checkov")
    manifest = tmp_path / "objects.yaml"
    manifest.write_text(_with_bare_pods(parsed(template("helm4", path).stdout)))
    flags = ["--framework", "kubernetes", "--quiet", "--skip-download", "--output", "json"]
    found = subprocess.run(
        [checkov, "--file", manifest, *flags], capture_output=True, text=True, timeout=240
    )
    report = json.loads(found.stdout)
    assert report["summary"]["passed"] > 100
    failed = {
        (each["check_id"], each["check_name"], each["resource"])
        for each in report["results"]["failed_checks"]
    }
    assert [each for each in sorted(failed) if each[0] not in EXPLAINED] == []


def _with_bare_pods(objects):
    """Return the objects with the pods of RayServices added, since checkov ignores RayService."""
    pods = []
    for each in objects:
        if each["kind"] == "RayService":
            spec = each["spec"]["rayClusterConfig"]
            for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
                name = group.get("groupName", "head")
                metadata = {**group["template"]["metadata"], "name": name, "namespace": "llm"}
                pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}
                pods.append({**pod, "spec": group["template"]["spec"]})
    return yaml.safe_dump_all([*objects, *pods])
