"""Builds the wheel `specdec-client`: the gRPC client without the service and its dependencies.

    python -m tools.install.client_wheel dist

Its files are those of the client in this repository, and its requirements those of the project that
the client needs. `make protos` generates the stubs first.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("specdec/client", "specdec/types", "protos/specdec")
FILES = ("specdec/__init__.py", "protos/__init__.py", "specdec/py.typed", "LICENSE")
RANK_SIDE = ("messages.py", "draft_messages.py", "trial_sequences.py", "ranks.py")
"""Modules of specdec.types that need numpy: messages between the engine and its ranks."""
EXCLUDED = ("__pycache__", *RANK_SIDE)
REQUIRED = ("grpcio", "protobuf")
README = """# specdec-client

The Python client of a specdec service over gRPC: `from specdec.client import Client`. The
distribution `specdec` contains it too; install one of the two.
"""


def main(arguments: Sequence[str]) -> None:
    """Build the wheel into the folder that is the only argument."""
    (folder,) = arguments
    with tempfile.TemporaryDirectory() as directory:
        stage(Path(directory))
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
        options = ["--no-build-isolation", "--wheel-dir", str(Path(folder).resolve())]
        subprocess.run([*command, *options, directory], check=True)


def stage(directory: Path) -> None:
    """Write the sources of the distribution to an empty directory."""
    for name in PACKAGES:
        ignored = shutil.ignore_patterns(*EXCLUDED)
        shutil.copytree(ROOT / name, directory / name, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, directory / name)
    (directory / "README.md").write_text(README)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (directory / "pyproject.toml").write_text(_pyproject(project))


def _pyproject(project: Mapping[str, Any]) -> str:
    """Return the metadata of the distribution, from that of the whole project."""
    kept = ("version", "license", "license-files", "requires-python")
    fields = {
        "name": "specdec-client",
        "description": "The Python client of a specdec service",
        "readme": "README.md",
        **{name: project[name] for name in kept},
        "dependencies": [each for each in project["dependencies"] if _name(each) in REQUIRED],
    }
    # A string or a list of strings is the same in JSON and in TOML.
    lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in fields.items())
    return (
        '[build-system]\nrequires = ["setuptools>=77"]\nbuild-backend = "setuptools.build_meta"\n\n'
        f"[project]\n{lines}\n\n"
        '[tool.setuptools.packages.find]\ninclude = ["specdec*", "protos*"]\nnamespaces = false\n\n'
        '[tool.setuptools.package-data]\n"*" = ["py.typed", "*.proto", "*.pyi"]\n'
    )


def _name(requirement: str) -> str:
    return requirement.partition(">=")[0]


if __name__ == "__main__":
    main(sys.argv[1:])
