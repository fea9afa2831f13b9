"""Compare the kernels of a wheel with those compiled on this machine.

Builds the wheel with precompiled kernels, installs it without dependencies into a new environment
that shares those of this one, and generates there without a compiler on PATH, in turns with this
checkout. The ratio is that of the tokens per second of a round, and both must generate the same
tokens. The last line printed is JSON.

    python -m benchmarks.precompiled [--wheel FILE] [--rounds 15] [--max-tokens 64]
        [--model NAME] [--output FILE]

Exits with 1 if the median ratio is below 0.95. The build takes minutes; --wheel uses another one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.machine import Machine, describe_machine
from benchmarks.report_file import add_output, command_line, write_report
from benchmarks.summary import Bar, at_least, print_bars
from benchmarks.workloads import MODEL

_ROOT = Path(__file__).parents[1]
_CHILD = Path(__file__).with_name("precompiled_child.py")
_LEAST_RATIO = 0.95


class WheelError(Exception):
    """The wheel was not used, or generates other tokens."""


@dataclass(frozen=True)
class PrecompiledReport:
    """Complete results. seconds: of each round. ratios: compiled over precompiled seconds."""

    command: str
    machine: Machine
    model: str
    precompiled: str
    compiled: str
    precompiled_seconds: tuple[float, ...]
    compiled_seconds: tuple[float, ...]
    ratios: tuple[float, ...]
    bars: tuple[Bar, ...]


class Generator:
    """A process that generates on request."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.library = Path(self._receive()["library"] or "none")

    def generate(self) -> Mapping[str, Any]:
        """Return seconds and token ids of a round."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._receive()

    def _receive(self) -> Mapping[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                values: Mapping[str, Any] = json.loads(line)
                return values
        raise WheelError("a process ended; standard error has the reason")


@contextmanager
def generator(
    python: Path, arguments: list[str], variables: Mapping[str, str]
) -> Iterator[Generator]:
    """Run the child with a Python, outside of this checkout."""
    with (
        TemporaryDirectory() as directory,
        subprocess.Popen(
            [str(python), str(_CHILD), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=directory,
            env={**os.environ, **variables},
        ) as process,
    ):
        try:
            yield Generator(process)
        finally:
            process.kill()


def build_wheel(directory: Path) -> Path:
    """Build the wheel from this checkout, with precompiled kernels."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--wheel-dir", str(directory), str(_ROOT)]
    subprocess.run(command, check=True, env={**os.environ, "SPECDEC_PRECOMPILE_KERNELS": "1"})
    (wheel,) = directory.glob("specdec-*.whl")
    return wheel


def install(wheel: Path, directory: Path) -> Path:
    """Install a wheel into a new environment with the dependencies of this one.

    Returns its Python.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    python = directory / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, str(wheel)], check=True)
    (packages,) = directory.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python


def measure(wheel: Path, model: str, max_tokens: int, num_rounds: int) -> PrecompiledReport:
    """Generate in turns. Raises WheelError where the tokens or the kernels are not as expected."""
    arguments = [model, str(max_tokens)]
    with TemporaryDirectory() as directory:
        python = install(wheel, Path(directory, "venv"))
        no_compiler = {"PATH": str(python.parent), "CXX": "", "PYTHONPATH": ""}
        ours = {"PYTHONPATH": str(_ROOT)}
        with (
            generator(python, arguments, no_compiler) as precompiled,
            generator(Path(sys.executable), arguments, ours) as compiled,
        ):
            if precompiled.library.parent.name != "precompiled":
                raise WheelError(f"the wheel runs {precompiled.library}, not precompiled kernels")
            rounds = [(precompiled.generate(), compiled.generate()) for _ in range(num_rounds)]
            names = precompiled.library.name, compiled.library.name
    if any(one["token_ids"] != other["token_ids"] for one, other in rounds):
        raise WheelError("the kernels of the wheel generate other tokens")
    ratios = tuple(other["seconds"] / one["seconds"] for one, other in rounds)
    name = "tokens per second, precompiled / compiled"
    bar = at_least(name, statistics.median(ratios), _LEAST_RATIO)
    return PrecompiledReport(
        command_line("benchmarks.precompiled", sys.argv[1:]),
        describe_machine(),
        model,
        *names,
        tuple(one["seconds"] for one, _ in rounds),
        tuple(other["seconds"] for _, other in rounds),
        ratios,
        (bar,),
    )


def main() -> int:
    """Measure and report; return 1 if the limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--wheel", type=Path, help="wheel with precompiled kernels (default: build)"
    )
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--max-tokens", type=int, default=64)
    add_output(parser)
    options = parser.parse_args()
    with TemporaryDirectory() as directory:
        wheel = options.wheel or build_wheel(Path(directory))
        report = measure(wheel, options.model, options.max_tokens, options.rounds)
    print_bars(report.bars)
    write_report(report, options.output)
    return 0 if all(bar.is_met for bar in report.bars) else 1


if __name__ == "__main__":
    sys.exit(main())
