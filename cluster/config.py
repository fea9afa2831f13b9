"""What `specdec serve` can be told. Each setting says its own limits, default and meaning once.

The flags, the keys of a YAML file and the checks are all made from the fields of `ServeConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from cluster.addresses import is_loopback
from cluster.call_limits import MAX_MODEL_CHARS
from cluster.config_file import read_config_file
from cluster.devices import resolved_device
from cluster.logs import LogConfig
from cluster.settings import (
    BOOLEAN,
    DIRECTORY,
    ENDPOINT,
    FILE,
    LABELS,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    TEXT,
    Setting,
    one_of,
    optional,
    refuse_unknown,
    setting,
    whole_number,
)
from cluster.speculative_config import AUTO, SPECULATION, default_speculation, read_speculation
from specdec.errors import InvalidValueError

if TYPE_CHECKING:
    from specdec.speculative_config import SpeculativeConfig

_CPU_PREFILL_TOKENS = 64
"""As many as reach a CPU's best rate: of SmolLM2 in float32, on one thread, a token costs 2.2 ms
among 64 of them, 2.5 among 32 and 2.6 among 256, for all of which whoever decodes would wait."""


@dataclass(frozen=True)
class ServeConfig:
    """How to serve one model. Made from code, a mapping or a YAML file, and checked all the same.

    Raises InvalidValueError, which names field, value and limit.
    """

    model: str = setting(
        "smollm2-135m-instruct",
        TEXT,
        "Model to serve, as an alias, a directory, a GGUF file, or a Hugging Face Hub id such as "
        "org/name or org/name@revision",
    )
    served_model_name: str = setting(
        "", TEXT, "Name that requests use for the model", "the alias, or the path's last part"
    )
    tensor_parallel_size: int = setting(1, whole_number(1, 1024), "Shards to divide the model into")
    dtype: Literal["float32", "bfloat16", "float16"] = setting(
        "float32",
        one_of("float32", "bfloat16", "float16"),
        "Data type of weights, activations and KV cache",
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "cpu",
        one_of("auto", "cpu", "cuda"),
        "What the models run on: cuda gives each rank a GPU of its own, auto takes that where "
        "torch finds one",
    )
    gpu_memory_utilization: float = setting(
        0.9, SHARE, "Share of each GPU's memory to take for weights and KV cache"
    )
    quantization: Literal["none", "int8"] = setting(
        "none",
        one_of("none", "int8"),
        "How matrices are held and multiplied instead of in dtype; changes what the model says",
    )
    kernels: Literal["auto", "native", "torch"] = setting(
        "auto",
        one_of("auto", "native", "torch"),
        "What multiplies on a CPU: native compiles this project's kernels in C++ when they are "
        "first used, auto takes them where there is a compiler, and torch's own elsewhere",
    )
    generation_config: Literal["auto", "none"] = setting(
        "auto",
        one_of("auto", "none"),
        "What decides on sampling where a request says nothing: the model's generation_config.json "
        "with auto, neutral values with none",
    )
    max_model_len: int | None = setting(
        None,
        optional(whole_number(2, 2**24)),
        "Most tokens of a prompt and its completion together",
        "the model's",
    )
    max_num_seqs: int = setting(64, whole_number(1, 4096), "Most requests that run at once")
    max_num_batched_tokens: int = setting(
        256,
        whole_number(1, 2**20),
        "Most tokens of one forward pass, no fewer than max_num_seqs",
    )
    max_prefill_tokens: int | None = setting(
        None,
        optional(whole_number(1, 2**20)),
        "Most tokens of prompts in a forward pass in which other requests decode, which wait for "
        "all of it",
        "64 on a CPU; on a GPU as many as max_num_batched_tokens leaves room for",
    )
    block_size: int = setting(16, whole_number(1, 1024), "Tokens in a block of the KV cache")
    max_queue_len: int = setting(
        256, whole_number(0, 1_000_000), "Most requests that wait; one more is refused"
    )
    queue_timeout_s: float = setting(
        60.0, POSITIVE, "Seconds that a request may wait before it is refused"
    )
    enable_prefix_caching: bool = setting(
        True, BOOLEAN, "Whether the KV of a prompt's beginning is used again for the next one"
    )
    stream_interval: int = setting(
        1,
        whole_number(1, 2**20),
        "New tokens of an answer that a message of a stream waits for, where a request does not "
        "say; the first and the last do not wait",
    )
    kv_cache_memory_gib: float | None = setting(
        None,
        optional(POSITIVE),
        "Memory for the KV cache, in GiB over all shards",
        "decided from free memory",
    )
    speculative_config: SpeculativeConfig | None = setting(
        AUTO,  # what it stands for depends on the model
        SPECULATION,
        'How to draft, such as {"method": "ngram", "num_speculative_tokens": 3}, or none',
        "auto, an int8 copy of an alias's model, and ngram for other models",
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
        "YAML file with the keys that the OpenAI API asks for, and the limits of each",
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
        if isinstance(self.speculative_config, str):  # AUTO
            default = default_speculation(self.model, resolved_device(self.device))
            object.__setattr__(self, "speculative_config", default)
        for key, known in settings().items():
            value = getattr(self, key)
            if not known.limit.accepts(value):
                raise InvalidValueError(key, value, known.limit.text)
        self._check_cluster()
        object.__setattr__(self, "device", resolved_device(self.device))
        self._check_together()

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> ServeConfig:
        """Reads plain data, such as `to_mapping` makes; `speculative_config` may be JSON text too.

        File names become absolute, so that they mean the same in a process that works elsewhere.
        Raises InvalidValueError, also for an unknown key, with the nearest known one.
        """
        refuse_unknown("configuration key", mapping, settings())
        values = dict(mapping)
        if "speculative_config" in values:
            values["speculative_config"] = read_speculation(values["speculative_config"])
        for name, known in settings().items():
            if known.limit in (FILE, DIRECTORY) and isinstance(values.get(name), str):
                values[name] = Path(values[name]).absolute()
        return cls(**values)

    @classmethod
    def from_yaml(
        cls, path: Path, overrides: Mapping[str, Any] = MappingProxyType({})
    ) -> ServeConfig:
        """Reads a YAML file; `overrides` win over what it says. Raises InvalidValueError."""
        return cls.from_mapping({**read_config_file(path), **overrides})

    def to_mapping(self) -> dict[str, Any]:
        """Everything as plain data, to send to another process."""
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in asdict(self).items()
        }

    @property
    def logs(self) -> LogConfig:
        """How every process of the service logs."""
        return LogConfig(self.log_level, self.log_format)

    @property
    def quantization_method(self) -> Literal["int8"] | None:
        """`quantization` as loading takes it."""
        return None if self.quantization == "none" else self.quantization

    def _refuse_quantization(self) -> None:
        speculation = self.speculative_config
        of_draft = None if speculation is None else speculation.quantization
        limit = f"left out where device is {self.device}: it runs on a CPU"
        if self.quantization != "none":
            raise InvalidValueError("quantization", self.quantization, limit)
        if of_draft is not None:
            raise InvalidValueError("speculative_config.quantization", of_draft, limit)

    @property
    def prefill_limit(self) -> int | None:
        """`max_prefill_tokens`, decided where it was left open."""
        if self.max_prefill_tokens is None and self.device == "cpu":
            return _CPU_PREFILL_TOKENS
        return self.max_prefill_tokens

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
        if self.device != "cpu":
            self._refuse_quantization()
            if self.kernels == "native":
                limit = f"auto or torch where device is {self.device}: they run on a CPU"
                raise InvalidValueError("kernels", self.kernels, limit)
        if self.max_num_batched_tokens < self.max_num_seqs:
            limit = f"at least max_num_seqs ({self.max_num_seqs}), so that all can decode in a step"
            raise InvalidValueError("max_num_batched_tokens", self.max_num_batched_tokens, limit)
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
        if self.ray_address is not None and self.device == "auto":
            limit = "cpu or cuda where ray_address is given: the models run on other machines"
            raise InvalidValueError("device", self.device, limit)
        speculation = self.speculative_config
        if self.draft_labels and (speculation is None or speculation.method != "draft_model"):
            limit = "left out unless the method of speculative_config is draft_model"
            raise InvalidValueError("draft_labels", self.draft_labels, limit)


def settings() -> dict[str, Setting]:
    """Every setting by name, in the order in which they are explained."""
    return {each.name: each.metadata["setting"] for each in fields(ServeConfig)}


def _can_trace() -> bool:
    """Whether the optional packages are there; found without importing them."""
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.grpc") is not None
    except ModuleNotFoundError:  # of a package above it
        return False
