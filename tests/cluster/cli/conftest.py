"""The command in this process, against a fake service."""

import pytest
from click.testing import CliRunner

from cluster.cli import main
from tests.specdec.client.fake_service import FakeService, running


def run_cli(*arguments, **options):
    return CliRunner().invoke(main.main, arguments, **options)


def fails_with(result, line):
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"error: {line}\n"


@pytest.fixture
def service():
    with running(FakeService()) as service:
        yield service


@pytest.fixture
def generate(service):
    def run(*arguments, **options):
        return run_cli("generate", "--address", service.address, *arguments, **options)

    return run
