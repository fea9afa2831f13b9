"""Tests of the compose file and the files that it mounts."""

import json
from pathlib import Path

import pytest
import yaml

from cluster.config.serve_config import ServeConfig

FOLDER = Path("deploy/compose")


@pytest.fixture(scope="module")
def services():
    return yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]


def test_ports_are_published_on_loopback_only(services):
    ports = [port for each in services.values() for port in each.get("ports", ())]
    assert len(ports) == 4
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_images_are_pinned(services):
    for each in services.values():
        assert each["image"].rpartition(":")[2][-1].isdigit()


def test_a_service_that_lost_its_ray_is_restarted(services):
    """It exits with 70 then, and with 0 after SIGTERM."""
    assert services["specdec"]["restart"] == "on-failure"
    unit = Path("deploy/systemd/specdec.service").read_text()
    assert "Restart=on-failure" in unit
    assert "SuccessExitStatus" not in unit


def test_mounted_files_exist(services):
    mounted = [
        volume.split(":")[0] for each in services.values() for volume in each.get("volumes", ())
    ]
    files = [FOLDER / path for path in mounted if path.startswith(".")]
    assert len(files) == 5
    assert all(path.is_file() for path in files), files
    build = services["specdec"]["build"]
    assert (FOLDER / build["context"]).resolve() == Path.cwd()
    assert (FOLDER / build["context"] / build["dockerfile"]).is_file()


def test_stop_grace_period_covers_the_drain(services):
    specdec = services["specdec"]
    given = dict(
        flag.removeprefix("--").replace("-", "_").split("=") for flag in specdec["command"]
    )
    config = ServeConfig.from_mapping(given | {"drain_timeout_s": float(given["drain_timeout_s"])})
    assert int(specdec["stop_grace_period"].removesuffix("s")) >= config.drain_timeout_s + 25


def test_grafana_finds_its_data_source_and_dashboard(services):
    [source] = yaml.safe_load((FOLDER / "grafana/datasources.yaml").read_text())["datasources"]
    host, _, port = source["url"].removeprefix("http://").partition(":")
    assert services["prometheus"]["network_mode"] == f"service:{host}"
    assert any(each.split(" ")[0].endswith(f":{port}:{port}") for each in services[host]["ports"])
    [provider] = yaml.safe_load((FOLDER / "grafana/dashboards.yaml").read_text())["providers"]
    folder = provider["options"]["path"]
    assert any(f":{folder}/" in each for each in services["grafana"]["volumes"])
    dashboard = json.loads(Path("deploy/grafana/specdec.json").read_text())
    assert dashboard["title"]
