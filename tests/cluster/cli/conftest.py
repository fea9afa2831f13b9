"""The command in this process, against a fake service."""

import pytest
from click.testing import CliRunner

from cluster.cli import main
from tests.specdec.client.fake_service import FakeService, running


def run_cli(*arguments, **options):
    return CliRunner().invoke(main.main, arguments, **options)


def run_serve(capfd, *arguments):
    """`specdec serve`, which writes the lines of its start to the file of standard error itself."""
    capfd.readouterr()
    result = run_cli("serve", *arguments)
    result.stderr_bytes += capfd.readouterr().err.encode()
    return result


def fails_with(result, line, exit_code=1):
    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert result.stderr == f"error: {line}\n"


@pytest.fixture(autouse=True)
def no_service(monkeypatch, tmp_path_factory):
    """Hide the services that the user runs."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))


@pytest.fixture
def service():
    with running(FakeService()) as service:
        yield service


@pytest.fixture
def generate(service):
    def run(*arguments, **options):
        return run_cli("generate", "--address", service.address, *arguments, **options)

    return run
