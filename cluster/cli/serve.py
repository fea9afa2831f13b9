"""`specdec serve`: a flag for every setting, and the flags of `vllm serve`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
from click.shell_completion import CompletionItem

from cluster.cli.errors import PRINT_ERROR, exits_as_unusable
from cluster.cli.output import Flag, SectionedCommand, combine_flags, print_stderr, section_flag
from cluster.config.config_file import read_models
from cluster.config.serve_config import ServeConfig
from cluster.config.sglang_compat import DISABLES, TREE_FLAGS
from cluster.config.vllm_compat import ALL_ALWAYS, ALL_RENAMED, ALL_SPECULATION_KEYS
from cluster.serve.guard import print_line
from cluster.serve.processes import guarded
from cluster.serve.start_errors import InterruptedStartError
from specdec.config.fields import DIRECTORY, FILE, Limit, Setting
from specdec.config.speculation.methods import METHOD_NAMES
from specdec.config.vllm_compat import Always, value_in_our_words
from specdec.types.errors import InvalidValueError

OTHER = "Other settings"

SECTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Model": (
            *("model", "served_model_name", "dtype", "quantization", "device", "kernels"),
            *("tensor_parallel_size", "enable_expert_parallel", "model_impl", "generation_config"),
            "hf_overrides",
            *("tool_call_parser", "reasoning_parser", "chat_template", "seed"),
        ),
        "Speculation": (
            *("speculative_config", "allow_synthetic_acceptance"),
            *("training_buffer_tokens", "training_cache_salt"),
        ),
        "Adapters": (
            *("enable_lora", "lora_modules", "max_loras", "max_lora_rank", "max_cpu_loras"),
        ),
        "Scheduling": (
            *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_prefill_tokens"),
            *(
                "max_queue_len",
                "queue_timeout_s",
                "min_priority",
                "stream_interval",
                "async_scheduling",
                "enforce_eager",
                "deterministic",
            ),
            *("disable_custom_all_reduce", "compare_ranks"),
            "step_timeout_s",
        ),
        "Memory": (
            *("gpu_memory_utilization", "kv_cache_memory_gib", "block_size"),
            *("kv_cache_dtype", "enable_prefix_caching"),
        ),
        "Replicas": (
            *("num_replicas", "min_replicas", "max_replicas", "target_requests_per_replica"),
            *("slo", "upscale_delay_s", "downscale_delay_s", "routing_policy"),
            *("start_timeout_s", "drain_timeout_s"),
            *("spare_draft_worker", "replicas_per_draft_worker", "min_draft_workers"),
            *("max_draft_workers", "target_draft_utilization", "transport", "ray_address"),
            *("target_labels", "draft_labels", "target_placement"),
        ),
        "Network": (
            *("ingress", "frontends", "host", "http_port", "grpc_port", "http_max_body_mib"),
            *("grpc_max_message_mib", "max_inflight_mib", "request_timeout_s", "sse_keep_alive_s"),
            "enable_tokenizer_info_endpoint",
        ),
        "Security": (
            *("api_key_file", "admin_token_file", "allowed_hosts", "tls_cert_file"),
            *("tls_key_file", "receipt_key_file", "audit_share"),
        ),
        "Observability": (
            *("log_level", "log_format", "otlp_traces_endpoint", "profile_dir", "profile_max_mib"),
            *("metric_aliases", "state_dir"),
        ),
    }
)
"""Sections of the settings in the help and in the configuration reference."""

_KEYS: Mapping[str, tuple[type[str | int], str]] = MappingProxyType(
    {
        "method": (str, f"Drafting method: {', '.join(METHOD_NAMES)}"),
        "model": (str, "Draft model: an alias, a directory, a GGUF file or a Hub id"),
        "num_speculative_tokens": (int, "Draft length in tokens (1 to 32; default 3)"),
        "draft_tensor_parallel_size": (int, "Number of ranks of the draft model (1 to 1024)"),
        "speculation_threshold": (
            int,
            "Maximum number of decoding requests on a replica at which it drafts (0 to 4096; "
            "default 256)",
        ),
        "prompt_lookup_max": (int, "Maximum n-gram length of ngram (1 to 16; default 4)"),
        "prompt_lookup_min": (int, "Minimum n-gram length of ngram (1 to 16; default 2)"),
        "num_draft_tree_tokens": (int, "Number of draft tokens of a tree (0 for chains)"),
        "draft_window": (int, "Attention window of the draft model or head, in tokens"),
        "quantization": (
            str,
            "Quantization of the draft model or head: int8, w8a8 (CPU) or int4 (GPU)",
        ),
        "speculative_token_map": (str, "File with the tokens that the drafter may draft"),
    }
)
"""Type and description of the keys of speculative_config that have a flag."""


def _section_of(setting: str) -> str:
    return next((name for name, members in SECTIONS.items() if setting in members), OTHER)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _with_dashes(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def _joined_modules(args: list[str]) -> list[str]:
    """Join the adapters that follow --lora-modules, as vLLM writes them, to one argument."""
    if "--lora-modules" not in args:
        return args
    first = args.index("--lora-modules") + 1
    end = first
    while end < len(args) and ("=" in args[end] or args[end].startswith("{")):
        if args[end].startswith("-"):
            break
        end += 1
    return [*args[:first], *([",".join(args[first:end])] if end > first else []), *args[end:]]


class _ServeCommand(SectionedCommand):
    """Command that accepts underscores in the names of flags, as vLLM does."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Raises UsageError."""
        return super().parse_args(ctx, _joined_modules(list(map(_with_dashes, args))))


class _SettingChoice(click.Choice[str]):
    """One of a setting's values, or vLLM's name for it."""

    def __init__(self, setting: str, values: tuple[str, ...]) -> None:
        super().__init__(values)
        self._setting = setting

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return super().convert(value_in_our_words(self._setting, value), param, ctx)


def _setting_flag(name: str, setting: Setting) -> Flag:
    """Return the flag of a field of ServeConfig, with its description and limits."""
    aliases = [_flag(theirs) for theirs, ours in ALL_RENAMED.items() if ours == name]
    flag = partial(section_flag, _section_of(name), help=setting.help)
    if setting.limit.kind is bool:
        return flag(f"{_flag(name)}/--no-{_flag(name)[2:]}", *aliases, name, default=None)
    short = ["-tp"] if name == "tensor_parallel_size" else []
    return flag(_flag(name), *aliases, *short, name, type=_kind(name, setting.limit))


def _kind(name: str, limit: Limit) -> Any:
    """Return the type of a flag. ServeConfig checks whether paths exist."""
    if limit is FILE:
        return click.Path(dir_okay=False)
    if limit is DIRECTORY:
        return click.Path(file_okay=False)
    return _SettingChoice(name, limit.options) if limit.options else limit.kind


def _speculation_flag(key: str) -> Flag:
    """Return the flags of vLLM and SGLang for a single key of speculative_config."""
    names = [name for name, each in ALL_SPECULATION_KEYS.items() if each == key]
    kind, description = _KEYS[key]
    text = f"{description}. Same as {key} in --speculative-config."
    section = _section_of("speculative_config")
    return section_flag(section, *map(_flag, names), names[0], type=kind, help=text)


def _tree_flag(name: str) -> Flag:
    """Return a flag of SGLang about trees; `sglang_compat.in_our_words` reads both together."""
    text = "SGLang's flag; see docs/migration.md."
    return section_flag(_section_of("speculative_config"), _flag(name), name, type=int, help=text)


def _disable_flag(name: str) -> Flag:
    """Return SGLang's flag that turns a setting off; the help does not list it."""
    return click.option(_flag(name), name, is_flag=True, default=None, hidden=True)


def _always_flag(name: str, always: Always) -> Flag:
    """Return vLLM's flag with a single supported value; the help does not list it."""
    if isinstance(always.value, bool):
        flag = f"{_flag(name)}/--no-{_flag(name)[2:]}"
        return click.option(flag, name, default=None, hidden=True)
    return click.option(_flag(name), type=type(always.value), hidden=True)


_settings = ServeConfig.settings()
_order = dict.fromkeys([*chain.from_iterable(SECTIONS.values()), *_settings])
_flags = combine_flags(
    *(_setting_flag(name, _settings[name]) for name in _order),
    section_flag(
        "Security",
        "--api-key",
        "api_keys",
        multiple=True,
        help="API key that clients must present; may be repeated. It is visible to other users of "
        "this machine in the process list; prefer --api-key-file or $SPECDEC_API_KEYS.",
    ),
    *map(_speculation_flag, dict.fromkeys(ALL_SPECULATION_KEYS.values())),
    *map(_tree_flag, TREE_FLAGS),
    *map(_disable_flag, DISABLES),
    *(_always_flag(name, always) for name, always in ALL_ALWAYS.items()),
)


def _complete_model(
    ctx: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete aliases; the shell completes paths."""
    from specdec.config.model_aliases import ALIASES

    aliases = [CompletionItem(name) for name in ALIASES if name.startswith(incomplete)]
    return aliases or [CompletionItem(incomplete, type="file")]


@click.command(cls=_ServeCommand, short_help="Serve a model over gRPC and HTTP.")
@click.argument("model_argument", metavar="[MODEL]", required=False, shell_complete=_complete_model)
@click.option(
    "--config",
    "config_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="YAML file with the settings below; its keys are the flags' names with underscores. "
    "Flags take precedence over it.",
)
@_flags
def serve(
    model_argument: str | None, config_file: Path | None, api_keys: tuple[str, ...], **flags: Any
) -> None:
    """Serve MODEL over gRPC and the OpenAI-compatible HTTP API, until Ctrl-C.

    MODEL is the same as --model. Flags of `vllm serve` with the same meaning are accepted by their
    names (see docs/cli.md).
    """
    with exits_as_unusable(InterruptedStartError):
        _serve(model_argument, config_file, api_keys, flags)


def _serve(
    model_argument: str | None,
    config_file: Path | None,
    api_keys: tuple[str, ...],
    flags: Mapping[str, Any],
) -> None:
    given = {name: value for name, value in flags.items() if value is not None}
    if model_argument is not None:
        if "model" in given:
            raise click.UsageError("MODEL and --model are mutually exclusive")
        given["model"] = model_argument
    if config_file is None:
        config, *others = [ServeConfig.from_sources(given)]
    else:
        config, *others = read_models(config_file, given)
    _set_keys(api_keys, (config, *others))
    for warning in config.warnings:  # about settings of the whole service
        print_stderr(f"warning: {warning}")
    drain_timeout_s = max(each.drain_timeout_s for each in (config, *others))
    with guarded(drain_timeout_s, is_joined=config.ray_address is not None) as to_guard:
        from cluster.serve.startup import serve_forever  # slow to import, and starts threads

        click.get_current_context().meta[PRINT_ERROR] = print_line  # a failed start ends
        serve_forever(config, partial(print_line, timeout_s=None), others, to_guard)


def _set_keys(keys: tuple[str, ...], configs: Sequence[ServeConfig]) -> None:
    """Set the keys in the environment, which the replicas inherit and other users cannot read."""
    if not keys:
        return
    from cluster.api.base.authentication import read_keys
    from cluster.config.secrets import KEYS_VARIABLE

    if any(config.api_key_file is not None for config in configs):
        raise click.UsageError("--api-key and --api-key-file are mutually exclusive")
    if configs[0].ray_address is not None:
        raise click.UsageError("--api-key cannot be used with --ray-address; use --api-key-file")
    if any("," in key or not key.strip() for key in keys):
        limit = "at least 8 printable ASCII characters, without spaces and commas"
        raise InvalidValueError("api_key", "not shown", limit)
    os.environ[KEYS_VARIABLE] = " ".join(keys)
    if len(read_keys("api_key", None)) != len(keys):
        raise InvalidValueError("api_key", "not shown", "without spaces")
    print_stderr("warning: --api-key is visible to other users of this machine in the process list")
