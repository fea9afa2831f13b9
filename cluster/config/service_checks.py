"""Checks of settings of the service that depend on each other; each raises InvalidValueError."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

from specdec.config.speculation.methods import DraftModelConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.types.errors import InvalidValueError

if TYPE_CHECKING:
    from pathlib import Path

    from specdec.config.engine import AdapterLimits
    from specdec.types.adapters import AdapterOrder


class Settings(Protocol):
    """The settings of a ServeConfig that are checked; see there."""

    @property
    def speculative_config(self) -> SpeculativeConfig | None: ...

    @property
    def draft_model(self) -> DraftModelConfig | None: ...

    @property
    def adapter_limits(self) -> AdapterLimits | None: ...

    @property
    def served_model_name(self) -> str: ...

    @property
    def enable_lora(self) -> bool: ...

    @property
    def lora_modules(self) -> str | None: ...

    @property
    def startup_adapters(self) -> tuple[AdapterOrder, ...]: ...

    @property
    def grpc_port(self) -> int: ...

    @property
    def http_port(self) -> int: ...

    @property
    def tls_cert_file(self) -> Path | None: ...

    @property
    def tls_key_file(self) -> Path | None: ...

    @property
    def num_replicas(self) -> int: ...

    @property
    def max_replicas(self) -> int | None: ...

    @property
    def slo(self) -> str | None: ...

    @property
    def ingress(self) -> str: ...

    @property
    def ray_address(self) -> str | None: ...

    @property
    def draft_labels(self) -> str | None: ...

    @property
    def otlp_traces_endpoint(self) -> str | None: ...

    @property
    def training_buffer_tokens(self) -> int: ...

    @property
    def training_cache_salt(self) -> str | None: ...

    @property
    def allow_synthetic_acceptance(self) -> bool: ...


def check_ports_and_tls(config: Settings) -> None:
    """Check that the two APIs have different ports, and that TLS has both files."""
    if config.grpc_port == config.http_port:
        limit = f"different from grpc_port ({config.grpc_port})"
        raise InvalidValueError("http_port", config.http_port, limit)
    if (config.tls_cert_file is None) != (config.tls_key_file is None):
        limit = "given together with tls_cert_file, or not at all"
        raise InvalidValueError("tls_key_file", config.tls_key_file, limit)
    if config.tls_cert_file is not None and config.ingress != "embedded":
        limit = "left out unless ingress is embedded"
        raise InvalidValueError("tls_cert_file", str(config.tls_cert_file), limit)


def check_lora_modules(config: Settings) -> None:
    """Check that adapters are loaded at the start only where there are adapters."""
    if config.lora_modules is not None and not config.enable_lora:
        limit = "left out unless enable_lora is given"
        raise InvalidValueError("lora_modules", config.lora_modules, limit)


def check_startup_adapters(config: Settings) -> None:
    """Check the number of the adapters that are loaded at the start, and their names."""
    limits, count = config.adapter_limits, len(config.startup_adapters)
    if limits is not None and count > limits.max_loaded:
        limit = f"at least {count}, the number of lora_modules"
        raise InvalidValueError("max_cpu_loras", limits.max_loaded, limit)
    if any(each.name == config.served_model_name for each in config.startup_adapters):
        limit = "without an adapter that has the name of the model"
        raise InvalidValueError("lora_modules", config.lora_modules, limit)


def check_verifiers(config: Settings) -> None:
    """Check that a verifier for measurements alone is allowed explicitly."""
    speculation = config.speculative_config
    if speculation is None or config.allow_synthetic_acceptance:
        return
    if "synthetic" in speculation.allowed_verifiers:
        limit = "without synthetic unless allow_synthetic_acceptance is given: it accepts wrong "
        limit += "draft tokens, for measurements"
        field = "speculative_config.allowed_verifiers"
        raise InvalidValueError(field, speculation.allowed_verifiers, limit)


def check_training(config: Settings) -> None:
    """Check that there is a head to train where answers are kept for training."""
    speculation = config.speculative_config
    if config.training_buffer_tokens:
        # The files of the model decide about what was left out.
        has_head = speculation is not None and (
            (speculation.head is not None and not speculation.head.has_layers_of_model)
            or not speculation.left_out.isdisjoint({"method", "drafter"})
        )
        if not has_head:
            limit = "0 unless speculative_config has a draft head, which the answers train"
            raise InvalidValueError("training_buffer_tokens", config.training_buffer_tokens, limit)
    elif config.training_cache_salt is not None:
        limit = "left out unless training_buffer_tokens is given"
        raise InvalidValueError("training_cache_salt", config.training_cache_salt, limit)


def check_objective(config: Settings) -> None:
    """Check that replicas publish what the number of replicas for an objective is computed from."""
    speculation = config.speculative_config
    if config.slo is None or (speculation and speculation.chosen_policy == "goodput"):
        return
    limit = "left out unless speculative_config has the policy goodput: others do not measure the "
    limit += "tokens per second by load, from which the number of replicas is computed"
    raise InvalidValueError("slo", config.slo, limit)


def check_tracing(config: Settings) -> None:
    """Check that the exporter of traces is installed where they are exported."""
    if config.otlp_traces_endpoint is not None and not _can_trace():
        limit = "left out unless OpenTelemetry is installed: extra tracing; see docs/install.md"
        raise InvalidValueError("otlp_traces_endpoint", config.otlp_traces_endpoint, limit)


def _can_trace() -> bool:
    """Return whether the OTLP exporter is installed, without importing it."""
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.grpc") is not None
    except ModuleNotFoundError:  # of a package above it
        return False


def check_ingress(config: Settings) -> None:
    """Check that several replicas have a shared ingress."""
    if config.ingress == "embedded" and (config.max_replicas or config.num_replicas > 1):
        limit = "serve for several replicas: embedded servers would all listen on the same ports"
        raise InvalidValueError("ingress", config.ingress, limit)


def check_cluster(config: Settings) -> None:
    """Check the settings of an existing Ray cluster and of its nodes."""
    if config.ray_address is not None and config.ingress != "serve":
        limit = "serve where ray_address is given: embedded servers could start on any of its nodes"
        raise InvalidValueError("ingress", config.ingress, limit)
    if config.draft_labels and config.draft_model is None:
        limit = "left out unless speculative_config has the method draft_model"
        raise InvalidValueError("draft_labels", config.draft_labels, limit)
