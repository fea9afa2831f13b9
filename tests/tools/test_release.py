"""The release: its checks and files, and the workflow, whose steps run here as far as they can."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.deploy.dockerfile import stages
from tools import release

ROOT = Path(__file__).parents[2]
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
JOBS = WORKFLOW["jobs"]
STEPS = [(job, step) for job, body in JOBS.items() for step in body["steps"]]
CHANGELOG = """# Changelog

## 1.2.4, unreleased

Later.

## 1.2.3, 2026-11-26

### Added

- Something.

## 1.2.2, 2026-10-01

Earlier.
"""
CHART = "apiVersion: v2\nname: specdec\nversion: 1.2.3\nappVersion: 1.2.3\n"


@pytest.fixture
def root(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    chart = tmp_path / "k8s" / "specdec"
    chart.mkdir(parents=True)
    (chart / "Chart.yaml").write_text(CHART)
    return tmp_path


def test_a_tag_that_agrees_with_all_versions_is_released(root):
    release.check("v1.2.3", root)
    assert release.notes("v1.2.3", root) == "### Added\n\n- Something.\n"


@pytest.mark.parametrize(
    ("tag", "path", "content", "message"),
    [
        ("1.2.3", None, "", "a tag must be v followed by a version such as 1.2.3 (got 1.2.3)"),
        ("v1.2", None, "", "(got v1.2)"),
        ("v1.2.4", None, "", "pyproject.toml must be 1.2.4, as in the tag (got 1.2.3)"),
        ("v1.2.3", "k8s/specdec/Chart.yaml", CHART.replace("version: 1", "version: 2", 1),
         "version of Chart.yaml must be 1.2.3, as in the tag (got 2.2.3)"),
        ("v1.2.3", "k8s/specdec/Chart.yaml", "version: 1.2.3\n", "appVersion of Chart.yaml"),
        ("v1.2.3", "CHANGELOG.md", "# Changelog\n", "must have one section of 1.2.3 (got 0)"),
        ("v1.2.3", "CHANGELOG.md", "## 1.2.3, unreleased\n", "must have a date (got unreleased)"),
    ],
)  # fmt: skip
def test_one_that_does_not_is_rejected(root, tag, path, content, message):
    if path is not None:
        (root / path).write_text(content)
    with pytest.raises(release.ReleaseError) as error:
        release.check(tag, root)
    assert message in str(error.value)


def test_the_changelog_has_a_section_of_the_present_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert "### Added" in release.notes(f"v{version}")


def test_the_chart_of_a_release_refers_to_its_images(tmp_path):
    release.chart("ghcr.io/example/specdec", tmp_path)
    copied = yaml.safe_load((tmp_path / "specdec" / "values.yaml").read_text())
    source = yaml.safe_load((ROOT / "k8s" / "specdec" / "values.yaml").read_text())
    assert copied["image"].pop("repository") == "ghcr.io/example/specdec"
    assert source["image"].pop("repository") == "specdec/specdec"
    assert copied == source
    names = {path.name for path in (tmp_path / "specdec").iterdir()}
    assert names == {path.name for path in (ROOT / "k8s" / "specdec").iterdir()}


def step_of(job, name):
    [step] = [each for each in JOBS[job]["steps"] if each.get("name") == name]
    return step


def run_step(step, folder, **environment):
    """Run a step as GitHub does: `bash -e`, in its working directory."""
    return subprocess.run(
        ["bash", "-e", "-c", step["run"]],
        cwd=folder / step.get("working-directory", "."),
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
    )


def test_only_jobs_that_publish_may_write():
    assert WORKFLOW["permissions"] == {"contents": "read"}
    writing = {name: body["permissions"] for name, body in JOBS.items() if "permissions" in body}
    assert set(writing) == {"images", "registry", "publish"}
    for name in ("registry", "publish"):
        assert JOBS[name]["if"] == "github.ref_type == 'tag'"
    tagged = [step for step in JOBS["images"]["steps"] if "login-action" in step.get("uses", "")]
    assert [step["if"] for step in tagged] == ["github.ref_type == 'tag'"]
    [push] = [step for step in JOBS["images"]["steps"] if step.get("id") == "push"]
    assert "push=${{ github.ref_type == 'tag' }}" in push["with"]["outputs"]


def test_nothing_is_published_before_everything_is_built_and_tested():
    assert set(JOBS["registry"]["needs"]) == {"sdist", "bare", "chart", "images"}
    assert set(JOBS["publish"]["needs"]) == {"sdist", "wheel", "bare", "chart", "registry"}
    assert JOBS["bare"]["needs"] == ["wheel"]


def test_the_wheel_has_kernels_and_is_tested_without_a_compiler():
    build = str(JOBS["wheel"])
    assert "SPECDEC_PRECOMPILE_KERNELS" in build
    assert "--exclude libgomp.so.1" in build, "torch's OpenMP is the one to use"
    assert "slim" in JOBS["bare"]["container"]


def test_the_client_has_a_wheel_that_is_published_too():
    build = JOBS["sdist"]["steps"]
    assert any("tools.install.client_wheel dist" in each.get("run", "") for each in build)
    [files] = [each["with"] for each in build if "upload-artifact" in each.get("uses", "")]
    assert "dist/*.whl" in files["path"]
    patterns = [each["with"].get("pattern") for each in JOBS["publish"]["steps"] if "with" in each]
    assert files["name"].startswith("python-")
    assert "python-*" in patterns


def test_each_image_is_built_for_two_architectures_and_that_for_cpus_answers_on_both():
    built = JOBS["images"]["strategy"]["matrix"]["include"]
    runners = {(each["flavor"], each["platform"]): each["runner"] for each in built}
    flavors = {path.suffix[1:] for path in (ROOT / "deploy" / "docker").glob("Dockerfile.*")}
    assert set(runners) == {(each, platform) for each in flavors for platform in ("amd64", "arm64")}
    assert all(runners[each, "arm64"].endswith("-arm") for each in flavors), "not under emulation"
    assert "specdec generate" in step_of("images", "serve and answer")["run"]
    for flavor in flavors:
        health = [each.word for each in stages(ROOT / f"deploy/docker/Dockerfile.{flavor}")[-1]]
        assert "HEALTHCHECK" in health, "what the step waits for"


def test_the_tags_of_images_are_those_that_the_chart_uses():
    tagged = JOBS["registry"]["strategy"]["matrix"]["include"]
    assert {each["flavor"]: each["suffix"] for each in tagged} == {"cpu": "", "cuda": "-cuda"}


def test_one_tag_names_the_images_of_all_architectures(tmp_path):
    folder = tmp_path / "digests" / "cpu"
    folder.mkdir(parents=True)
    for digest in ("aa", "bb"):
        (folder / digest).touch()
    docker, log = tmp_path / "docker", tmp_path / "calls"
    docker.write_text(f'#!/bin/sh\necho "$@" >> {log}\necho sha256:cc\n')
    docker.chmod(0o755)
    step = step_of("registry", "one tag for all architectures")
    done = run_step(
        step,
        tmp_path,
        PATH=f"{tmp_path}:/usr/bin:/bin",
        GITHUB_REPOSITORY_OWNER="Example",
        GITHUB_REF_NAME="v1.2.3",
        GITHUB_OUTPUT=str(tmp_path / "output"),
        FLAVOR="cpu",
        SUFFIX="",
    )
    assert done.returncode == 0, done.stderr
    created, _ = log.read_text().splitlines()
    name = "ghcr.io/example/specdec"
    images = f"{name}@sha256:aa {name}@sha256:bb"
    assert created == f"buildx imagetools create --tag {name}:1.2.3 {images}"
    assert (tmp_path / "output").read_text() == f"name={name}\ndigest=sha256:cc\n"


def test_the_checksums_cover_every_file_of_the_release(tmp_path):
    for path in ("python/a.whl", "python/b.tar.gz", "chart/specdec-1.2.3.tgz"):
        file = tmp_path / "dist" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(path)
    assert run_step(step_of("publish", "checksums"), tmp_path).returncode == 0
    folder = tmp_path / "dist" / "release"
    verify = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    assert subprocess.run(verify, cwd=folder, capture_output=True).returncode == 0
    listed = {line.split()[1] for line in (folder / "SHA256SUMS").read_text().splitlines()}
    assert listed == {"a.whl", "b.tar.gz", "specdec-1.2.3.tgz"}
    (folder / "a.whl").write_text("another")
    assert subprocess.run(verify, cwd=folder, capture_output=True).returncode == 1
    signed = step_of("publish", "sign the checksums and the files")
    assert signed["with"]["subject-path"] == "dist/release/*"


def test_commands_of_the_workflow_exist():
    text = "\n".join(step["run"] for _, step in STEPS if "run" in step)
    assert set(re.findall(r"tools\.release (\w+)", text)) == {"check", "notes", "chart"}
    assert (ROOT / "k8s" / "specdec" / "examples" / "laptop.yaml").exists()
    assert shutil.which("sha256sum")


def test_a_publication_that_failed_midway_can_run_again():
    *before, last = JOBS["publish"]["steps"]
    assert "gh release create" in last["run"], "it fails where there is a release"
    assert "gh release create" not in str(before)
    [index] = [each for each in before if "pypi-publish" in each.get("uses", "")]
    assert index["with"]["skip-existing"] is True
