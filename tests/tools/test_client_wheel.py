"""The sources of `specdec-client`; tests/e2e/test_client_alone.py installs the wheel."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tools.install.client_wheel import stage

ROOT = Path(__file__).parents[2]
IMPORT_ALL = """
import pkgutil, sys
# An editable installation of this repository would find what the sources lack.
sys.meta_path = [each for each in sys.meta_path if "editable" not in repr(each)]
import specdec.client
for each in pkgutil.walk_packages(specdec.__path__, "specdec."):
    __import__(each.name)
from specdec import LoRARequest, SamplingParams
ours = {{name: module.__file__ for name, module in sys.modules.items()
        if name.split(".")[0] in ("specdec", "protos")}}
assert all(path.startswith({directory!r}) for path in ours.values()), ours
print(*sorted({{name.split(".")[0] for name in sys.modules}} - set(sys.stdlib_module_names)))
try:
    from specdec import LLM
except ImportError as error:
    print(error)
"""


@pytest.fixture
def sources(tmp_path):
    stage(tmp_path)
    return tmp_path


def test_the_client_imports_only_its_requirements(sources):
    code = IMPORT_ALL.format(directory=str(sources))
    environment = {**os.environ, "PYTHONPATH": str(sources), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=sources,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    imported, reason = done.stdout.splitlines()
    heavy = {"torch", "ray", "numpy", "transformers", "pydantic", "cluster", "click", "httpx"}
    assert {"grpc", "google"} <= {*imported.split()}
    assert not heavy & {*imported.split()}
    assert reason == "specdec.LLM is in the package specdec; specdec-client has only the client"


def test_it_has_the_messages_of_the_client_alone(sources):
    assert {each.name for each in (sources / "protos").iterdir()} == {"__init__.py", "specdec"}


def test_its_metadata_are_those_of_the_project(sources):
    of_client = tomllib.loads((sources / "pyproject.toml").read_text())["project"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert of_client["version"] == project["version"]
    assert of_client["requires-python"] == project["requires-python"]
    names = [each.partition(">=")[0] for each in of_client["dependencies"]]
    assert names == ["grpcio", "protobuf"]
    assert {*of_client["dependencies"]} < {*project["dependencies"]}
