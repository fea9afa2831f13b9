"""`specdec serve`: every setting as a flag, and vLLM's flags beside them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from cluster.cli.help import SectionedCommand, SectionedOption
from cluster.cli.output import say
from cluster.config.multi_model import read_models
from cluster.config.sections import SECTIONS, section_of
from cluster.config.serve_config import ServeConfig, settings
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
        "model": (str, "Draft model, named as the model is"),
        "num_speculative_tokens": (int, "Draft tokens a step (1 to 32)"),
        "draft_tensor_parallel_size": (int, "Shards to divide the draft model into (1 to 1024)"),
        "speculation_threshold": (int, "Most decoding requests to draft for"),
        "prompt_lookup_max": (int, "Longest n-gram that ngram looks up (1 to 16)"),
        "prompt_lookup_min": (int, "Shortest n-gram that ngram looks up (1 to 16)"),
    }
)
"""Type and meaning of the keys of speculative_config that have a flag."""


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
        """Raise UsageError."""
        return super().parse_args(ctx, list(map(_with_dashes, args)))


class _Words(click.Choice[str]):
    """A setting's options, under vLLM's names too."""

    def __init__(self, setting: str, words: tuple[str, ...]) -> None:
        super().__init__(words)
        self._setting = setting

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return super().convert(value_in_our_words(self._setting, value), param, ctx)


def _setting_flags(command: _Command) -> _Command:
    """One flag for each field of ServeConfig, which says what it means and what it may be."""
    known = settings()
    order = [name for members in SECTIONS.values() for name in members]
    order += [name for name in known if name not in order]
    for name in reversed(order):
        command = _setting_flag(name, known[name])(command)
    return command


def _setting_flag(name: str, setting: Setting) -> Callable[[_Command], _Command]:
    others = [_flag(theirs) for theirs, ours in RENAMED.items() if ours == name]
    shared: dict[str, Any] = {
        "cls": SectionedOption,
        "section": section_of(name),
        "help": setting.help,
    }
    if setting.limit.kind is bool:
        return click.option(f"{_flag(name)}/--no-{_flag(name)[2:]}", default=None, **shared)
    short = ["-tp"] if name == "tensor_parallel_size" else []
    kind = _kind(name, setting.limit)
    return click.option(_flag(name), *others, *short, name, type=kind, **shared)


def _kind(name: str, limit: Limit) -> Any:
    """How the command line reads it, and completes it. Paths are judged with the other settings."""
    if limit is FILE:
        return click.Path(dir_okay=False)
    if limit is DIRECTORY:
        return click.Path(file_okay=False)
    return _Words(name, limit.options) if limit.options else limit.kind


def _speculation_flags(command: _Command) -> _Command:
    """Add vLLM's flags for single keys of speculative_config."""
    by_key: dict[str, list[str]] = {}
    for name, key in SPECULATION_KEYS.items():
        by_key.setdefault(key, []).append(name)
    for key, names in reversed(by_key.items()):
        command = _speculation_flag(key, names)(command)
    return command


def _speculation_flag(key: str, names: list[str]) -> Callable[[_Command], _Command]:
    kind, meaning = _KEYS[key]
    return click.option(
        *map(_flag, names),
        names[0],
        cls=SectionedOption,
        section=section_of("speculative_config"),
        type=kind,
        help=f"{meaning}; {key} in speculative_config.",
    )


def _always_flags(command: _Command) -> _Command:
    """Add the flags with one possible value, hidden in the help."""
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
    """The aliases, and directories and files of the shell's own finding."""
    from specdec.config.model_aliases import ALIASES

    aliases = [CompletionItem(name) for name in ALIASES if name.startswith(incomplete)]
    return aliases or [CompletionItem(incomplete, type="file")]


@click.command(cls=_ServeCommand)
@click.argument("model_argument", metavar="[MODEL]", required=False, shell_complete=_complete_model)
@click.option(
    "--config",
    "config_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="YAML file of the settings below, with underscores in their names; flags win over it.",
)
@_setting_flags
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    cls=SectionedOption,
    section="Security",
    help="Key that the OpenAI API asks for; again for each. Users of this machine can see it among "
    "the processes, which they cannot with api_key_file or $SPECDEC_API_KEYS.",
)
@_speculation_flags
@_always_flags
def serve(
    model_argument: str | None, config_file: Path | None, api_keys: tuple[str, ...], **flags: Any
) -> None:
    """Serve MODEL over gRPC and HTTP until Ctrl-C.

    MODEL is what --model takes. Flags of `vllm serve` with the same meaning are accepted under
    their names there (docs/cli.md).
    """
    given = {name: value for name, value in flags.items() if value is not None}
    if model_argument is not None:
        if "model" in given:
            raise click.UsageError("give the model once, as MODEL or by --model")
        given["model"] = model_argument
    if config_file is None:
        config, *others = [ServeConfig.from_sources(given)]
    else:
        config, *others = read_models(config_file, given)
    _set_keys(api_keys, (config, *others))
    _say_warnings((config, *others))
    from cluster.serve.startup import serve_forever

    serve_forever(config, say, others)


def _say_warnings(configs: Sequence[ServeConfig]) -> None:
    """Each once; with the names of the models that it concerns, where that is not all of them."""
    concerned: dict[str, list[str]] = {}
    for config in configs:
        for warning in config.warnings:
            concerned.setdefault(warning, []).append(config.served_model_name)
    for warning, names in concerned.items():
        whose = f"{', '.join(names)}: " if len(names) < len(configs) else ""
        say(f"warning: {whose}{warning}")


def _set_keys(keys: tuple[str, ...], configs: Sequence[ServeConfig]) -> None:
    """Hands keys on in the environment, which other users cannot see and the replicas have."""
    if not keys:
        return
    from cluster.api.authentication import KEYS_VARIABLE, read_keys

    if any(config.api_key_file is not None for config in configs):
        raise click.UsageError("--api-key and api_key_file exclude each other")
    if configs[0].ray_address is not None:
        raise click.UsageError("where ray_address is given, keys have to be in an api_key_file")
    if any("," in key or not key.strip() for key in keys):
        limit = "8 printable ASCII characters or more, without spaces and commas"
        raise InvalidValueError("api_key", "not shown", limit)
    os.environ[KEYS_VARIABLE] = " ".join(keys)
    if len(read_keys("api_key", None)) != len(keys):
        raise InvalidValueError("api_key", "not shown", "without spaces")
    say("warning: other users of this machine can see --api-key among the processes")
