"""Configuration of `specdec serve`: the settings of `LLMConfig` and those of the service.

The flags, the YAML keys and the validation are derived from the fields of `ServeConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from cluster.config.front_ends import FRONT_ENDS, front_end_count
from cluster.config.ingress import IngressConfig
from cluster.config.lora_modules import LORA_MODULES, canonical_lora_modules, read_lora_modules
from cluster.config.model_name import MAX_MODEL_CHARS, default_name
from cluster.config.parsers import ReasoningParserName, ToolCallParserName
from cluster.config.vllm_compat import in_our_words
from cluster.observability.logs import LogConfig
from cluster.observability.metric_aliases import MetricAliases
from specdec.config.fields import (
    BOOLEAN,
    DIRECTORY,
    ENDPOINT,
    FILE,
    LABELS,
    LONGEST_WAIT_S,
    NOT_NEGATIVE,
    POSITIVE,
    TEXT,
    at_most,
    one_of,
    optional,
    setting,
    whole_number,
)
from specdec.types.adapters import AdapterOrder
from specdec.types.errors import InvalidValueError


@dataclass(frozen=True)
class ServeConfig(IngressConfig):
    """Configuration of the service for one model, validated when it is created.

    Raises InvalidValueError, which names field, value and limit.
    """

    served_model_name: str = setting(
        "", TEXT, "Model name that API requests use", "the alias, or the path's name without .gguf"
    )
    lora_modules: str | None = setting(
        None,
        LORA_MODULES,
        "LoRA adapters to load at the start, as name=path, separated by commas; requests select "
        "one by its name",
        "none",
    )
    seed: int | None = setting(
        None,
        optional(whole_number(0, 2**63 - 1)),
        "Seed from which a replica derives the seeds of requests without one, in their order",
        "random seeds",
    )
    chat_template: Path | None = setting(
        None, FILE, "File with a Jinja chat template that replaces the model's", "the model's"
    )
    queue_timeout_s: float = setting(
        60.0, POSITIVE, "Seconds that a request may wait in the queue before it is rejected"
    )
    min_priority: int = setting(
        -10,
        whole_number(-1000, 0),
        "Most urgent priority that a request may have on a service without API keys; with keys, "
        "each has its own min_priority, by default 0",
    )
    drain_timeout_s: float = setting(
        10.0,
        at_most(NOT_NEGATIVE, LONGEST_WAIT_S),
        "Grace period in seconds for running requests when a replica shuts down; new requests are "
        "rejected",
    )
    frontends: str | int = setting(
        "auto",
        FRONT_ENDS,
        "Front-end processes: they hold the API servers, tokenizers and text beside the engine's "
        "process, which has them itself with 0; a model served through Ray Serve's proxies, or "
        "with a seed, has none",
        "on GPUs 2 with 8 processor cores or more, 4 with 16; otherwise 0",
    )
    start_timeout_s: float = setting(
        600.0,
        at_most(POSITIVE, LONGEST_WAIT_S),
        "Maximum time in seconds to place the ranks of a model, load its weights and warm up",
    )
    step_timeout_s: float = setting(
        60.0,
        at_most(POSITIVE, LONGEST_WAIT_S),
        "Maximum time in seconds of a forward pass before its ranks are restarted; the limit is "
        "lower for batch sizes that have been measured",
    )
    spare_draft_worker: bool = setting(
        True,
        BOOLEAN,
        "Keep a process for each draft rank that has started and imported everything, and replaces "
        "a rank that dies; without it drafts are missing for some seconds longer",
    )
    transport: Literal["auto", "ipc", "tcp"] = setting(
        "auto",
        one_of("auto", "ipc", "tcp"),
        "Transport of step messages to the ranks; auto uses ipc on the same node and tcp to other "
        "nodes",
    )
    target_labels: str | None = setting(
        None,
        LABELS,
        "Labels of the Ray nodes to place the Router and the target model on, such as "
        "role=target,zone=a",
        "any node",
    )
    target_placement: Literal["strict_pack", "pack", "spread"] = setting(
        "strict_pack",
        one_of("strict_pack", "pack", "spread"),
        "Placement of the target's ranks, in Ray's terms: strict_pack puts all on one node; pack "
        "on few nodes, where one has too few GPUs; spread on many nodes, where one has too little "
        "memory or too few cores. Between nodes steps take longer",
    )
    draft_labels: str | None = setting(
        None,
        LABELS,
        "Labels of the Ray nodes to place the draft model on, such as role=draft",
        "any node",
    )
    state_dir: Path | None = setting(
        None,
        DIRECTORY,
        "Directory for speculation overrides and their audit log, which persist across restarts",
        "$XDG_STATE_HOME/specdec, or ~/.local/state/specdec",
    )
    admin_token_file: Path | None = setting(
        None,
        FILE,
        "File with the token required by AdminService and /v1/admin",
        "$SPECDEC_ADMIN_TOKEN, or none: an API key suffices, and without keys every client may use "
        "the admin API",
    )
    profile_dir: Path | None = setting(
        None, DIRECTORY, "Directory on the models' nodes for profiler traces", "no profiling"
    )
    profile_max_mib: int = setting(
        256, whole_number(1, 2**20), "Maximum total size of the traces of one profile, in MiB"
    )
    training_buffer_tokens: int = setting(
        0,
        whole_number(0, 2**26),
        "Tokens of prompts and answers that each replica keeps in memory for `specdec adapt`, of "
        "requests that set allow_training; the latest ones. 0 keeps nothing",
    )
    training_cache_salt: str | None = setting(
        None,
        optional(TEXT),
        "Only requests with this cache_salt are kept for training",
        "those without a cache_salt",
    )
    metric_aliases: MetricAliases = setting(
        "none",
        one_of("none", "vllm", "sglang", "otel", "all"),
        "Expose metrics under the names of others too: vllm, sglang, otel (OpenTelemetry), or all",
    )
    otlp_traces_endpoint: str | None = setting(
        None,
        ENDPOINT,
        "OTLP/gRPC endpoint to export OpenTelemetry traces to, such as http://localhost:4317; "
        "needs specdec[tracing]",
        "no traces",
    )
    api_key_file: Path | None = setting(
        None,
        FILE,
        "YAML file of the API keys required by the OpenAI API and InferenceService, with the "
        "limits of each key",
        "$SPECDEC_API_KEYS, or none: every client is accepted",
    )
    request_timeout_s: float = setting(
        3600.0, POSITIVE, "Timeout in seconds of an OpenAI API request, including its stream"
    )
    sse_keep_alive_s: int = setting(
        15, whole_number(0, 3600), "Seconds of silence before a stream sends a comment; 0: none"
    )
    tool_call_parser: ToolCallParserName = setting(
        "auto",
        one_of(*get_args(ToolCallParserName)),
        "Parser for tool calls in the model's output; auto selects it by the chat template",
    )
    reasoning_parser: ReasoningParserName = setting(
        "none",
        one_of(*get_args(ReasoningParserName)),
        "Parser that separates the model's reasoning from its answer, as reasoning_content",
    )
    enable_tokenizer_info_endpoint: bool = setting(
        False, BOOLEAN, "Serve /tokenizer_info: the tokenizer's settings and chat template"
    )
    allow_synthetic_acceptance: bool = setting(
        False,
        BOOLEAN,
        "Allow the synthetic verifier in speculative_config, which accepts draft tokens at given "
        "rates, whatever they are: for measurements, since the output is not the model's",
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "warning", one_of("debug", "info", "warning", "error"), "Minimum severity to log"
    )
    log_format: Literal["text", "json"] = setting(
        "text", one_of("text", "json"), "Log format; json writes one JSON object a line"
    )

    def __post_init__(self) -> None:
        name = self.served_model_name or default_name(str(self.model))
        object.__setattr__(self, "served_model_name", name)
        if LORA_MODULES.accepts(self.lora_modules):
            object.__setattr__(self, "lora_modules", canonical_lora_modules(self.lora_modules))
        if self.ray_address is not None and self.device == "auto":  # super() resolves auto
            limit = "cpu or cuda where ray_address is given: the models run on other machines"
            raise InvalidValueError("device", self.device, limit)
        super().__post_init__()

    @classmethod
    def from_sources(cls, *sources: Mapping[str, Any]) -> ServeConfig:
        """Merge user input with our setting names or vLLM's; later sources take precedence.

        Raises InvalidValueError.
        """
        given = in_our_words(*sources, model=cls.model, device=cls.device)
        hosts = given.get("allowed_hosts")
        if isinstance(hosts, list) and all(isinstance(each, str) for each in hosts):
            given["allowed_hosts"] = ",".join(hosts)  # YAML has lists, a flag has commas
        if isinstance(given.get("lora_modules"), list | dict):
            given["lora_modules"] = canonical_lora_modules(given["lora_modules"])
        return cls.from_mapping(given)

    @property
    def request_name(self) -> str:
        """See LLMConfig."""
        return self.served_model_name

    @property
    def startup_adapters(self) -> tuple[AdapterOrder, ...]:
        """See LLMConfig."""
        return read_lora_modules(self.lora_modules)

    @property
    def logs(self) -> LogConfig:
        """Logging configuration of every process of the service."""
        return LogConfig(self.log_level, self.log_format)

    @property
    def num_spare_ranks(self) -> int:
        """See LLMConfig."""
        if self.draft_model is None or not self.spare_draft_worker or self.shares_draft_workers:
            return 0
        return self.draft_model.draft_tensor_parallel_size

    @property
    def num_front_ends(self) -> int:
        """Number of front-end processes of a replica, on a machine like this one."""
        has_none = self.ingress == "serve" or self.seed is not None
        return 0 if has_none else front_end_count(self.frontends, self.device)

    def _check_together(self) -> None:
        super()._check_together()
        if len(self.served_model_name) > MAX_MODEL_CHARS:
            limit = f"at most {MAX_MODEL_CHARS} characters long"
            raise InvalidValueError("served_model_name", self.served_model_name, limit)
        if self.draft_labels and self.draft_model is None:
            limit = "left out unless speculative_config has the method draft_model"
            raise InvalidValueError("draft_labels", self.draft_labels, limit)
        if self.otlp_traces_endpoint is not None and not _can_trace():
            limit = "left out unless OpenTelemetry is installed: extra tracing; see docs/install.md"
            raise InvalidValueError("otlp_traces_endpoint", self.otlp_traces_endpoint, limit)
        self._check_verifiers()
        self._check_training()

    def _check_verifiers(self) -> None:
        """Check that a verifier for measurements alone is allowed explicitly."""
        speculation = self.speculative_config
        if speculation is None or self.allow_synthetic_acceptance:
            return
        if "synthetic" in speculation.allowed_verifiers:
            limit = (
                "without synthetic unless allow_synthetic_acceptance is given: it accepts wrong "
                "draft tokens, for measurements"
            )
            field = "speculative_config.allowed_verifiers"
            raise InvalidValueError(field, speculation.allowed_verifiers, limit)

    def _check_training(self) -> None:
        """Check that there is a head to train where answers are kept for training."""
        speculation = self.speculative_config
        if self.training_buffer_tokens:
            # The files of the model decide about what was left out.
            has_head = speculation is not None and (
                (speculation.head is not None and not speculation.head.has_layers_of_model)
                or not speculation.left_out.isdisjoint({"method", "drafter"})
            )
            if not has_head:
                limit = "0 unless speculative_config has a draft head, which the answers train"
                raise InvalidValueError(
                    "training_buffer_tokens", self.training_buffer_tokens, limit
                )
        elif self.training_cache_salt is not None:
            limit = "left out unless training_buffer_tokens is given"
            raise InvalidValueError("training_cache_salt", self.training_cache_salt, limit)

    def _check_adapters(self) -> None:
        if self.lora_modules is not None and not self.enable_lora:
            limit = "left out unless enable_lora is given"
            raise InvalidValueError("lora_modules", self.lora_modules, limit)
        super()._check_adapters()
        limits, count = self.adapter_limits, len(self.startup_adapters)
        if limits is not None and count > limits.max_loaded:
            limit = f"at least {count}, the number of lora_modules"
            raise InvalidValueError("max_cpu_loras", limits.max_loaded, limit)
        if any(each.name == self.served_model_name for each in self.startup_adapters):
            limit = "without an adapter that has the name of the model"
            raise InvalidValueError("lora_modules", self.lora_modules, limit)


def _can_trace() -> bool:
    """Return whether the OTLP exporter is installed, without importing it."""
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.grpc") is not None
    except ModuleNotFoundError:  # of a package above it
        return False
