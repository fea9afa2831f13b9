# Modules: cluster.cli.doctor.environment
"""`specdec doctor`: every check on invented facts, and the command on this machine."""

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from cluster.cli.doctor import doctor, environment
from cluster.cli.doctor.doctor import CHECKS, examine
from cluster.cli.doctor.environment import Environment, GpuState, Probe
from cluster.cli.main import main
from specdec.kernels import nvlink
from specdec.models.resolve import packaged_directory
from specdec.worker import native_library_fault
from tests.specdec.client.fake_service import FakeService, running

GIB = 2**30
INDEX, HUB = Probe("package index", answer="has it"), Probe("model hub", answer="https://hub")
FIT = Environment(
    python_version=(3, 11, 7),
    torch=Probe("torch", "2.13.0+cpu"),
    num_torch_threads=2,
    kernels_fault="",
    num_cores=2,
    available_memory_bytes=16 * GIB,
    gpus=(),
    num_gpu_devices=0,
    gpu_driver=Probe("driver", error="no NVIDIA driver is loaded"),
    cuda=Probe("CUDA", error="torch 2.13.0+cpu is built without CUDA"),
    nccl=Probe("NCCL", error="torch 2.13.0+cpu is built without CUDA"),
    triton=Probe("triton", error="triton is not installed"),
    ray=Probe("ray", "2.60.0"),
    taken_ports=(),
    cache_dir=Path("/cache"),
    cache_error="",
    cached_models=("smollm2-135m-instruct",),
    shm_bytes=GIB,
    max_open_files=65536,
    network=(INDEX, HUB),
    service=Probe("127.0.0.1:9000", answer="smollm2, specdec 0.1.0"),
)
H200 = GpuState("H200", 139 * GIB, 140 * GIB)
WITH_GPUS = replace(
    FIT,
    gpus=(H200, H200),
    num_gpu_devices=2,
    gpu_driver=Probe("driver", "570.86.15"),
    cuda=Probe("CUDA", "13.0"),
    nccl=Probe("NCCL", "2.28.3"),
    triton=Probe("triton", "3.7.1"),
)
NO_TORCH = Probe("torch", error="OSError: no libc10")
NO_INDEX, NO_HUB = replace(INDEX, error="timed out"), replace(HUB, error="refused")


def test_a_fit_machine_passes_every_check():
    findings = examine(FIT)
    assert {*CHECKS, "network", "service"} == findings.keys()
    assert {(finding.status, finding.advice) for finding in findings.values()} == {("ok", "")}


def test_a_machine_with_gpus_passes_every_check():
    findings = examine(WITH_GPUS)
    assert {(finding.status, finding.advice) for finding in findings.values()} == {("ok", "")}
    assert findings["GPUs"].found == "H200, H200"
    assert findings["GPU driver"].found == "driver 570.86.15, torch for CUDA 13.0"
    assert findings["triton"].found == "3.7.1"
    assert findings["NCCL"].found == "2.28.3"
    assert findings["GPU memory"].found.startswith("139.0 of 140.0 GiB free")


def test_what_only_gpus_need_is_named_where_it_is_absent():
    findings = examine(FIT)
    assert findings["GPU driver"].found == ("not needed without a GPU (no NVIDIA driver is loaded)")
    assert "triton is not installed" in findings["triton"].found
    assert findings["NCCL"].found == "not needed: a rank on one GPU exchanges nothing"
    assert findings["GPU memory"].found == "not needed: models run on the CPU"


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu", "570.86.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  R", "580.65.06"),
    ],
)
def test_the_version_of_the_driver_is_read(monkeypatch, tmp_path, line, version):
    monkeypatch.setattr(environment, "_NVIDIA_DRIVER", tmp_path)
    assert environment._gpu_driver().error == "no NVIDIA driver is loaded"
    (tmp_path / "version").write_text(f"{line}\nGCC version: 12\n")
    assert environment._gpu_driver().answer == version


def test_network_and_service_are_optional_checks():
    assert examine(replace(FIT, network=(), service=None)).keys() == CHECKS.keys()


@pytest.mark.parametrize(
    ("name", "changes", "status", "words"),
    [
        ("python", {"python_version": (3, 10, 12)}, "fail", "3.10.12 Python 3.11 or newer"),
        (
            "torch",
            {"torch": Probe("torch", error="OSError: no libc10")},
            "fail",
            "no libc10 make setup",
        ),
        ("torch", {"num_torch_threads": 8}, "warn", "8 threads on 2 cores OMP_NUM_THREADS=2"),
        ("CPU kernels", {"kernels_fault": "no C++ compiler"}, "warn", "no C++ g++ w8a8"),
        ("ray", {"ray": Probe("ray", error="ImportError: ray")}, "fail", "ImportError make setup"),
        ("memory", {"available_memory_bytes": GIB}, "fail", "1.0 GiB available needs 2.7 GiB"),
        ("memory", {"available_memory_bytes": 3 * GIB}, "warn", "3.0 GiB enough"),
        ("GPUs", {"num_gpu_devices": 2, "gpus": (H200,)}, "warn", "2 present 1 usable CUDA"),
        (
            "GPU driver",
            {"num_gpu_devices": 1, "gpu_driver": Probe("driver", "570.1")},
            "warn",
            "built without CUDA build of torch for CUDA",
        ),
        ("triton", {"num_gpu_devices": 1}, "warn", "triton is not installed install slower"),
        ("NCCL", {"num_gpu_devices": 2}, "warn", "without CUDA build of torch with NCCL one GPU"),
        (
            "GPU memory",
            {"gpus": (H200, replace(H200, free_bytes=GIB))},
            "warn",
            "139.0 of 140.0 1.0 of 140.0 --gpu-memory-utilization",
        ),
        ("ports", {"taken_ports": (8000,)}, "warn", "8000 in use --http-port"),
        ("cache", {"cache_error": "Read-only"}, "fail", "/cache Read-only SPECDEC_CACHE_DIR"),
        ("models", {"cached_models": ()}, "warn", "none serve downloads models list"),
        ("shared memory", {"shm_bytes": 64 * 2**20}, "warn", "64 MiB --shm-size"),
        ("shared memory", {"shm_bytes": None}, "warn", "no /dev/shm slower"),
        ("open files", {"max_open_files": 256}, "fail", "256 ulimit"),
        ("open files", {"max_open_files": 1024}, "warn", "1024 ulimit"),
        ("network", {"network": (NO_INDEX, HUB)}, "warn", "timed out https://hub reachable"),
        ("network", {"network": (NO_INDEX, NO_HUB)}, "warn", "timed out refused"),
        (
            "network",
            {"network": (NO_INDEX, NO_HUB), "cached_models": ()},
            "fail",
            "timed out refused PIP_INDEX_URL",
        ),
        (
            "service",
            {"service": Probe("127.0.0.1:9000", error="refused")},
            "fail",
            "127.0.0.1:9000 refused specdec serve address key log",
        ),
    ],
)
def test_a_failed_check_gives_advice(name, changes, status, words):
    finding = examine(replace(FIT, **changes))[name]
    assert finding.status == status
    for word in words.split():
        assert word in f"{finding.found} {finding.advice}"
    others = examine(FIT) | {name: finding}
    assert [each for each in others if others[each].status != "ok"] == [name]


@pytest.mark.parametrize(("error", "exit_code"), [("", 0), ("ImportError: ray", 1)])
def test_the_exit_code_is_1_if_a_check_fails(monkeypatch, error, exit_code):
    seen = replace(FIT, ray=Probe("ray", "2.60.0", error), taken_ports=(8000,))
    monkeypatch.setattr(doctor, "inspect_environment", lambda *_, **__: seen)
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == exit_code
    lines = result.stdout.splitlines()
    assert len(lines) == len(CHECKS) + 2
    assert lines[0] == "ok    python         3.11.7"
    assert ("fail  ray" in result.stdout) == bool(exit_code)


def test_this_machine_as_json_with_a_running_service(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    packaged_directory("smollm2-135m-instruct", tmp_path / "cache").mkdir(parents=True)
    with running(FakeService()) as service:
        arguments = ["doctor", "--json", "--address", service.address]
        result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.stdout
    report = json.loads(result.stdout)
    assert report["ok"] is True
    assert report["checks"]["models"]["found"] == "smollm2-135m-instruct"
    assert report["checks"]["service"]["found"] == f"{service.address}: tiny, specdec 0.1.0"
    assert "network" not in report["checks"]


def inspect(monkeypatch, cache, **options):
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(cache))
    defaults = {"with_network": False, "address": None, "tls_ca_file": None, "api_key": None}
    return environment.inspect_environment(options.pop("ports", ()), **{**defaults, **options})


def test_a_taken_port_and_a_service_that_is_not_there(monkeypatch, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        ports = [taken.getsockname()[1], free.getsockname()[1]]
        free.close()
        seen = inspect(monkeypatch, tmp_path, ports=ports, address=f"127.0.0.1:{ports[1]}")
    assert seen.taken_ports == (ports[0],)
    assert seen.service.error
    assert seen.torch.answer
    assert seen.available_memory_bytes > 0
    assert bool(seen.kernels_fault) == bool(native_library_fault())


def test_a_cache_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    assert inspect(monkeypatch, tmp_path / "file").cache_error
    assert inspect(monkeypatch, tmp_path / "new").cache_error == ""


def test_a_library_that_cannot_be_imported():
    assert environment._imported("no_such_library").error == "no_such_library is not installed"


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("raise ModuleNotFoundError('needs CUDA')", "ModuleNotFoundError: needs CUDA"),
        ("import no_such_part", "ModuleNotFoundError: No module named 'no_such_part'"),
    ],
)
def test_a_library_that_lacks_a_part_is_reported_with_its_error(
    statement, reason, monkeypatch, tmp_path
):
    (tmp_path / "incomplete_library.py").write_text(statement)
    monkeypatch.syspath_prepend(tmp_path)
    assert environment._imported("incomplete_library").error == reason


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("", "small sums in one shot over NVLink"),
        ("NVLink joins 0 and 1 alone", "sums by NCCL alone: NVLink joins 0 and 1 alone"),
    ],
)
def test_the_way_in_which_gpus_sum_is_reported(fault, words, monkeypatch):
    asked = []
    monkeypatch.setattr(nvlink, "gpu_id", lambda device: device.index)
    monkeypatch.setattr(nvlink, "nvlink_fault", lambda gpus: asked.append(gpus) or fault)
    assert environment._sums_of(2) == words
    assert asked == [[0, 1]]
