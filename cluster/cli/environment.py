"""What a machine offers a service, as `specdec doctor` sees it. Facts only; doctor.py judges."""

from __future__ import annotations

import importlib
import os
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

import psutil

from cluster.config.network import listen_error
from specdec.client import Client, ClientError
from specdec.config.paths import default_cache_dir

_NETWORK_TIMEOUT_S = 10.0
_SERVICE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Library:
    """A library as it was imported; `error` says why it was not."""

    version: str = ""
    error: str = ""


@dataclass(frozen=True)
class Reached:
    """Something that was asked over the network; `error` says why it did not answer."""

    name: str
    answer: str = ""
    error: str = ""


@dataclass(frozen=True)
class Surroundings:
    """What was found.

    cores: those that this process may use. kernels_fault: why those for CPUs do not compile.
    gpus: names, by torch. num_gpu_devices: by the driver.
    taken_ports: of those that were asked about. cache_error: why the cache cannot be written.
    cached_models: aliases that are in the cache. shm_bytes: of /dev/shm, None where there is none.
    network: who was asked, nobody unless wanted. service: None unless one was to be asked.
    """

    python_version: tuple[int, int, int]
    torch: Library
    num_torch_threads: int
    kernels_fault: str
    num_cores: int
    available_memory_bytes: int
    gpus: tuple[str, ...]
    num_gpu_devices: int
    ray: Library
    taken_ports: tuple[int, ...]
    cache_dir: Path
    cache_error: str
    cached_models: tuple[str, ...]
    shm_bytes: int | None
    max_open_files: int
    network: tuple[Reached, ...]
    service: Reached | None


def observe(
    ports: Sequence[int],
    *,
    asks_network: bool,
    address: str | None,
    tls_ca_file: Path | None,
    api_key: str | None,
) -> Surroundings:
    """Looks at everything, which takes seconds: torch and ray are imported."""
    from specdec.config.model_aliases import ALIASES
    from specdec.models.resolve import packaged_directory

    torch = _imported("torch")
    num_threads, gpus = (0, ()) if torch.error else _torch_sees()
    cores, memory_bytes = _machine() if torch.error else _share_of_machine()
    cache = default_cache_dir()
    return Surroundings(
        python_version=sys.version_info[:3],
        torch=torch,
        num_torch_threads=num_threads,
        kernels_fault=torch.error or _kernels_fault(),
        num_cores=cores,
        available_memory_bytes=memory_bytes,
        gpus=gpus,
        num_gpu_devices=len(list(Path("/proc/driver/nvidia/gpus").glob("*"))),
        ray=_imported("ray"),
        taken_ports=tuple(port for port in ports if listen_error("127.0.0.1", port)),
        cache_dir=cache,
        cache_error=_write_error(cache),
        cached_models=tuple(each for each in ALIASES if packaged_directory(each, cache).is_dir()),
        shm_bytes=_size(Path("/dev/shm")),
        max_open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        network=(_package_index(), _hub()) if asks_network else (),
        service=None if address is None else _service(address, tls_ca_file, api_key),
    )


def _imported(name: str) -> Library:
    try:
        module = importlib.import_module(name)
    except Exception as error:  # a broken build raises whatever it likes
        return Library(error=" ".join(f"{type(error).__name__}: {error}".split()))
    return Library(version=str(module.__version__))


def _torch_sees() -> tuple[int, tuple[str, ...]]:
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return torch.get_num_threads(), tuple(names)


def _kernels_fault() -> str:
    from specdec.worker import native_library_fault  # imports torch

    return " ".join(native_library_fault().split())


def _share_of_machine() -> tuple[int, int]:
    """Cores and bytes of memory that a service would find."""
    from specdec.config.hardware import available_cpus, available_memory_bytes

    return available_cpus(), available_memory_bytes()


def _machine() -> tuple[int, int]:
    """The same without regard to control groups, for when torch cannot be imported."""
    return len(os.sched_getaffinity(0)), psutil.virtual_memory().available


def _write_error(directory: Path) -> str:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _size(path: Path) -> int | None:
    return shutil.disk_usage(path).total if path.is_dir() else None


def _package_index() -> Reached:
    """By pip, which knows what index is configured."""
    command = [sys.executable, "-m", "pip", "index", "versions", "pip"]
    try:
        asked = subprocess.run(
            command, capture_output=True, text=True, timeout=_NETWORK_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Reached("package index", error=f"no answer within {_NETWORK_TIMEOUT_S:.0f} s")
    if asked.returncode:
        last_line = (asked.stderr.strip().splitlines() or ["pip says nothing"])[-1]
        return Reached("package index", error=last_line)
    return Reached("package index", answer="answers")


def _hub() -> Reached:
    url = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    request = urllib.request.Request(url, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=_NETWORK_TIMEOUT_S):
            return Reached("model hub", answer=url)
    except (urllib.error.URLError, OSError) as error:
        return Reached("model hub", error=f"{url}: {error}")


def _service(address: str, tls_ca_file: Path | None, api_key: str | None) -> Reached:
    try:
        with Client(
            address, timeout_s=_SERVICE_TIMEOUT_S, tls_ca_file=tls_ca_file, api_key=api_key
        ) as client:
            info = client.model_info()
    except ClientError as error:
        return Reached(address, error=str(error))
    return Reached(address, answer=f"{info.model}, specdec {info.version}")
