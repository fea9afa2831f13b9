"""`specdec serve`: a flag for every setting, and the flags of `vllm serve`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from cluster.cli.help import SectionedCommand, SectionedOption
from cluster.cli.output import print_stderr
from cluster.config.multi_model import read_models
from cluster.config.sections import SECTIONS, section_of
from cluster.config.serve_config import ServeConfig
from cluster.config.vllm_compat import ALWAYS, RENAMED
from specdec.config.fields import DIRECTORY, FILE, Limit, Setting
from specdec.config.methods import METHOD_NAMES
from specdec.config.speculative_keys import SPECULATION_KEYS
from specdec.config.vllm_compat import Always, value_in_our_words
from specdec.types.errors import InvalidValueError

_Command = TypeVar("_Command", bound=Callable[..., Any])

_KEYS: Mapping[str, tuple[type[str | int], str]] = MappingProxyType(
    {
        "method": (str, f"Drafting method: {', '.join(METHOD_NAMES)}"),
        "model": (str, "Draft model: an alias, a directory, a GGUF file or a Hub id"),
        "num_speculative_tokens": (int, "Number of draft tokens per step (1 to 32; default 3)"),
        "draft_tensor_parallel_size": (int, "Number of ranks of the draft model (1 to 1024)"),
        "speculation_threshold": (
            int,
            "Maximum number of decoding requests on a replica at which it drafts (0 to 4096; "
            "default 256)",
        ),
        "prompt_lookup_max": (int, "Maximum n-gram length of ngram (1 to 16; default 4)"),
        "prompt_lookup_min": (int, "Minimum n-gram length of ngram (1 to 16; default 2)"),
    }
)
"""Type and description of the keys of speculative_config that have a flag."""


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _with_dashes(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


class _ServeCommand(SectionedCommand):
    """Command that accepts underscores in the names of flags, as vLLM does."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Raises UsageError."""
        return super().parse_args(ctx, list(map(_with_dashes, args)))


class _SettingChoice(click.Choice[str]):
    """One of a setting's values, or vLLM's name for it."""

    def __init__(self, setting: str, values: tuple[str, ...]) -> None:
        super().__init__(values)
        self._setting = setting

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return super().convert(value_in_our_words(self._setting, value), param, ctx)


def _setting_flags(command: _Command) -> _Command:
    """Add a flag for each field of ServeConfig, with its description and limits."""
    known = ServeConfig.settings()
    order = [name for members in SECTIONS.values() for name in members]
    order += [name for name in known if name not in order]
    for name in reversed(order):
        command = _setting_flag(name, known[name])(command)
    return command


def _setting_flag(name: str, setting: Setting) -> Callable[[_Command], _Command]:
    aliases = [_flag(theirs) for theirs, ours in RENAMED.items() if ours == name]
    shared: dict[str, Any] = {
        "cls": SectionedOption,
        "section": section_of(name),
        "help": setting.help,
    }
    if setting.limit.kind is bool:
        return click.option(f"{_flag(name)}/--no-{_flag(name)[2:]}", default=None, **shared)
    short = ["-tp"] if name == "tensor_parallel_size" else []
    kind = _kind(name, setting.limit)
    return click.option(_flag(name), *aliases, *short, name, type=kind, **shared)


def _kind(name: str, limit: Limit) -> Any:
    """Return the type of a flag. ServeConfig checks whether paths exist."""
    if limit is FILE:
        return click.Path(dir_okay=False)
    if limit is DIRECTORY:
        return click.Path(file_okay=False)
    return _SettingChoice(name, limit.options) if limit.options else limit.kind


def _speculation_flags(command: _Command) -> _Command:
    """Add vLLM's flags for single keys of speculative_config."""
    by_key: dict[str, list[str]] = {}
    for name, key in SPECULATION_KEYS.items():
        by_key.setdefault(key, []).append(name)
    for key, names in reversed(by_key.items()):
        command = _speculation_flag(key, names)(command)
    return command


def _speculation_flag(key: str, names: list[str]) -> Callable[[_Command], _Command]:
    kind, description = _KEYS[key]
    return click.option(
        *map(_flag, names),
        names[0],
        cls=SectionedOption,
        section=section_of("speculative_config"),
        type=kind,
        help=f"{description}. Same as {key} in --speculative-config.",
    )


def _always_flags(command: _Command) -> _Command:
    """Add vLLM's flags that have a single supported value; the help does not list them."""
    for name, always in ALWAYS.items():
        command = _always_flag(name, always)(command)
    return command


def _always_flag(name: str, always: Always) -> Callable[[_Command], _Command]:
    if isinstance(always.value, bool):
        flag = f"{_flag(name)}/--no-{_flag(name)[2:]}"
        return click.option(flag, name, default=None, hidden=True)
    return click.option(_flag(name), type=type(always.value), hidden=True)


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
@_setting_flags
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    cls=SectionedOption,
    section="Security",
    help="API key that clients must present; may be repeated. It is visible to other users of this "
    "machine in the process list; prefer --api-key-file or $SPECDEC_API_KEYS.",
)
@_speculation_flags
@_always_flags
def serve(
    model_argument: str | None, config_file: Path | None, api_keys: tuple[str, ...], **flags: Any
) -> None:
    """Serve MODEL over gRPC and the OpenAI-compatible HTTP API, until Ctrl-C.

    MODEL is the same as --model. Flags of `vllm serve` with the same meaning are accepted by their
    names (see docs/cli.md).
    """
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
    _print_warnings((config, *others))
    from cluster.serve.startup import serve_forever

    serve_forever(config, print_stderr, others)


def _print_warnings(configs: Sequence[ServeConfig]) -> None:
    """Print each warning once, with the names of the affected models unless all are."""
    affected: dict[str, list[str]] = {}
    for config in configs:
        for warning in config.warnings:
            affected.setdefault(warning, []).append(config.served_model_name)
    for warning, names in affected.items():
        models = f"{', '.join(names)}: " if len(names) < len(configs) else ""
        print_stderr(f"warning: {models}{warning}")


def _set_keys(keys: tuple[str, ...], configs: Sequence[ServeConfig]) -> None:
    """Set the keys in the environment, which the replicas inherit and other users cannot read."""
    if not keys:
        return
    from cluster.api.api_keys import KEYS_VARIABLE, read_keys

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
