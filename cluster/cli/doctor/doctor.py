"""`specdec doctor`: checks whether this machine can run the service, and suggests fixes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import click

from cluster.cli.doctor.environment import Environment, Probe, inspect_environment
from cluster.cli.options import api_key_flag, tls_ca_flag
from cluster.cli.output import json_flag, show_result

Status = Literal["ok", "warn", "fail"]

DEFAULT_PORTS = (9000, 8000)

_MIB, _GIB = 2**20, 2**30
_OLDEST_PYTHON = (3, 11, 0)
_NEEDED_BYTES = int(2.7 * _GIB)
"""GiB: 0.5 for the default model, 0.25 for its drafter, 0.7 for the KV caches of one long sequence,
1.2 for the processes of the service."""
_AMPLE_BYTES = 4 * _GIB
_OBJECT_STORE_BYTES = 100 * _MIB
_FREE_GPU_SHARE = 0.9
"""The default of --gpu-memory-utilization."""
_MAX_FAULT_CHARS = 300
_NEEDED_FILES, _AMPLE_FILES = 512, 4096

_COLOURS: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True)
class Finding:
    """Result of a check, with advice unless the status is ok."""

    status: Status
    found: str
    advice: str = ""


def check_python(env: Environment) -> Finding:
    """Check the version of Python."""
    found = ".".join(map(str, env.python_version))
    if env.python_version < _OLDEST_PYTHON:
        return Finding("fail", found, "install Python 3.11 or newer and rebuild the environment")
    return Finding("ok", found)


def check_torch(env: Environment) -> Finding:
    """Check that torch can be imported and does not use more threads than cores."""
    if env.torch.error:
        return _not_imported(env.torch)
    threads, cores = env.num_torch_threads, env.num_cores
    found = f"{env.torch.answer}, {threads} threads on {cores} cores"
    if threads > cores:
        advice = f"set OMP_NUM_THREADS={cores}: more threads than cores slow each other down"
        return Finding("warn", found, advice)
    return Finding("ok", found)


def check_kernels(env: Environment) -> Finding:
    """Check that the C++ CPU kernels compile; without them torch's are used, and w8a8 is not."""
    if not env.kernels_fault:
        return Finding("ok", "compiled for this processor")
    found = f"not available: {env.kernels_fault[:_MAX_FAULT_CHARS]}"
    advice = (
        "install g++ or clang++: without native kernels CPUs are slower and w8a8 is unsupported"
    )
    return Finding("warn", found, advice)


def check_ray(env: Environment) -> Finding:
    """Check that Ray can be imported."""
    return _not_imported(env.ray) if env.ray.error else Finding("ok", env.ray.answer)


def check_memory(env: Environment) -> Finding:
    """Check that the default model fits into the available memory."""
    found = f"{env.available_memory_bytes / _GIB:.1f} GiB available"
    if env.available_memory_bytes < _NEEDED_BYTES:
        needed = f"{_NEEDED_BYTES / _GIB:.1f} GiB"
        return Finding("fail", found, f"the default model needs {needed}: stop other processes")
    if env.available_memory_bytes < _AMPLE_BYTES:
        return Finding("warn", found, "enough for the default model, not for much larger ones")
    return Finding("ok", found)


def check_gpus(env: Environment) -> Finding:
    """Check that torch can use all GPUs of the driver; no GPU is ok."""
    if len(env.gpus) < env.num_gpu_devices:
        found = f"{env.num_gpu_devices} present, {len(env.gpus)} usable"
        return Finding("warn", found, "install a build of torch for the driver's CUDA version")
    names = ", ".join(gpu.name for gpu in env.gpus)
    return Finding("ok", names or "none: models run on the CPU")


def check_gpu_driver(env: Environment) -> Finding:
    """Check the driver of GPUs, and that torch is built for them; without a GPU nothing is due."""
    if not env.num_gpu_devices:
        return _without_gpu(env.gpu_driver)
    if env.gpu_driver.error or env.cuda.error:
        found = "; ".join(each.error for each in (env.gpu_driver, env.cuda) if each.error)
        return Finding("warn", found, "install NVIDIA's driver and a build of torch for CUDA")
    return Finding("ok", f"driver {env.gpu_driver.answer}, torch for CUDA {env.cuda.answer}")


def check_triton(env: Environment) -> Finding:
    """Check that Triton can be imported, which compiles the kernels for GPUs."""
    if not env.num_gpu_devices:
        return _without_gpu(env.triton)
    if env.triton.error:
        advice = "install triton of the version that torch names: without it GPUs use torch's"
        return Finding("warn", env.triton.error, f"{advice} operators, which are slower")
    return Finding("ok", env.triton.answer)


def check_nccl(env: Environment) -> Finding:
    """Check that ranks on several GPUs can exchange tensors."""
    if env.num_gpu_devices < 2:
        return Finding("ok", "not needed: a rank on one GPU exchanges nothing")
    if env.nccl.error:
        advice = "install a build of torch with NCCL: without it a model runs on one GPU only"
        return Finding("warn", env.nccl.error, advice)
    return Finding("ok", env.nccl.answer)


def check_gpu_memory(env: Environment) -> Finding:
    """Check that the memory of each GPU is free; other processes may hold some."""
    if not env.gpus:
        return Finding("ok", "not needed: models run on the CPU")
    found = ", ".join(
        f"{gpu.free_bytes / _GIB:.1f} of {gpu.total_bytes / _GIB:.1f} GiB free" for gpu in env.gpus
    )
    if any(gpu.free_bytes < _FREE_GPU_SHARE * gpu.total_bytes for gpu in env.gpus):
        advice = "stop the other processes on the GPU, or lower --gpu-memory-utilization"
        return Finding("warn", found, advice)
    return Finding("ok", found)


def _without_gpu(probe: Probe) -> Finding:
    """Return what was found of a library that only GPUs need, on a machine without one."""
    return Finding("ok", f"not needed without a GPU ({probe.error or probe.answer})")


def check_ports(env: Environment) -> Finding:
    """Check that the default ports are free."""
    if not env.taken_ports:
        return Finding("ok", f"{' and '.join(map(str, DEFAULT_PORTS))} are free")
    found = f"{' and '.join(map(str, env.taken_ports))} in use"
    advice = "unless the service itself uses them, set other ports with --grpc-port and --http-port"
    return Finding("warn", found, advice)


def check_cache(env: Environment) -> Finding:
    """Check that the model cache is writable."""
    if env.cache_error:
        advice = "make it writable, or set SPECDEC_CACHE_DIR to a writable directory"
        return Finding("fail", f"{env.cache_dir}: {env.cache_error}", advice)
    return Finding("ok", str(env.cache_dir))


def check_models(env: Environment) -> Finding:
    """Check that a model is in the cache."""
    if env.cached_models:
        return Finding("ok", ", ".join(env.cached_models))
    advice = "specdec serve downloads the model; specdec models list shows the sizes"
    return Finding("warn", "none in the cache", advice)


def check_shared_memory(env: Environment) -> Finding:
    """Check that Ray's object store fits in shared memory."""
    if env.shm_bytes is None:
        return Finding("warn", "no /dev/shm", "Ray uses the disk instead, which is slower")
    found = f"{env.shm_bytes / _MIB:.0f} MiB in /dev/shm"
    if env.shm_bytes < _OBJECT_STORE_BYTES:
        return Finding("warn", found, "increase it, such as with docker run --shm-size=1g")
    return Finding("ok", found)


def check_open_files(env: Environment) -> Finding:
    """Check that the limit on file descriptors suffices for Ray and client connections."""
    found = f"limit {env.max_open_files}"
    if env.max_open_files < _NEEDED_FILES:
        return Finding("fail", found, f"raise the limit: ulimit -n {_AMPLE_FILES}")
    if env.max_open_files < _AMPLE_FILES:
        return Finding("warn", found, f"raise the limit for many clients: ulimit -n {_AMPLE_FILES}")
    return Finding("ok", found)


def check_network(env: Environment) -> Finding:
    """Check that models can be downloaded; one source, or a cached model, is enough."""
    unreachable = [each for each in env.network if each.error]
    found = "; ".join(_reached_text(each) for each in env.network)
    if not unreachable:
        return Finding("ok", found)
    if len(unreachable) == len(env.network) and not env.cached_models:
        return Finding("fail", found, "set a proxy or a mirror (PIP_INDEX_URL, HF_ENDPOINT)")
    return Finding("warn", found, "models that are reachable or in the cache can be served")


def check_service(env: Environment) -> Finding:
    """Check that the service at the given address responds."""
    assert env.service is not None, "no address was given"
    if env.service.error:
        advice = "start one with specdec serve, or check its address, key and log"
        return Finding("fail", _reached_text(env.service), advice)
    return Finding("ok", _reached_text(env.service))


CHECKS: dict[str, Callable[[Environment], Finding]] = {
    "python": check_python,
    "torch": check_torch,
    "CPU kernels": check_kernels,
    "ray": check_ray,
    "memory": check_memory,
    "GPUs": check_gpus,
    "GPU driver": check_gpu_driver,
    "triton": check_triton,
    "NCCL": check_nccl,
    "GPU memory": check_gpu_memory,
    "ports": check_ports,
    "cache": check_cache,
    "models": check_models,
    "shared memory": check_shared_memory,
    "open files": check_open_files,
}


def examine(env: Environment) -> dict[str, Finding]:
    """Return the findings by check; network and service only if they were inspected."""
    checks = dict(CHECKS)
    if env.network:
        checks["network"] = check_network
    if env.service is not None:
        checks["service"] = check_service
    return {name: check(env) for name, check in checks.items()}


def _not_imported(library: Probe) -> Finding:
    return Finding("fail", library.error, "rebuild the environment, such as with make setup")


def _reached_text(reached: Probe) -> str:
    return f"{reached.name}: {reached.error or reached.answer}"


def _line(name: str, finding: Finding) -> str:
    status = click.style(f"{finding.status:<5}", fg=_COLOURS[finding.status])
    advice = f"; {finding.advice}" if finding.advice else ""
    return f"{status} {name:<14} {finding.found}{advice}"


@click.command(short_help="Check whether this machine can run the service.")
@click.option(
    "--network",
    "with_network",
    is_flag=True,
    help="Also check that the package index and the model hub are reachable.",
)
@click.option("--address", help="Also check the service at this host:port.")
@tls_ca_flag
@api_key_flag
@json_flag
@click.pass_context
def doctor(
    ctx: click.Context,
    with_network: bool,
    address: str | None,
    tls_ca_file: Path | None,
    api_key: str | None,
    as_json: bool,
) -> None:
    """Check whether this machine can run the service, and suggest fixes.

    Prints one line per check. The exit code is 1 if a check fails.
    """
    findings = examine(
        inspect_environment(
            DEFAULT_PORTS,
            with_network=with_network,
            address=address,
            tls_ca_file=tls_ca_file,
            api_key=api_key,
        )
    )
    is_fit = all(finding.status != "fail" for finding in findings.values())
    checks = {name: asdict(finding) for name, finding in findings.items()}
    lines = [_line(name, finding) for name, finding in findings.items()]
    show_result({"ok": is_fit, "checks": checks}, "\n".join(lines), as_json)
    ctx.exit(0 if is_fit else 1)
