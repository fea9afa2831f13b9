"""`specdec doctor`: what a new user stumbles over, checked and told, with what to do about it.

A check looks at one thing through an `Environment`, so that a test can hand it a broken one.
"""

from __future__ import annotations

import os
import platform
import resource
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from cluster.resources import available_cpus, available_memory_bytes
from specdec.client import Client, ClientError
from specdec.models.store import ALIASES, default_cache_dir

_GIB = 2**30
_MIN_PYTHON = (3, 11)
_LEAST_MEMORY_GIB, _ENOUGH_MEMORY_GIB = 1.5, 4.0
_ENOUGH_OPEN_FILES = 4096
_ENOUGH_SHARED_MEMORY_GIB = 0.2  # Ray's object store, which carries no steps here


class Verdict(Enum):
    """What a check came to; a service does not start, or not well, after a FAIL."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """What a check saw. advice: what to do about it; empty where nothing is."""

    verdict: Verdict
    what: str
    advice: str = ""


@dataclass(frozen=True)
class Environment:
    """What the checks look at. Fields are functions where looking takes time or may fail."""

    host: str
    ports: tuple[int, ...]
    address: str | None
    python_version: tuple[int, ...] = field(
        default=tuple(map(int, platform.python_version_tuple()))
    )
    num_cpus: Callable[[], int] = available_cpus
    memory_bytes: Callable[[], int] = available_memory_bytes
    shared_memory_bytes: Callable[[], int] = lambda: psutil.disk_usage("/dev/shm").free
    num_open_files: Callable[[], int] = lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    package_version: Callable[[str], str] = version
    cache_dir: Callable[[], Path] = default_cache_dir


def check_python(environment: Environment) -> Finding:
    """Is the interpreter new enough?"""
    found = ".".join(map(str, environment.python_version))
    if environment.python_version[:2] < _MIN_PYTHON:
        return Finding(Verdict.FAIL, f"Python {found}", "3.11 or newer is needed")
    return Finding(Verdict.OK, f"Python {found}")


def check_packages(environment: Environment) -> Finding:
    """Are the packages there that carry the service?"""
    found, missing = [], []
    for name in ("torch", "transformers", "ray", "grpcio", "pyzmq"):
        try:
            found.append(f"{name} {environment.package_version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        advice = "install the service again: pip install specdec, or make setup in its repository"
        return Finding(Verdict.FAIL, f"missing: {', '.join(missing)}", advice)
    return Finding(Verdict.OK, ", ".join(found))


def check_cpus(environment: Environment) -> Finding:
    """How many cores may be used?"""
    count = environment.num_cpus()
    if count < 2:
        advice = "it works, slowly: the model, the draft model and the Router share one core"
        return Finding(Verdict.WARN, "1 core", advice)
    return Finding(Verdict.OK, f"{count} cores")


def check_memory(environment: Environment) -> Finding:
    """Is there memory for a small model?"""
    gib = environment.memory_bytes() / _GIB
    what = f"{gib:.1f} GiB of memory are free"
    if gib < _LEAST_MEMORY_GIB:
        return Finding(Verdict.FAIL, what, f"the smallest model needs {_LEAST_MEMORY_GIB} GiB")
    if gib < _ENOUGH_MEMORY_GIB:
        return Finding(Verdict.WARN, what, "lower max_model_len or kv_cache_memory_gib if need be")
    return Finding(Verdict.OK, what)


def check_shared_memory(environment: Environment) -> Finding:
    """Does Ray find room in /dev/shm?"""
    try:
        gib = environment.shared_memory_bytes() / _GIB
    except OSError as error:
        return Finding(Verdict.WARN, f"/dev/shm: {error.strerror}", "Ray will use /tmp instead")
    what = f"{gib:.1f} GiB free in /dev/shm"
    if gib < _ENOUGH_SHARED_MEMORY_GIB:
        return Finding(Verdict.WARN, what, "in a container, raise it: docker run --shm-size=1g")
    return Finding(Verdict.OK, what)


def check_open_files(environment: Environment) -> Finding:
    """May a process open as many files as Ray and many streams want?"""
    limit = environment.num_open_files()
    if 0 <= limit < _ENOUGH_OPEN_FILES:
        advice = f"raise it for many streams: ulimit -n {_ENOUGH_OPEN_FILES}"
        return Finding(Verdict.WARN, f"{limit} open files are allowed", advice)
    return Finding(Verdict.OK, f"{'unlimited' if limit < 0 else limit} open files are allowed")


def check_ports(environment: Environment) -> Finding:
    """Could the service listen?"""
    taken = [port for port in environment.ports if not _is_free(environment.host, port)]
    if taken:
        advice = "stop what listens there, or choose others with --grpc-port and --http-port"
        return Finding(Verdict.FAIL, f"in use: {', '.join(map(str, taken))}", advice)
    return Finding(Verdict.OK, f"{' and '.join(map(str, environment.ports))} are free")


def check_models(environment: Environment) -> Finding:
    """Can models be kept, and which are here?"""
    cache = environment.cache_dir() / "models"
    nearest = next(each for each in (cache, *cache.parents) if each.exists())
    if not os.access(nearest, os.W_OK):
        advice = "choose another with SPECDEC_CACHE_DIR"
        return Finding(Verdict.FAIL, f"{cache} cannot be written", advice)
    here = [name for name in ALIASES if (cache / name).is_dir()]
    if not here:
        return Finding(Verdict.OK, f"none in {cache}; the first start fetches one")
    return Finding(Verdict.OK, f"{', '.join(here)} in {cache}")


def check_service(environment: Environment) -> Finding:
    """Does the service answer?"""
    assert environment.address is not None, "no service was named"
    try:
        with Client(environment.address, timeout_s=10.0) as client:
            info = client.model_info()
    except ClientError as error:
        return Finding(Verdict.FAIL, error.message, "see the log of the service")
    return Finding(Verdict.OK, f"{info.model} answers at {environment.address}")


CHECKS: dict[str, Callable[[Environment], Finding]] = {
    "python": check_python,
    "packages": check_packages,
    "cores": check_cpus,
    "memory": check_memory,
    "shared memory": check_shared_memory,
    "open files": check_open_files,
    "models": check_models,
}


def examine(environment: Environment) -> dict[str, Finding]:
    """Every check by name. A service that is asked about holds its ports; they are not judged."""
    last = {"service": check_service} if environment.address else {"ports": check_ports}
    return {name: check(environment) for name, check in (CHECKS | last).items()}


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
