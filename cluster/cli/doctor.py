"""`specdec doctor`: what a new user stumbles over, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import click

from cluster.cli.connection_options import api_key_flag
from cluster.cli.environment import Library, Reached, Surroundings, observe
from cluster.cli.output import json_flag, show_json

Status = Literal["ok", "warn", "fail"]

DEFAULT_PORTS = (9000, 8000)

_MIB, _GIB = 2**20, 2**30
_OLDEST_PYTHON = (3, 11, 0)
_NEEDED_BYTES = int(2.7 * _GIB)
"""The default model takes 0.5 GiB, its int8 copy 0.25, KV of one long sequence in both 0.7, the
processes of the service 1.2."""
_AMPLE_BYTES = 4 * _GIB
_OBJECT_STORE_BYTES = 100 * _MIB
_MAX_FAULT_CHARS = 300
_NEEDED_FILES, _AMPLE_FILES = 512, 4096

_COLOURS: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True)
class Finding:
    """What a check found, and what to do about it unless all is well."""

    status: Status
    found: str
    advice: str = ""


def check_python(seen: Surroundings) -> Finding:
    """The interpreter's version."""
    found = ".".join(map(str, seen.python_version))
    if seen.python_version < _OLDEST_PYTHON:
        return Finding("fail", found, "install Python 3.11 or newer and make the environment anew")
    return Finding("ok", found)


def check_torch(seen: Surroundings) -> Finding:
    """That torch loads, and has no more threads than cores to run them."""
    if seen.torch.error:
        return _not_imported(seen.torch)
    threads, cores = seen.num_torch_threads, seen.num_cores
    found = f"{seen.torch.version}, {threads} threads on {cores} cores"
    if threads > cores:
        advice = f"set OMP_NUM_THREADS={cores}: threads beyond the cores wait for one another"
        return Finding("warn", found, advice)
    return Finding("ok", found)


def check_kernels(seen: Surroundings) -> Finding:
    """That the kernels for CPUs compile; without them models run too, but in w8a8, by torch's."""
    if not seen.kernels_fault:
        return Finding("ok", "compiled for this processor")
    found = f"torch's only: {seen.kernels_fault[:_MAX_FAULT_CHARS]}"
    advice = "install g++ or clang++: without them models run slower on CPUs, in w8a8 not at all"
    return Finding("warn", found, advice)


def check_ray(seen: Surroundings) -> Finding:
    """That Ray loads."""
    return _not_imported(seen.ray) if seen.ray.error else Finding("ok", seen.ray.version)


def check_memory(seen: Surroundings) -> Finding:
    """That the default model fits."""
    found = f"{seen.available_memory_bytes / _GIB:.1f} GiB free"
    if seen.available_memory_bytes < _NEEDED_BYTES:
        needed = f"{_NEEDED_BYTES / _GIB:.1f} GiB"
        return Finding("fail", found, f"the default model needs {needed}: end something else")
    if seen.available_memory_bytes < _AMPLE_BYTES:
        return Finding("warn", found, "enough for the default model, not for much larger ones")
    return Finding("ok", found)


def check_gpus(seen: Surroundings) -> Finding:
    """That torch sees the GPUs that the driver sees; none is fine."""
    if len(seen.gpus) < seen.num_gpu_devices:
        found = f"{seen.num_gpu_devices} present, {len(seen.gpus)} usable"
        return Finding("warn", found, "install a torch that is built for the driver's CUDA")
    return Finding("ok", ", ".join(seen.gpus) or "none: models run on the CPU")


def check_ports(seen: Surroundings) -> Finding:
    """That the default ports are free."""
    if not seen.taken_ports:
        return Finding("ok", f"{' and '.join(map(str, DEFAULT_PORTS))} are free")
    found = f"{' and '.join(map(str, seen.taken_ports))} in use"
    advice = "unless that is the service itself, serve with other --grpc-port and --http-port"
    return Finding("warn", found, advice)


def check_cache(seen: Surroundings) -> Finding:
    """That models can be kept."""
    if seen.cache_error:
        advice = "make it writable, or set SPECDEC_CACHE_DIR to a directory that is"
        return Finding("fail", f"{seen.cache_dir}: {seen.cache_error}", advice)
    return Finding("ok", str(seen.cache_dir))


def check_models(seen: Surroundings) -> Finding:
    """That there is a model to serve."""
    if seen.cached_models:
        return Finding("ok", ", ".join(seen.cached_models))
    advice = "specdec serve fetches one; specdec models list says which and how large"
    return Finding("warn", "none in the cache", advice)


def check_shared_memory(seen: Surroundings) -> Finding:
    """That Ray's object store fits in shared memory."""
    if seen.shm_bytes is None:
        return Finding("warn", "no /dev/shm", "Ray uses the disk instead, which is slower")
    found = f"{seen.shm_bytes / _MIB:.0f} MiB in /dev/shm"
    if seen.shm_bytes < _OBJECT_STORE_BYTES:
        return Finding("warn", found, "give the container more, as by --shm-size=1g")
    return Finding("ok", found)


def check_open_files(seen: Surroundings) -> Finding:
    """That Ray's processes and the clients' connections find file descriptors."""
    found = f"{seen.max_open_files} at once"
    if seen.max_open_files < _NEEDED_FILES:
        return Finding("fail", found, f"raise the limit, as by ulimit -n {_AMPLE_FILES}")
    if seen.max_open_files < _AMPLE_FILES:
        return Finding("warn", found, f"raise it for many clients, as by ulimit -n {_AMPLE_FILES}")
    return Finding("ok", found)


def check_network(seen: Surroundings) -> Finding:
    """That models can be fetched. One source is enough, and none where a model is here."""
    lost = [each for each in seen.network if each.error]
    found = "; ".join(_heard(each) for each in seen.network)
    if not lost:
        return Finding("ok", found)
    if len(lost) == len(seen.network) and not seen.cached_models:
        return Finding("fail", found, "set a proxy or a mirror (PIP_INDEX_URL, HF_ENDPOINT)")
    return Finding("warn", found, "what is reachable, or in the cache, can be served")


def check_service(seen: Surroundings) -> Finding:
    """That a service answers."""
    assert seen.service is not None, "asked about a service that was not looked for"
    if seen.service.error:
        advice = "start one by specdec serve, or see what its log says"
        return Finding("fail", _heard(seen.service), advice)
    return Finding("ok", _heard(seen.service))


CHECKS: dict[str, Callable[[Surroundings], Finding]] = {
    "python": check_python,
    "torch": check_torch,
    "CPU kernels": check_kernels,
    "ray": check_ray,
    "memory": check_memory,
    "GPUs": check_gpus,
    "ports": check_ports,
    "cache": check_cache,
    "models": check_models,
    "shared memory": check_shared_memory,
    "open files": check_open_files,
}


def examine(seen: Surroundings) -> dict[str, Finding]:
    """Every check by its name; network and service only where they were looked at."""
    checks = dict(CHECKS)
    if seen.network:
        checks["network"] = check_network
    if seen.service is not None:
        checks["service"] = check_service
    return {name: check(seen) for name, check in checks.items()}


def _not_imported(library: Library) -> Finding:
    return Finding("fail", library.error, "make the environment anew, as by make setup")


def _heard(reached: Reached) -> str:
    return f"{reached.name}: {reached.error or reached.answer}"


def _line(name: str, finding: Finding) -> str:
    status = click.style(f"{finding.status:<5}", fg=_COLOURS[finding.status])
    advice = f"; {finding.advice}" if finding.advice else ""
    return f"{status} {name:<14} {finding.found}{advice}"


@click.command(short_help="Check this machine, one line each.")
@click.option("--network", "asks_network", is_flag=True, help="Also see where models come from.")
@click.option("--address", help="host:port of a running service to ask, too.")
@click.option(
    "--tls-ca-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Certificates (PEM) that vouch for that service. Default: no TLS.",
)
@api_key_flag
@json_flag
@click.pass_context
def doctor(
    ctx: click.Context,
    asks_network: bool,
    address: str | None,
    tls_ca_file: Path | None,
    api_key: str | None,
    as_json: bool,
) -> None:
    """Check this machine, one line each; exit code 1 where the service could not run."""
    findings = examine(
        observe(
            DEFAULT_PORTS,
            asks_network=asks_network,
            address=address,
            tls_ca_file=tls_ca_file,
            api_key=api_key,
        )
    )
    is_fit = all(finding.status != "fail" for finding in findings.values())
    if as_json:
        checks = {name: asdict(finding) for name, finding in findings.items()}
        show_json({"ok": is_fit, "checks": checks})
    else:
        for name, finding in findings.items():
            click.echo(_line(name, finding))
    ctx.exit(0 if is_fit else 1)
