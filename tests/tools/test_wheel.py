"""The wheel with precompiled kernels, built with a compiler that only records its calls."""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from specdec.kernels.cpu.variants import VARIANTS, source_digest

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "specdec" / "kernels" / "cpu"
SOURCE = KERNELS / "source"
COMPILER = """#!/bin/sh
echo "$@" >> {log}
while [ "$1" != -o ]; do shift; done
echo library > "$2"
"""

pytestmark = pytest.mark.skipif(platform.machine() not in VARIANTS, reason="has no variants yet")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A package with the kernels alone. Its build directory remains, as that of a checkout."""
    project = tmp_path_factory.mktemp("project")
    package = project / "specdec" / "kernels" / "cpu"
    package.mkdir(parents=True)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    for path in KERNELS.iterdir():
        if path.suffix == ".py":
            shutil.copy(path, package)
    shutil.copytree(SOURCE, package / "source")
    shutil.copytree(ROOT / "protos", project / "protos", ignore=shutil.ignore_patterns("*_pb2*"))
    for folder in (project / "specdec", package.parent):
        (folder / "__init__.py").touch()
    return project


def build(project, tmp_path, **variables):
    """Build a wheel; return it and the compiler's calls."""
    log, compiler = tmp_path / "calls", tmp_path / "c++"
    compiler.write_text(COMPILER.format(log=log))
    compiler.chmod(0o755)
    command = [sys.executable, "setup.py", "--quiet", "bdist_wheel", "--dist-dir", str(tmp_path)]
    environment = {**os.environ, "CXX": str(compiler), "PYTHONPATH": "", **variables}
    subprocess.run(command, cwd=project, env=environment, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    return wheel, log.read_text().splitlines() if log.exists() else []


def test_a_wheel_contains_each_variant_and_names_its_platform(project, tmp_path):
    folder = f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    stale = project / "build" / folder / "specdec" / "kernels" / "cpu" / "precompiled" / "old.so"
    stale.parent.mkdir(parents=True)  # of sources that have changed since
    stale.touch()
    wheel, calls = build(project, tmp_path, SPECDEC_PRECOMPILE_KERNELS="1")
    variants = VARIANTS[platform.machine()]
    digest = source_digest(SOURCE)
    expected = {f"specdec/kernels/cpu/precompiled/{v.library_name(digest)}" for v in variants}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if "precompiled" in name} == expected
    files = {path.relative_to(ROOT).as_posix() for path in SOURCE.rglob("*.*")}
    assert files <= names, "other processors compile them"
    assert wheel.stem.endswith(f"-py3-none-linux_{platform.machine()}")
    units = len(list(SOURCE.rglob("*.cpp")))
    assert len(calls) == len(variants) * (units + 1)
    for each in variants:
        assert sum(" ".join(each.march) + " -ffp" in call for call in calls) == units
    assert all("native" not in call for call in calls)


def test_an_ordinary_wheel_has_no_kernels_and_fits_every_platform(project, tmp_path):
    wheel, calls = build(project, tmp_path)
    assert calls == []
    assert wheel.stem.endswith("-py3-none-any")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if "precompiled" in name]
