"""What `specdec serve` can be told: of the model, what `LLMConfig` has, and of the service.

The flags, the keys of a YAML file and the checks are all made from the fields of `ServeConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from cluster.config.config_file import read_config_file
from cluster.config.network import MAX_MODEL_CHARS, is_loopback
from cluster.config.vllm_settings import in_our_words
from cluster.observability.logs import LogConfig
from specdec.config.fields import (
    DIRECTORY,
    ENDPOINT,
    FILE,
    LABELS,
    NOT_NEGATIVE,
    POSITIVE,
    TEXT,
    Setting,
    one_of,
    optional,
    setting,
    whole_number,
)
from specdec.config.llm import LLMConfig
from specdec.types.errors import InvalidValueError


@dataclass(frozen=True)
class ServeConfig(LLMConfig):
    """How to serve one model. Made from code, a mapping or a YAML file, and checked all the same.

    Raises InvalidValueError, which names field, value and limit.
    """

    served_model_name: str = setting(
        "", TEXT, "Name that requests use for the model", "the alias, or the path's last part"
    )
    queue_timeout_s: float = setting(
        60.0, POSITIVE, "Seconds that a request may wait before it is refused"
    )
    num_replicas: int = setting(
        1, whole_number(1, 1024), "Replicas of the models; more than one needs ingress serve"
    )
    min_replicas: int = setting(
        1, whole_number(1, 1024), "Fewest replicas, where max_replicas is given"
    )
    max_replicas: int | None = setting(
        None,
        optional(whole_number(1, 1024)),
        "Most replicas that the load may call for; needs ingress serve",
        "no autoscaling",
    )
    target_requests_per_replica: float = setting(
        32.0, POSITIVE, "Decoding and waiting requests beyond which a replica is added"
    )
    upscale_delay_s: float = setting(
        10.0, NOT_NEGATIVE, "Seconds that the load must call for more replicas"
    )
    downscale_delay_s: float = setting(
        120.0, NOT_NEGATIVE, "Seconds that the load must call for fewer replicas"
    )
    drain_timeout_s: float = setting(
        10.0,
        NOT_NEGATIVE,
        "Seconds that running requests have to end when a replica stops; new ones are refused",
    )
    ingress: Literal["embedded", "serve"] = setting(
        "embedded",
        one_of("embedded", "serve"),
        "Whose servers listen for requests, our own or Ray Serve's",
    )
    host: str = setting("127.0.0.1", TEXT, "Address to listen on")
    grpc_port: int = setting(9000, whole_number(1, 65535), "Port of the gRPC API")
    http_port: int = setting(8000, whole_number(1, 65535), "Port of the HTTP API")
    grpc_max_message_mib: int = setting(
        16, whole_number(1, 1024), "Largest gRPC message that is accepted, in MiB"
    )
    tls_cert_file: Path | None = setting(None, FILE, "Certificate chain in PEM, for TLS", "no TLS")
    tls_key_file: Path | None = setting(
        None, FILE, "Private key of the certificate, in PEM", "no TLS"
    )
    start_timeout_s: float = setting(
        600.0, POSITIVE, "Seconds that the ranks of a model have to be placed, to load and warm up"
    )
    step_timeout_s: float = setting(
        60.0, POSITIVE, "Seconds after which a forward pass counts as failed"
    )
    transport: Literal["auto", "ipc", "tcp"] = setting(
        "auto",
        one_of("auto", "ipc", "tcp"),
        "How steps reach the shards; auto takes ipc on this node and tcp to others",
    )
    ray_address: str | None = setting(
        None,
        optional(TEXT),
        "Ray cluster to serve on, as the host:port of its head or as auto; needs ingress serve",
        "a Ray of its own on this machine",
    )
    target_labels: str | None = setting(
        None,
        LABELS,
        "Labels of the Ray nodes that may hold Router and target, such as role=target",
        "any node",
    )
    draft_labels: str | None = setting(
        None,
        LABELS,
        "Labels of the Ray nodes that may hold the draft model, such as role=draft",
        "any node",
    )
    state_dir: Path | None = setting(
        None,
        DIRECTORY,
        "Directory for what operators set, which outlasts the service",
        "$XDG_STATE_HOME/specdec, or ~/.local/state/specdec",
    )
    admin_token_file: Path | None = setting(
        None,
        FILE,
        "File with the token that AdminService and /v1/admin ask for",
        "$SPECDEC_ADMIN_TOKEN, or none: whoever reaches the service may steer it",
    )
    profile_dir: Path | None = setting(
        None,
        DIRECTORY,
        "Directory, on the models' nodes, for the traces of profiles that operators take",
        "none can be taken",
    )
    profile_max_mib: int = setting(
        256, whole_number(1, 2**20), "Most MiB of the traces of one profile together"
    )
    otlp_traces_endpoint: str | None = setting(
        None,
        ENDPOINT,
        "Collector that takes a trace of each request by OTLP over gRPC, such as "
        "http://localhost:4317; needs specdec[tracing]",
        "no traces",
    )
    api_key_file: Path | None = setting(
        None,
        FILE,
        "YAML file with the keys that the OpenAI API and InferenceService ask for, and the limits "
        "of each",
        "$SPECDEC_API_KEYS, or none: whoever reaches the service may use it",
    )
    http_max_body_mib: int = setting(
        16, whole_number(1, 1024), "Largest body of an OpenAI API request, in MiB"
    )
    request_timeout_s: float = setting(
        3600.0,
        POSITIVE,
        "Seconds that the answer to an OpenAI API request may take, streams included",
    )
    tool_call_parser: Literal["auto", "hermes", "llama3_json"] = setting(
        "auto",
        one_of("auto", "hermes", "llama3_json"),
        "How the model writes tool calls; auto goes by its chat template",
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "warning", one_of("debug", "info", "warning", "error"), "Least severe log lines to write"
    )
    log_format: Literal["text", "json"] = setting(
        "text", one_of("text", "json"), "How log lines look; json puts one object on each"
    )

    def __post_init__(self) -> None:
        name = self.served_model_name or Path(str(self.model)).resolve().name
        object.__setattr__(self, "served_model_name", name)
        if self.ray_address is not None and self.device == "auto":  # before that is decided here
            limit = "cpu or cuda where ray_address is given: the models run on other machines"
            raise InvalidValueError("device", self.device, limit)
        super().__post_init__()

    @classmethod
    def from_yaml(
        cls, path: Path, overrides: Mapping[str, Any] = MappingProxyType({})
    ) -> ServeConfig:
        """Reads a YAML file; `overrides` win over what it says. Raises InvalidValueError."""
        return cls.from_sources(read_config_file(path), overrides)

    @classmethod
    def from_sources(cls, *sources: Mapping[str, Any]) -> ServeConfig:
        """Reads what people wrote, in our words or vLLM's; later sources win.

        Raises InvalidValueError.
        """
        return cls.from_mapping(in_our_words(*sources, model=cls.model, device=cls.device))

    @property
    def logs(self) -> LogConfig:
        """How every process of the service logs."""
        return LogConfig(self.log_level, self.log_format)

    @property
    def fewest_replicas(self) -> int:
        """How many there are at any load, unless one is lost."""
        return self.num_replicas if self.max_replicas is None else self.min_replicas

    @property
    def most_replicas(self) -> int:
        """How many there may be at once."""
        return self.max_replicas or self.num_replicas

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is allowed, but should be known to whoever starts the service; one line each."""
        if self.ingress == "serve":
            steer = (
                "" if self.admin_token_file else ", and lets whoever reaches it steer the service"
            )
            return (
                "Ray Serve's gRPC ingress listens on all interfaces, without TLS, takes messages "
                f"of up to 2 GiB{steer}",
            )
        if self.tls_cert_file is None and not is_loopback(self.host):
            return (f"{self.host} can be reached from other machines, and TLS is off",)
        return ()

    def _check_together(self) -> None:
        super()._check_together()
        if self.grpc_port == self.http_port:
            raise InvalidValueError("http_port", self.http_port, "another port than grpc_port")
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            limit = "given together with tls_cert_file, or not at all"
            raise InvalidValueError("tls_key_file", self.tls_key_file, limit)
        if self.tls_cert_file is not None and self.ingress != "embedded":
            limit = "left out unless ingress is embedded"
            raise InvalidValueError("tls_cert_file", str(self.tls_cert_file), limit)
        if len(self.served_model_name) > MAX_MODEL_CHARS:
            limit = f"at most {MAX_MODEL_CHARS} characters long, for requests to name it"
            raise InvalidValueError("served_model_name", self.served_model_name, limit)
        if self.otlp_traces_endpoint is not None and not _can_trace():
            limit = "left out where traces cannot be sent; pip install 'specdec[tracing]'"
            raise InvalidValueError("otlp_traces_endpoint", self.otlp_traces_endpoint, limit)
        self._check_replicas()
        self._check_cluster()

    def _check_replicas(self) -> None:
        if self.max_replicas is None and self.min_replicas != 1:
            limit = "left out unless max_replicas is given; num_replicas sets a fixed number"
            raise InvalidValueError("min_replicas", self.min_replicas, limit)
        if self.max_replicas is not None and self.num_replicas != 1:
            limit = "left out where max_replicas is given; min_replicas is where autoscaling begins"
            raise InvalidValueError("num_replicas", self.num_replicas, limit)
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            limit = f"at least min_replicas ({self.min_replicas})"
            raise InvalidValueError("max_replicas", self.max_replicas, limit)
        if self.ingress == "embedded" and (self.max_replicas or self.num_replicas > 1):
            limit = "serve for several replicas: servers of their own would want the same ports"
            raise InvalidValueError("ingress", self.ingress, limit)

    def _check_cluster(self) -> None:
        if self.ray_address is not None and self.ingress != "serve":
            limit = "serve where ray_address is given: our own servers would listen on some node"
            raise InvalidValueError("ingress", self.ingress, limit)
        if self.draft_labels and self.draft_model is None:
            limit = "left out unless the method of speculative_config is draft_model"
            raise InvalidValueError("draft_labels", self.draft_labels, limit)


def settings() -> dict[str, Setting]:
    """Every setting by name, in the order in which they are explained."""
    return ServeConfig.settings()


def _can_trace() -> bool:
    """Whether the optional packages are there; found without importing them."""
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.grpc") is not None
    except ModuleNotFoundError:  # of a package above it
        return False
