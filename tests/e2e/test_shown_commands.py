"""Runs every shell and Python block of README, quick start and clients on the real service.

In a scratch copy of the repository, whose `.venv` is the environment of the tests. Ports are
replaced by free ones; nothing else is changed.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.conftest import free_ports
from tests.shell_blocks import Block, blocks_of, words_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *(ROOT / "docs" / name for name in ("index.md", "clients.md"))]
COPIED = (
    *("specdec", "cluster", "protos", "Makefile"),
    *("pyproject.toml", "setup.py", "constraints.txt", "README.md"),
)
NOT_RUN = {
    "make test": "the targets of a developer, each of which CI runs by itself",
}
"""First words of blocks that are not run, each with the reason."""

SERVES = ("make serve", ".venv/bin/specdec serve")
ENDLESS = (".venv/bin/specdec speculation watch",)
CLIENT_COMMANDS = ("generate", "chat", "bench", "status", "speculation", "profile")
CAT = """{"type": "object", "properties": {"name": {"enum": ["Mia", "Tom"]}}, "required": ["name"],
"additionalProperties": false}"""

SHELL = [block for page in PAGES for block in blocks_of(page, "bash")]
PYTHON = [block for page in PAGES for block in blocks_of(page, "python")]
SERVE_COMMANDS = [
    command
    for block in SHELL
    for command in block.commands
    if command.startswith(SERVES) and "--help" not in command
]


@dataclass(frozen=True)
class Scratch:
    """A copy of the repository, and the ports that its commands use."""

    folder: Path
    grpc_port: int
    http_port: int

    def localized(self, text: str) -> str:
        """Replace the default ports in a text by those of this copy."""
        with_grpc = re.sub(r"(127\.0\.0\.1|localhost):9000", rf"\1:{self.grpc_port}", text)
        return re.sub(r"(127\.0\.0\.1|localhost):8000", rf"\1:{self.http_port}", with_grpc)

    def command(self, line: str) -> str:
        """Return a shown line as it is run in this copy."""
        flags = f"--grpc-port {self.grpc_port} --http-port {self.http_port} --state-dir state"
        words = words_of(line)
        shown = line.split("  #")[0]
        if words[:2] == ["make", "serve"]:
            return f"make serve ARGS='{flags}'"
        if words[:2] == [".venv/bin/specdec", "serve"] and "--help" not in words:
            return f"{shown} {flags}"
        if words[0] == ".venv/bin/specdec" and words[1] in CLIENT_COMMANDS:
            return f"{shown} --address 127.0.0.1:{self.grpc_port}"
        return self.localized(shown)

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of a shell in which this copy is installed."""
        return {**os.environ, "PYTHONPATH": str(self.folder), "SPECDEC_API_KEY": ""}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory, tiny_model_dir):
    folder = tmp_path_factory.mktemp("scratch")
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / ".make").mkdir()
    for name in ("tools", "setup", "serve"):  # the files that mark an installation as done
        (folder / ".make" / name).touch()
    for name in ("my-llama", "big", "small"):
        (folder / name).symlink_to(tiny_model_dir)
    (folder / "cat.json").write_text(CAT)
    (folder / "prompts.jsonl").write_text('{"prompt": "Why is the sky blue?"}\n')
    (folder / "service.yaml").write_text("max_model_len: 512\n")
    # Otherwise `make serve` would install into the environment of the tests.
    subprocess.run(["make", "--question", ".make/serve"], cwd=folder, check=True)
    return Scratch(folder, *free_ports(2))


def start(scratch, line, log):
    """Start a service in a new process group; return when it is ready."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {scratch.command(line)}"],
            cwd=scratch.folder,
            env=scratch.environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    deadline = time.monotonic() + 300
    while "is ready" not in log.read_text():
        assert process.poll() is None, log.read_text()
        if time.monotonic() > deadline:
            stop(process)
            pytest.fail(log.read_text())
        time.sleep(0.5)
    return process


def stop(process):
    """Send SIGINT to the process group, as Ctrl-C does."""
    os.killpg(process.pid, signal.SIGINT)
    return process.wait(60)


@pytest.fixture(scope="module")
def service(scratch, tmp_path_factory):
    process = start(scratch, "make serve", tmp_path_factory.mktemp("service") / "log")
    yield scratch
    stop(process)


def run(scratch, line):
    """Return the output of a command; of one that does not end, that of a few seconds."""
    command = scratch.command(line)
    if line.startswith(ENDLESS):
        command = f"timeout --preserve-status --signal INT 5 {command}"
    return subprocess.run(
        ["bash", "-c", command],
        cwd=scratch.folder,
        env=scratch.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_a_shell_block_runs(block: Block, service: Scratch):
    for start_of, reason in NOT_RUN.items():
        if block.text.startswith(start_of):
            pytest.skip(reason)
    for line in block.commands:
        if line in SERVE_COMMANDS:
            continue  # tested below
        done = run(service, line)
        allowed = (0, 130) if line.startswith(ENDLESS) else (0,)
        assert done.returncode in allowed, (line, done.stdout, done.stderr)
        assert done.stdout.strip() or done.stderr.strip() or "reset" in line, line
        assert '"error"' not in done.stdout, (line, done.stdout)


def test_the_first_commands_show_the_gain(service: Scratch):
    """Equal texts, and several tokens a step; the speed itself is measured by benchmarks."""
    readme = [block for block in SHELL if block.path.name == "README.md"]
    [pair] = [block.commands for block in readme if "--no-speculation" in block.text]
    drafting, plain = (run(service, command) for command in pair)
    assert drafting.stdout == plain.stdout
    length = re.search(r"acceptance length ([\d.]+)", drafting.stderr)
    assert length is not None, drafting.stderr
    assert float(length[1]) > 2, "in tokens for each step of the model"
    assert "no drafts" in plain.stderr


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_a_python_block_runs(block: Block, service: Scratch):
    done = subprocess.run(
        [sys.executable, "-c", service.localized(block.text)],
        cwd=service.folder,
        env={**service.environment, "SPECDEC_API_KEY": "unused"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("line", sorted({*SERVE_COMMANDS} - {"make serve"}))
def test_a_service_starts_as_shown_and_ends_on_ctrl_c(scratch, line, tmp_path):
    other = Scratch(scratch.folder, *free_ports(2))
    process = start(other, line, tmp_path / "log")
    assert stop(process) == 0, (tmp_path / "log").read_text()
