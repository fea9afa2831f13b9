"""What `specdec serve` can be told. Each setting says its own limits, default and meaning once.

The flags, the keys of a YAML file and the checks are all made from the fields of `ServeConfig`.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import yaml

from cluster.logs import LogConfig
from specdec.errors import InvalidValueError

if TYPE_CHECKING:
    from specdec.config import SpeculativeConfig

# specdec.config loads torch, which takes seconds. The command line reads the settings whatever it
# is asked for, so that module is imported only where a configuration is made.


@dataclass(frozen=True)
class Limit:
    """What a setting may be.

    text: completes the sentence "it must be ...". accepts: judges a value of whatever type.
    kind: how a command line reads the setting. options: all there are, where they are few.
    """

    text: str
    accepts: Callable[[object], bool]
    kind: type[int | float | str | bool] = str
    options: tuple[str, ...] = ()


def _whole_number(low: int, high: int) -> Limit:
    def accepts(value: object) -> bool:
        return type(value) is int and low <= value <= high  # to isinstance, True is an int

    return Limit(f"a whole number from {low} to {high}", accepts, kind=int)


def _one_of(*options: str) -> Limit:
    return Limit(f"one of {', '.join(options)}", lambda value: value in options, options=options)


def _optional(limit: Limit) -> Limit:
    return replace(limit, accepts=lambda value: value is None or limit.accepts(value))


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and value is not True and 0 < value < math.inf


def _is_file(value: object) -> bool:
    return isinstance(value, Path) and value.is_file()


def _is_no_file(value: object) -> bool:
    return isinstance(value, Path) and (value.is_dir() or not value.exists())


def _is_speculation(value: object) -> bool:
    from specdec.config import SpeculativeConfig

    return value is None or isinstance(value, SpeculativeConfig)


_POSITIVE = Limit("a number above 0", _is_positive, kind=float)
_NOT_NEGATIVE = Limit(
    "0 or a number above it",
    lambda value: _is_positive(value) or (value == 0 and value is not False),
    kind=float,
)
_SHARE = Limit(
    "a number above 0, at most 1",
    lambda value: isinstance(value, float | int) and _is_positive(value) and value <= 1,
    kind=float,
)
_TEXT = Limit("a text that is not empty", lambda value: isinstance(value, str) and value != "")
_BOOLEAN = Limit("true or false", lambda value: isinstance(value, bool), kind=bool)
_FILE = _optional(Limit("the path of a file that exists", _is_file))
_DIRECTORY = _optional(Limit("the path of a directory", _is_no_file))
_SPECULATION = Limit("a mapping, auto, or none to turn speculation off", _is_speculation)


_AUTO = "auto"


@dataclass(frozen=True)
class Setting:
    """What is known about a field of ServeConfig besides its name and type."""

    limit: Limit
    meaning: str
    default: str

    @property
    def help(self) -> str:
        """One paragraph: meaning, limit where it is a number's, default."""
        limit = "" if self.limit.kind is str else f" ({self.limit.text})"
        return f"{self.meaning}{limit}. Default: {self.default}."


def _setting(default: Any, limit: Limit, meaning: str, default_text: str = "") -> Any:
    setting = Setting(limit, meaning, default_text or str(default))
    return field(default=default, metadata={"setting": setting})


def _resolved_device(device: str) -> str:
    import torch

    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _default_speculation(model: str, device: str) -> SpeculativeConfig:
    from specdec.config import SpeculativeConfig, has_quantization
    from specdec.models.store import ALIASES

    can_quantize = device == "cpu" and has_quantization()
    if model in ALIASES and ALIASES[model].drafts_for_itself and can_quantize:
        return SpeculativeConfig("draft_model", quantization="int8")
    return SpeculativeConfig("ngram")


@dataclass(frozen=True)
class ServeConfig:
    """How to serve one model. Made from code, a mapping or a YAML file, and checked all the same.

    Raises InvalidValueError, which names field, value and limit.
    """

    model: str = _setting(
        "smollm2-135m-instruct",
        _TEXT,
        "Model to serve, as an alias, a directory, a GGUF file, or a Hugging Face Hub id such as "
        "org/name or org/name@revision",
    )
    served_model_name: str = _setting(
        "", _TEXT, "Name that requests use for the model", "the alias, or the path's last part"
    )
    tensor_parallel_size: int = _setting(
        1, _whole_number(1, 1024), "Shards to divide the model into"
    )
    dtype: Literal["float32", "bfloat16", "float16"] = _setting(
        "float32",
        _one_of("float32", "bfloat16", "float16"),
        "Data type of weights, activations and KV cache",
    )
    device: Literal["auto", "cpu", "cuda"] = _setting(
        "cpu",
        _one_of("auto", "cpu", "cuda"),
        "What the models run on: cuda gives each rank a GPU of its own, auto takes that where "
        "torch finds one",
    )
    gpu_memory_utilization: float = _setting(
        0.9, _SHARE, "Share of each GPU's memory to take for weights and KV cache"
    )
    quantization: Literal["none", "int8"] = _setting(
        "none",
        _one_of("none", "int8"),
        "How matrices are held and multiplied instead of in dtype; changes what the model says",
    )
    max_model_len: int | None = _setting(
        None,
        _optional(_whole_number(2, 2**24)),
        "Most tokens of a prompt and its completion together",
        "the model's",
    )
    max_num_seqs: int = _setting(64, _whole_number(1, 4096), "Most requests that run at once")
    max_num_batched_tokens: int = _setting(
        256,
        _whole_number(1, 2**20),
        "Most tokens of one forward pass, no fewer than max_num_seqs",
    )
    block_size: int = _setting(16, _whole_number(1, 1024), "Tokens in a block of the KV cache")
    max_queue_len: int = _setting(
        256, _whole_number(0, 1_000_000), "Most requests that wait; one more is refused"
    )
    queue_timeout_s: float = _setting(
        60.0, _POSITIVE, "Seconds that a request may wait before it is refused"
    )
    enable_prefix_caching: bool = _setting(
        True, _BOOLEAN, "Whether the KV of a prompt's beginning is used again for the next one"
    )
    kv_cache_memory_gib: float | None = _setting(
        None,
        _optional(_POSITIVE),
        "Memory for the KV cache, in GiB over all shards",
        "decided from free memory",
    )
    speculative_config: SpeculativeConfig | None = field(
        default=cast("SpeculativeConfig | None", _AUTO),  # what it stands for depends on the model
        metadata={
            "setting": Setting(
                _SPECULATION,
                'How to draft, such as {"method": "ngram", "num_speculative_tokens": 3}, or none',
                "auto, an int8 copy of an alias's model, and ngram for other models",
            )
        },
    )
    num_replicas: int = _setting(
        1, _whole_number(1, 1024), "Replicas of the models; more than one needs ingress serve"
    )
    min_replicas: int = _setting(
        1, _whole_number(1, 1024), "Fewest replicas, where max_replicas is given"
    )
    max_replicas: int | None = _setting(
        None,
        _optional(_whole_number(1, 1024)),
        "Most replicas that the load may call for; needs ingress serve",
        "no autoscaling",
    )
    target_requests_per_replica: float = _setting(
        32.0, _POSITIVE, "Decoding and waiting requests beyond which a replica is added"
    )
    upscale_delay_s: float = _setting(
        10.0, _NOT_NEGATIVE, "Seconds that the load must call for more replicas"
    )
    downscale_delay_s: float = _setting(
        120.0, _NOT_NEGATIVE, "Seconds that the load must call for fewer replicas"
    )
    drain_timeout_s: float = _setting(
        10.0,
        _NOT_NEGATIVE,
        "Seconds that running requests have to end when a replica stops; new ones are refused",
    )
    ingress: Literal["embedded", "serve"] = _setting(
        "embedded",
        _one_of("embedded", "serve"),
        "Whose servers listen for requests, our own or Ray Serve's",
    )
    host: str = _setting("127.0.0.1", _TEXT, "Address to listen on")
    grpc_port: int = _setting(9000, _whole_number(1, 65535), "Port of the gRPC API")
    http_port: int = _setting(8000, _whole_number(1, 65535), "Port of the HTTP API")
    grpc_max_message_mib: int = _setting(
        16, _whole_number(1, 1024), "Largest gRPC message that is accepted, in MiB"
    )
    tls_cert_file: Path | None = field(
        default=None,
        metadata={"setting": Setting(_FILE, "Certificate chain in PEM, for TLS", "no TLS")},
    )
    tls_key_file: Path | None = field(
        default=None,
        metadata={"setting": Setting(_FILE, "Private key of the certificate, in PEM", "no TLS")},
    )
    start_timeout_s: float = _setting(
        600.0, _POSITIVE, "Seconds that the ranks of a model have to be placed, to load and warm up"
    )
    step_timeout_s: float = _setting(
        60.0, _POSITIVE, "Seconds after which a forward pass counts as failed"
    )
    transport: Literal["auto", "ipc", "tcp"] = _setting(
        "auto",
        _one_of("auto", "ipc", "tcp"),
        "How steps reach the shards; auto takes ipc on this node and tcp to others",
    )
    state_dir: Path | None = field(
        default=None,
        metadata={
            "setting": Setting(
                _DIRECTORY,
                "Directory for what operators set, which outlasts the service",
                "$XDG_STATE_HOME/specdec, or ~/.local/state/specdec",
            )
        },
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting(
        "warning", _one_of("debug", "info", "warning", "error"), "Least severe log lines to write"
    )
    log_format: Literal["text", "json"] = _setting(
        "text", _one_of("text", "json"), "How log lines look; json puts one object on each"
    )

    def __post_init__(self) -> None:
        name = self.served_model_name or Path(str(self.model)).resolve().name
        object.__setattr__(self, "served_model_name", name)
        if isinstance(self.speculative_config, str):  # _AUTO
            default = _default_speculation(self.model, _resolved_device(self.device))
            object.__setattr__(self, "speculative_config", default)
        for key, setting in settings().items():
            value = getattr(self, key)
            if not setting.limit.accepts(value):
                raise InvalidValueError(key, value, setting.limit.text)
        object.__setattr__(self, "device", _resolved_device(self.device))
        self._check_together()

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> ServeConfig:
        """Reads plain data, such as `to_mapping` makes; `speculative_config` may be JSON text too.

        File names become absolute, so that they mean the same in a process that works elsewhere.
        Raises InvalidValueError, also for an unknown key, with the nearest known one.
        """
        _refuse_unknown("configuration key", mapping, settings())
        values = dict(mapping)
        if "speculative_config" in values:
            values["speculative_config"] = _read_speculation(values["speculative_config"])
        for name in ("tls_cert_file", "tls_key_file", "state_dir"):
            if isinstance(values.get(name), str):
                values[name] = Path(values[name]).absolute()
        return cls(**values)

    @classmethod
    def from_yaml(
        cls, path: Path, overrides: Mapping[str, Any] = MappingProxyType({})
    ) -> ServeConfig:
        """Reads a YAML file; `overrides` win over what it says. Raises InvalidValueError."""
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            reason = " ".join(str(error).split())
            limit = f"a YAML file that can be read ({reason})"
            raise InvalidValueError("configuration file", str(path), limit) from error
        if not isinstance(content, dict | None):
            raise InvalidValueError("configuration file", str(path), "a mapping of settings")
        return cls.from_mapping({**(content or {}), **overrides})

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
    def most_replicas(self) -> int:
        """How many there may be at once."""
        return self.max_replicas or self.num_replicas

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is allowed, but should be known to whoever starts the service; one line each."""
        if self.ingress == "serve":
            return (
                "Ray Serve's gRPC ingress listens on all interfaces, without TLS, takes messages "
                "of up to 2 GiB, and lets whoever reaches it change speculation",
            )
        if self.tls_cert_file is None and not _is_loopback(self.host):
            return (f"{self.host} can be reached from other machines, and TLS is off",)
        return ()

    def _check_together(self) -> None:
        if self.device != "cpu":
            self._refuse_quantization()
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


def address_of(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def settings() -> dict[str, Setting]:
    """Every setting by name, in the order in which they are explained."""
    return {each.name: each.metadata["setting"] for each in fields(ServeConfig)}


def _refuse_unknown(what: str, names: Iterable[object], known: Iterable[str]) -> None:
    known = list(known)
    for name in names:
        if name not in known:
            nearest = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
            limit = f"a known one; did you mean {nearest[0]}?" if nearest else _one_of(*known).text
            raise InvalidValueError(what, name, limit)


def _read_speculation(value: object) -> SpeculativeConfig | None:
    """`value` is a mapping, the same as JSON text, or none as a word or as None."""
    from specdec.config import SpeculativeConfig

    if value == _AUTO:
        return cast("SpeculativeConfig", _AUTO)
    if value is None or value == "none":
        return None
    mapping = _parse_json(value) if isinstance(value, str) else value
    if not isinstance(mapping, Mapping):
        raise InvalidValueError("speculative_config", value, _SPECULATION.text)
    known = [each.name for each in fields(SpeculativeConfig)]
    _refuse_unknown("speculative_config key", mapping, known)
    types = get_type_hints(SpeculativeConfig)
    for name, value in mapping.items():
        _require_type(f"speculative_config.{name}", value, types[name])
    return SpeculativeConfig(**mapping)


def _require_type(name: str, value: object, expected: Any) -> None:
    """Only the kind of value is judged here; its range is SpeculativeConfig's own affair."""
    is_union = get_origin(expected) in (Union, UnionType)
    allowed = get_args(expected) if is_union else (expected,)
    kinds = {str if get_origin(each) is Literal else each for each in allowed}
    if float in kinds:
        kinds.add(int)
    if type(value) not in kinds:  # to isinstance, True is an int
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
        wanted = next(text for kind, text in words.items() if kind in kinds)
        raise InvalidValueError(name, value, wanted)


def _parse_json(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        limit = f"a JSON mapping, or none ({error})"
        raise InvalidValueError("speculative_config", text, limit) from error


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
