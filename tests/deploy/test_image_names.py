"""Names of the images: in the Dockerfiles, the chart's values and the commands of the docs."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from tests.k8s.rendering import CHART, EXAMPLES, ray_templates, render
from tests.shell_blocks import blocks_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "kubernetes.md"
BUILD = re.compile(r"docker build -f (\S+) -t (\S+)")


def shown_builds(text):
    return dict(BUILD.findall(text))


BUILDS = shown_builds(PAGE.read_text())


def images_of(values):
    """Return the images of Ray's containers."""
    templates = ray_templates(render(values)).values()
    return {
        container["image"]
        for each in templates
        for container in each["spec"]["containers"]
        if container["name"].startswith("ray")
    }


def shown_values():
    """Return the values that the page passes to helm with --set, as nested objects."""
    commands = [each for block in blocks_of(PAGE, "bash") for each in block.commands]
    [words] = [shlex.split(each) for each in commands if "--set" in each]
    given = dict(words[n + 1].split("=") for n, word in enumerate(words) if word == "--set")
    secrets = given["image.pullSecrets"].strip("{}").split(",")
    return {"image": {"repository": given["image.repository"], "pullSecrets": secrets}}


def test_the_builds_of_the_page_are_those_of_the_dockerfiles():
    files = sorted((ROOT / "deploy" / "docker").glob("Dockerfile.*"))
    heads = "".join(each.read_text().partition("\n")[0] for each in files)
    assert list(BUILDS) == [str(each.relative_to(ROOT)) for each in files]
    assert shown_builds(heads) == BUILDS


def test_the_images_of_the_page_have_the_version_of_the_chart():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    name = f"{values['image']['repository']}:{chart['appVersion']}"
    assert list(BUILDS.values()) == [name, f"{name}-cuda"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_of_the_chart_uses_an_image_that_the_page_builds(path):
    values = yaml.safe_load(path.read_text())
    groups = values.get("workerGroups", {}).values()
    built = list(BUILDS.values())[any(each.get("gpu", {}).get("count") for each in groups)]
    name, _, tag = built.partition(":")
    assert images_of(values) == {f"{values.get('image', {}).get('repository', name)}:{tag}"}


@pytest.mark.parametrize("command", ["kind load docker-image", "docker save", "docker tag"])
def test_the_page_loads_and_tags_what_it_builds(command):
    names = re.findall(rf"{command} (\S+)", PAGE.read_text())
    assert names == [BUILDS["deploy/docker/Dockerfile.cpu"]]


def test_the_image_that_is_pushed_is_the_one_of_the_shown_values():
    [pushed] = re.findall(r"docker push (\S+)", PAGE.read_text())
    assert f"docker tag {BUILDS['deploy/docker/Dockerfile.cpu']} {pushed}\n" in PAGE.read_text()
    assert images_of(shown_values()) == {pushed}
    specs = [each["spec"] for each in ray_templates(render(shown_values())).values()]
    assert all(each["imagePullSecrets"] == [{"name": "registry-login"}] for each in specs)


def test_the_replaced_image_of_a_manifest_is_the_one_that_is_pushed():
    [(old, new, manifest)] = re.findall(r"`sed 's\|(.*?)\|(.*?)\|' (\S+) \|", PAGE.read_text())
    [pushed] = re.findall(r"docker push (\S+)", PAGE.read_text())
    lines = {line.strip() for line in (ROOT / manifest).read_text().splitlines()}
    images = {line.replace(old, new) for line in lines if line.startswith(("image: ", "- image: "))}
    assert images == {f"image: {pushed}"}
