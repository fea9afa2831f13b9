"""Tests of the Dockerfiles: their content, and the steps that run without a container engine."""

import json
import os
import re
import shlex
import shutil
import ssl
import subprocess
import sys
import tomllib
import types
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from cluster.api.serve_proxy.grpc import MAX_MESSAGE_VARIABLE
from cluster.api.serve_proxy.http import CALLBACK, CALLBACK_VARIABLE
from cluster.cli import main
from cluster.config.serve_config import ServeConfig
from cluster.workers.ray.ray_runtime import RAY_ENVIRONMENT
from tests.deploy.dockerfile import copies, environment, of_word, stages
from tests.specdec.client.certificate import self_signed_certificate

DOCKERFILES = sorted(Path("deploy/docker").glob("Dockerfile.*"))
GENERATOR = Path(".make/sbom/bin/cyclonedx-py")
SETTING = re.compile(r"--([a-z-]+)")


@pytest.fixture(params=DOCKERFILES, ids=lambda path: path.suffix[1:])
def dockerfile(request):
    return request.param


def build_context():
    """Return the top-level names that .dockerignore excepts, which form the build context."""
    lines = Path(".dockerignore").read_text().splitlines()
    assert "*" in lines
    return {line[1:] for line in lines if line.startswith("!")}


def test_there_is_one_for_cpus_and_one_for_gpus():
    assert [path.name for path in DOCKERFILES] == ["Dockerfile.cpu", "Dockerfile.cuda"]


def test_base_images_are_pinned_to_a_patch_version(dockerfile):
    bases = [stage[0].text.split()[0] for stage in stages(dockerfile)]
    assert all(re.fullmatch(r"[a-z/]+:\d+\.\d+\.\d+[-a-z0-9]*", base) for base in bases), bases


def test_copied_files_exist_and_are_the_whole_build_context(dockerfile):
    sources = [
        source for stage in stages(dockerfile) for each in copies(stage) for source in each.sources
    ]
    assert set(sources) == build_context(), (
        "the build context must contain the copied files and nothing else"
    )
    assert all(Path(source).exists() for source in sources)


def test_nothing_runs_as_root(dockerfile):
    *_, last = stages(dockerfile)
    assert [each.text for each in of_word(last, "USER")] == ["10001:10001"]
    after = last[[each.word for each in last].index("USER") :]
    assert not of_word(after, "RUN")


def test_build_tools_are_not_in_the_final_stage(dockerfile):
    build, last = stages(dockerfile)
    assert any("grpcio-tools" in each.text for each in of_word(build, "RUN"))
    assert not any("pip" in each.text for each in of_word(last, "RUN"))


def sbom_step(stage):
    """Return the index in a stage and the words of the command that writes the SBOM."""
    [(index, text)] = [
        (index, each.text) for index, each in enumerate(stage) if "cyclonedx-py" in each.text
    ]
    return index, shlex.split(text.rpartition("&&")[2])


def missing_in(sbom, *extras):
    """Return the requirements of pyproject.toml that no component of the SBOM satisfies."""
    components = json.loads(sbom.read_text())["components"]
    versions = {canonicalize_name(each["name"]): each["version"] for each in components}
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    listed = project["dependencies"] + [
        each for extra in extras for each in project["optional-dependencies"][extra]
    ]
    required = [each for each in map(Requirement, listed) if each.name != project["name"]]
    assert len(required) >= 20
    found = [versions.get(canonicalize_name(each.name)) for each in required]
    return [
        str(each)
        for each, version in zip(required, found, strict=True)
        if version is None or not each.specifier.contains(version, prereleases=True)
    ]


@cache
def sbom_of(command: tuple[str, ...]) -> str:
    """Return what the command of an image writes, of the environment of the tests.

    It compares that with CycloneDX's schema, which takes 20 s; here a slow test alone does.
    """
    with TemporaryDirectory() as directory:
        sbom = Path(directory, "sbom.json")
        options = [str(sbom) if each.endswith(".json") else each for each in command[1:-1]]
        run = [str(GENERATOR), *options, "--no-validate", sys.executable]
        subprocess.run(run, check=True)
        return sbom.read_text()


def test_the_sbom_is_written_last_and_into_the_copied_environment(dockerfile):
    build, last = stages(dockerfile)
    index, command = sbom_step(build)
    assert index == len(build) - 1, "what is installed later is not listed"
    assert command[-1] == "/opt/specdec/bin/python"
    output = Path(command[command.index("--output-file") + 1])
    assert output.is_relative_to("/opt/specdec")
    assert "--from=build /opt/specdec /opt/specdec" in [each.text for each in of_word(last, "COPY")]


def test_the_sbom_lists_every_dependency(dockerfile, tmp_path):
    """Run the command of the image on the environment of the tests."""
    if not GENERATOR.exists():
        pytest.skip("needs cyclonedx-bom: make .make/sbom/done")
    _, command = sbom_step(stages(dockerfile)[0])
    content = json.loads(sbom_of(tuple(command)))
    assert (content["bomFormat"], content["metadata"]["component"]["name"]) == (
        "CycloneDX",
        "specdec",
    )
    assert all(each["purl"].startswith("pkg:pypi/") for each in content["components"])
    sbom = tmp_path / "sbom.json"
    sbom.write_text(json.dumps(content))
    assert missing_in(sbom, "plot", "tracing", "test", "dev") == []
    rest = [each for each in content["components"] if each["name"] not in ("torch", "ruff")]
    sbom.write_text(json.dumps({"components": rest}))
    assert missing_in(sbom, "dev") == ["torch<3,>=2.13", "ruff"], "a missing one is noticed"


def test_apt_lists_are_removed(dockerfile):
    for each in of_word(stages(dockerfile)[-1], "RUN"):
        if "apt-get install" in each.text:
            assert "--no-install-recommends" in each.text
            assert "rm -rf /var/lib/apt/lists/*" in each.text


def test_ray_has_the_environment_that_specdec_serve_sets(dockerfile):
    """`ray start` in the image must behave like the Ray that `specdec serve` starts."""
    given = environment(stages(dockerfile)[-1])
    assert {name: given.get(name) for name in RAY_ENVIRONMENT} == RAY_ENVIRONMENT
    assert given[CALLBACK_VARIABLE] == CALLBACK
    assert int(given[MAX_MESSAGE_VARIABLE]) == ServeConfig.grpc_max_message_mib * 2**20


def test_no_variable_is_a_secret(dockerfile):
    names = [name for stage in stages(dockerfile) for name in environment(stage)]
    names += [each.text for stage in stages(dockerfile) for each in of_word(stage, "ARG")]
    assert not [name for name in names if re.search("TOKEN|KEY|SECRET|PASSWORD", name)]


def test_the_image_serves_on_all_interfaces_with_any_arguments(dockerfile, served):
    *_, last = stages(dockerfile)
    [entry] = of_word(last, "ENTRYPOINT")
    assert not of_word(last, "CMD"), "arguments of docker run would replace it"
    specdec, *arguments = entry.listed
    assert specdec == "specdec"
    given = [*arguments, "org/model", "--block-size", "8"]
    assert CliRunner().invoke(main.main, given).exit_code == 0
    [config] = served
    assert (config.host, config.model, config.block_size) == ("0.0.0.0", "org/model", 8)
    assert dockerfile.suffix == ".cpu" or config.device == "cuda"
    exposed = of_word(last, "EXPOSE")[0].text.split()
    assert exposed == [str(config.http_port), str(config.grpc_port)]


@pytest.fixture
def served(monkeypatch):
    """Return the configurations that the command passes to the service."""
    configs = []
    fake = types.ModuleType("cluster.serve.startup")
    fake.serve_forever = lambda config, report, others, _: configs.append(config)
    monkeypatch.setitem(sys.modules, "cluster.serve.startup", fake)
    monkeypatch.setattr("cluster.cli.serve.guarded", lambda *_, **__: nullcontext())
    return configs


@pytest.mark.skipif(shutil.which("wget") is None, reason="wget is not on the path")
def test_the_health_check_requests_readiness(dockerfile, tmp_path):
    """Run its command against ready servers, with TLS and without, and against no server."""
    [check] = of_word(stages(dockerfile)[-1], "HEALTHCHECK")
    command = check.text.partition(" CMD ")[2]
    assert command.count("127.0.0.1:8000/ready") == 2
    assert exit_code_of(command, port=1) == 1
    files = tmp_path / "key.pem", tmp_path / "certificate.pem"
    for file, content in zip(files, self_signed_certificate(), strict=True):
        file.write_bytes(content)
    for tls in (False, True):
        with ready_server(*(files if tls else ())) as port:
            assert exit_code_of(command, port) == 0
            assert exit_code_of(command.replace("/ready", "/not-ready"), port) == 1


def exit_code_of(command, port):
    there = {**os.environ, "http_proxy": "http://127.0.0.1:1", "https_proxy": "http://127.0.0.1:1"}
    return subprocess.run(["sh", "-c", command.replace(":8000", f":{port}")], env=there).returncode


@contextmanager
def ready_server(key=None, certificate=None):
    handler = partial(QuietHandler, directory="tests/deploy/served")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, key)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        Thread(target=server.serve_forever).start()
        yield server.server_port
        server.shutdown()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_environment_can_be_built(tmp_path):
    """Run the steps of the build stage, with a temporary directory instead of /opt/specdec."""
    build, _ = stages(Path("deploy/docker/Dockerfile.cpu"))
    context, prefix = tmp_path / "build", tmp_path / "specdec"
    context.mkdir()
    for instruction in build:
        if instruction.word == "COPY":
            *sources, _ = instruction.text.split()
            for source in sources:
                copy_source(Path(source), context / source)
        if instruction.word == "RUN":
            step = instruction.text.replace("/opt/specdec", str(prefix))
            step = step.replace("python -m venv", f"{sys.executable} -m venv")
            done = subprocess.run(
                ["bash", "-ec", step], cwd=context, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert output_of(prefix, "--version").startswith("specdec ")
    assert "--ray-address" in output_of(prefix, "serve", "--help")
    for absent in ("pytest", "grpc_tools"):
        found = subprocess.run(
            [prefix / "bin/python", "-c", f"import {absent}"], capture_output=True
        )
        assert found.returncode != 0, f"{absent} is in the image"
    sbom = prefix / "share/sbom/specdec.cdx.json"
    assert missing_in(sbom, "tracing") == []
    assert components_of(sbom) == installed_in(prefix) - {"specdec"}
    built = subprocess.run(
        [prefix / "bin/python", "-c", "from cluster.app import build; build({})"],
        env={**os.environ, "PYTHONPATH": "", "XDG_STATE_HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr


def components_of(sbom):
    components = json.loads(sbom.read_text())["components"]
    return {canonicalize_name(each["name"]) for each in components}


def installed_in(prefix):
    command = [prefix / "bin/pip", "list", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {canonicalize_name(each["name"]) for each in json.loads(done.stdout)}


def copy_source(source, destination):
    if source.is_dir():
        shutil.copytree(source, destination, ignore=shutil.ignore_patterns("__pycache__", "*_pb2*"))
    else:
        shutil.copy(source, destination)


def output_of(prefix, *arguments):
    command = [prefix / "bin/specdec", *arguments]
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(command, env=environment, cwd=prefix, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
