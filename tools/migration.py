"""Generate docs/migration.md: the flags of vLLM and SGLang, and lines of their pages.

python -m tools.migration [check]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from cluster.config import sglang_compat, vllm_compat
from specdec.config.speculation.methods import other_method_names
from specdec.config.speculative_keys import SPECULATION_KEYS
from specdec.config.vllm_compat import VALUES, Always
from specdec.types.sampling.vllm_sampling import REFUSED
from tools.generated_files import run

PAGE = Path("docs/migration.md")

_HEAD = Path(__file__).with_name("migration_head.md")
"""The part of the page that is written by hand."""


def page() -> str:
    """Generate the page."""
    sections = (
        _HEAD.read_text(encoding="utf-8"),
        *_vllm(),
        *_sglang(),
        *_values(),
        *_sampling(),
    )
    return "\n".join(sections).rstrip() + "\n"


def _vllm() -> Iterator[str]:
    yield "## Flags of `vllm serve`\n"
    yield f"The same here: {', '.join(map(_flag, sorted(vllm_compat.SAME)))}.\n"
    yield _table({**_renamed(vllm_compat.RENAMED), **_keys(SPECULATION_KEYS)})
    yield "Accepted with a notice, because the value is the behavior here:\n"
    yield _always(vllm_compat.ALWAYS)


def _sglang() -> Iterator[str]:
    yield "## Flags of `sglang.launch_server`\n"
    keys = _keys(sglang_compat.SPECULATION_KEYS)
    disables = {
        _flag(name): f"`--no-{ours.replace('_', '-')}`"
        for name, ours in sglang_compat.DISABLES.items()
    }
    trees = {_flag(name): "the shape of the draft, see above" for name in sglang_compat.TREE_FLAGS}
    yield _table({**_renamed(sglang_compat.RENAMED), **disables, **keys, **trees})
    yield "Accepted with a notice:\n"
    yield _always(sglang_compat.ALWAYS)


def _values() -> Iterator[str]:
    yield "## Values\n"
    named = {_flag(name): names for name, names in VALUES.items()}
    named["method or algorithm"] = other_method_names()
    rows = {
        f"{setting} {_names_of(value, names)}": f"`{value}`"
        for setting, names in named.items()
        for value in dict.fromkeys(names.values())
    }
    yield _table(rows, "value")


def _sampling() -> Iterator[str]:
    yield "## Arguments of `SamplingParams`\n"
    yield (
        'Those that are not in this table have vLLM\'s names and meanings. "Left out" '
        'includes None, an empty value (`False`, `""`, `[]`, `()` or `{}`), and a number or `True` '
        "that is vLLM's default.\n"
    )
    yield _table(
        {
            "`structured_outputs`, `guided_decoding`": "the same, or `structured_output`",
            "`detokenize`": "accepted with a notice: outputs have their text",
            "`top_k=-1`": "the same, or 0",
            **{f"`{name}`": text for name, text in REFUSED.items()},
        },
        "argument",
    )


def _renamed(names: Mapping[str, str]) -> dict[str, str]:
    return {_flag(name): _flag(ours) for name, ours in names.items()}


def _keys(names: Mapping[str, str]) -> dict[str, str]:
    return {_flag(name): f"key `{key}` of `--speculative-config`" for name, key in names.items()}


def _names_of(value: str, values: Mapping[str, str]) -> str:
    return ", ".join(f"`{name}`" for name, each in values.items() if each == value)


def _always(flags: Mapping[str, Always]) -> str:
    rows = {}
    for name, each in sorted(flags.items()):
        value = "any value" if each.takes_any else f"`{str(each.value).lower()}`"
        rows[_flag(name)] = f"{value}: {each.reason}"
    return _table(rows)


def _table(rows: Mapping[str, str], first: str = "flag") -> str:
    lines = [f"| {first} | here |", "|---|---|"]
    lines += [f"| {name} | {' '.join(text.split())} |" for name, text in rows.items()]
    return "\n".join(lines) + "\n"


def _flag(name: str) -> str:
    return f"`--{name.replace('_', '-')}`"


def main(arguments: list[str]) -> int:
    """Generate or check the page; return the exit status."""
    return run({PAGE: page}, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
