"""A peer's test suite: its pinned source, its environment, a run, and the expected results."""

import hashlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

FOLDER = Path(__file__).parent
STAND_INS = FOLDER / "stand_ins"
TIMEOUT_S = {"download": 300, "test": 240, "suite": 3600}
UNWANTED = ("tests/conftest.py", "tests/utils.py")  # vLLM's, which need vLLM; see stand_ins
MODEL_NAME = re.compile(r'^(\s*\w*(?:MODEL|model_name)\w* = |.*\bmodel=)"[^"]*"', re.MULTILINE)


@dataclass(frozen=True)
class Result:
    is_passed: bool
    reason: str


@dataclass(frozen=True)
class Suite:
    """A section of expected.yaml. files: by the path of a test file, or kit.Class of SGLang."""

    name: str
    home: Path
    version: str
    url: str
    sha256: str
    files: Mapping[str, Mapping]

    @property
    def source(self) -> Path:
        return self.home / f"{self.name}-{self.version}"

    def fetch(self) -> None:
        """Download and unpack the source, and make the environment, unless they are there."""
        self.home.mkdir(parents=True, exist_ok=True)
        if not self.source.exists():
            with tempfile.TemporaryDirectory(dir=self.home) as folder:
                archive, unpacked = Path(folder) / "archive", Path(folder) / "unpacked"
                self._download(archive)
                self._unpack(archive, unpacked)
                unpacked.rename(self.source)
        if not self._python.exists():
            self._make_environment()

    def _download(self, path: Path) -> None:
        with urllib.request.urlopen(self.url, timeout=TIMEOUT_S["download"]) as response:
            path.write_bytes(response.read())
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        assert found == self.sha256, f"{self.url} has the digest {found}, not {self.sha256}"

    def _unpack(self, archive: Path, target: Path) -> None:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as files:
                files.extractall(target)
            return
        with tarfile.open(archive) as files:
            files.extractall(target.parent, filter="data")
        next(target.parent.glob("*/tests")).parent.rename(target)
        for each in UNWANTED:
            (target / each).unlink()

    @property
    def _python(self) -> Path:
        return self.home / "environment" / "bin" / "python"

    def _make_environment(self) -> None:
        """Make an environment that adds to the packages of this one those that the tests import."""
        subprocess.run([sys.executable, "-m", "venv", self.home / "environment"], check=True)
        [packages] = (self.home / "environment").glob("lib/*/site-packages")
        (packages / "shared.pth").write_text(sysconfig.get_path("purelib"))
        install = [self._python, "-m", "pip", "install", "--quiet", "-r", FOLDER / "packages.txt"]
        subprocess.run(install, check=True)

    def run(self, url: str, model: str, tokenizer: Path) -> dict[str, Result]:
        """Run the files of the table; return the results by file::test."""
        self._name_model(model)
        report, log = self.home / f"{self.name}.json", self.home / f"{self.name}.log"
        report.unlink(missing_ok=True)
        variables = {
            "PYTHONPATH": os.pathsep.join([str(STAND_INS), str(self.source)][: 1 + self._is_vllm]),
            "PEER_URL": url,
            "PEER_MODEL": model,
            "PEER_TOKENIZER": str(tokenizer),
            "PEER_SOURCE": str(self.source),
            "PEER_FILES": json.dumps(list(self.files)),
            "PEER_NOT_RUN": json.dumps(self._not_run()),
            "PEER_REPORT": str(report),
        }
        with log.open("w") as output:
            subprocess.run(
                self._command(),
                cwd=self.source,
                env={**os.environ, **variables},
                stdout=output,
                stderr=output,
                timeout=TIMEOUT_S["suite"],
            )
        return {test: Result(**each) for test, each in json.loads(report.read_text()).items()}

    @property
    def _is_vllm(self) -> bool:
        return self.name == "vllm"

    def _command(self) -> list[str | Path]:
        paths = list(self.files) if self._is_vllm else [STAND_INS / "kits.py", "--noconftest"]
        root = self.source if self._is_vllm else STAND_INS
        options = ["-q", "--tb=short", "-o", "asyncio_mode=auto", "--continue-on-collection-errors"]
        options += ["--timeout", str(TIMEOUT_S["test"]), "-c", os.devnull, "-p", "no:cacheprovider"]
        return [
            *(self._python, "-m", "pytest", "-p", "peer_plugin", *options),
            *("--rootdir", root, *paths),
        ]

    def _name_model(self, model: str) -> None:
        """Put the served model in place of those that the fetched test files name."""
        for path in self.source.glob("tests/**/*.py"):
            text = path.read_text()
            named = MODEL_NAME.sub(rf'\1"{model}"', text)
            if named != text:
                path.write_text(named)

    def _listed(self, file: str) -> dict[str, str]:
        """Return the tests of a file that do not pass, with the heading that lists each."""
        headings = {name: each for name, each in self.files[file].items() if name != "passed"}
        return {
            test: heading
            for heading, reasons in headings.items()
            for tests in reasons.values()
            for test in tests
        }

    def _not_run(self) -> list[str]:
        return [
            f"{file}::{test}"
            for file in self.files
            for test, heading in self._listed(file).items()
            if heading == "not run"
        ]

    def differences(self, results: Mapping[str, Result]) -> list[str]:
        """Return a line for each result that the table does not have."""
        return [line for file in self.files for line in self._differences(file, results)]

    def _differences(self, file: str, results: Mapping[str, Result]) -> list[str]:
        prefix, listed = f"{file}::", self._listed(file)
        own = {k.removeprefix(prefix): v for k, v in results.items() if k.startswith(prefix)}
        found = [
            f"{prefix}{test} " + ("passes now" if each.is_passed else f"fails: {each.reason}")
            for test, each in own.items()
            if each.is_passed == (not listed.keys().isdisjoint({test, test.partition("[")[0]}))
        ]
        names = own.keys() | {test.partition("[")[0] for test in own}
        gone = [each for each in listed if listed[each] != "not run" and each not in names]
        found += [f"{prefix}{each} is not in {self.name} {self.version}" for each in gone]
        expected = self.files[file]["passed"]
        num_passed = sum(each.is_passed for each in own.values())
        if num_passed != expected:
            found.append(f"{file}: {num_passed} tests pass, {expected} were expected")
        return found


def suites(home: Path) -> list[Suite]:
    """Return the suites of expected.yaml, whose files live below `home`."""
    table = yaml.safe_load((FOLDER / "expected.yaml").read_text())
    return [Suite(name, home, **section) for name, section in table.items()]
