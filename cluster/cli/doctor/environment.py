"""Inspects the machine for `specdec doctor`: facts only; doctor.py evaluates them."""

from __future__ import annotations

import importlib
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.config.network import listen_error
from specdec.client import Client, ClientError
from specdec.config.hardware import available_cpus, available_memory_bytes, default_cache_dir
from specdec.types.network import bypasses_proxy

_NVIDIA_DRIVER = Path("/proc/driver/nvidia")
_DRIVER_VERSION = re.compile(r"\d+\.\d+(\.\d+)?")

_NETWORK_TIMEOUT_S = 10.0
_SERVICE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Probe:
    """Version of a library or answer of a remote endpoint, or the error instead."""

    name: str
    answer: str = ""
    error: str = ""


@dataclass(frozen=True)
class GpuState:
    """A GPU that torch can use: its name, and the bytes of its memory, free and in total."""

    name: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Environment:
    """Facts about the machine and its environment.

    kernels_fault: why the CPU kernels do not compile, or "". num_cores: available to this process.
    gpus: as reported by torch. num_gpu_devices: GPUs as reported by the driver. gpu_driver: version
    of NVIDIA's kernel driver. cuda: version that torch was built for. nccl: version in torch's
    build. triton: the package.
    taken_ports: ports in use. cache_error: why the cache is not writable, or "".
    cached_models: aliases in the cache. shm_bytes: size of /dev/shm, None without it.
    network: the remote endpoints that were checked. service: None if no address was given.
    """

    python_version: tuple[int, int, int]
    torch: Probe
    num_torch_threads: int
    kernels_fault: str
    num_cores: int
    available_memory_bytes: int
    gpus: tuple[GpuState, ...]
    num_gpu_devices: int
    gpu_driver: Probe
    cuda: Probe
    nccl: Probe
    triton: Probe
    ray: Probe
    taken_ports: tuple[int, ...]
    cache_dir: Path
    cache_error: str
    cached_models: tuple[str, ...]
    shm_bytes: int | None
    max_open_files: int
    network: tuple[Probe, ...]
    service: Probe | None


def inspect_environment(
    ports: Sequence[int],
    *,
    with_network: bool,
    address: str | None,
    tls_ca_file: Path | None,
    api_key: str | None,
) -> Environment:
    """Collect the facts, which takes seconds: torch and ray are imported."""
    from specdec.config.model_aliases import ALIASES
    from specdec.models.resolve import packaged_directory

    torch = _imported("torch")
    num_threads, gpus = (0, ()) if torch.error else _torch_threads_and_gpus()
    cuda, nccl = _cuda_and_nccl(torch)

    cache = default_cache_dir()
    return Environment(
        python_version=sys.version_info[:3],
        torch=torch,
        num_torch_threads=num_threads,
        kernels_fault=torch.error or _kernels_fault(),
        num_cores=available_cpus(),
        available_memory_bytes=available_memory_bytes(),
        gpus=gpus,
        num_gpu_devices=len(list((_NVIDIA_DRIVER / "gpus").glob("*"))),
        gpu_driver=_gpu_driver(),
        cuda=cuda,
        nccl=nccl,
        triton=_imported("triton"),
        ray=_imported("ray"),
        taken_ports=tuple(port for port in ports if listen_error("127.0.0.1", port)),
        cache_dir=cache,
        cache_error=_write_error(cache),
        cached_models=tuple(each for each in ALIASES if packaged_directory(each, cache).is_dir()),
        shm_bytes=_size(Path("/dev/shm")),
        max_open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        network=(_package_index(), _hub()) if with_network else (),
        service=None if address is None else _service(address, tls_ca_file, api_key),
    )


def _imported(name: str) -> Probe:
    try:
        module = importlib.import_module(name)
    except Exception as error:  # a broken build may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            return Probe(name, error=f"{name} is not installed")
        return Probe(name, error=" ".join(f"{type(error).__name__}: {error}".split()))
    return Probe(name, answer=str(module.__version__))


def _torch_threads_and_gpus() -> tuple[int, tuple[GpuState, ...]]:
    import torch

    gpus = [
        GpuState(torch.cuda.get_device_name(index), *torch.cuda.mem_get_info(index))
        for index in range(torch.cuda.device_count())
    ]
    return torch.get_num_threads(), tuple(gpus)


def _gpu_driver() -> Probe:
    """Return the version of NVIDIA's kernel driver."""
    try:
        first = (_NVIDIA_DRIVER / "version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return Probe("driver", error="no NVIDIA driver is loaded")
    found = _DRIVER_VERSION.search(first)
    return Probe("driver", answer=found[0] if found else first)


def _cuda_and_nccl(torch_probe: Probe) -> tuple[Probe, Probe]:
    """Return the versions of CUDA and NCCL of torch's build."""
    if torch_probe.error:
        return Probe("CUDA", error=torch_probe.error), Probe("NCCL", error=torch_probe.error)
    import torch
    import torch.distributed as dist

    if torch.version.cuda is None:
        build = f"torch {torch.__version__} is built without CUDA"
        return Probe("CUDA", error=build), Probe("NCCL", error=build)
    cuda = Probe("CUDA", answer=torch.version.cuda)
    if not dist.is_nccl_available():
        return cuda, Probe("NCCL", error="this build of torch has no NCCL")
    version, num_gpus = ".".join(map(str, torch.cuda.nccl.version())), torch.cuda.device_count()
    sums = f"; {_sums_of(num_gpus)}" if num_gpus > 1 else ""
    return cuda, Probe("NCCL", answer=f"{version}{sums}")


def _sums_of(num_gpus: int) -> str:
    """Return how ranks on these GPUs sum small tensors."""
    import torch

    from specdec.kernels.nvlink import gpu_id, nvlink_fault

    fault = nvlink_fault([gpu_id(torch.device("cuda", index)) for index in range(num_gpus)])
    return f"sums by NCCL alone: {fault}" if fault else "small sums in one shot over NVLink"


def _kernels_fault() -> str:
    from specdec.worker import native_library_fault  # imports torch

    return " ".join(native_library_fault().split())


def _write_error(directory: Path) -> str:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _size(path: Path) -> int | None:
    return shutil.disk_usage(path).total if path.is_dir() else None


def _package_index() -> Probe:
    """Check the package index that pip is configured with."""
    command = [sys.executable, "-m", "pip", "index", "versions", "pip"]
    try:
        completed = subprocess.run(
            command, capture_output=True, text=True, timeout=_NETWORK_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Probe("package index", error=f"no answer within {_NETWORK_TIMEOUT_S:.0f} s")
    if completed.returncode:
        last_line = (completed.stderr.strip().splitlines() or ["pip failed without output"])[-1]
        return Probe("package index", error=last_line)
    return Probe("package index", answer="reachable")


def _hub() -> Probe:
    url = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    request = urllib.request.Request(url, method="HEAD")
    direct = [urllib.request.ProxyHandler({})] if bypasses_proxy(url) else []
    try:
        with urllib.request.build_opener(*direct).open(request, timeout=_NETWORK_TIMEOUT_S):
            return Probe("model hub", answer=url)
    except (urllib.error.URLError, OSError) as error:
        return Probe("model hub", error=f"{url}: {error}")


def _service(address: str, tls_ca_file: Path | None, api_key: str | None) -> Probe:
    try:
        with Client(
            address, timeout_s=_SERVICE_TIMEOUT_S, tls_ca_file=tls_ca_file, api_key=api_key
        ) as client:
            info = client.model_info()
    except ClientError as error:
        return Probe(address, error=str(error))
    return Probe(address, answer=f"{info.model}, specdec {info.version}")
