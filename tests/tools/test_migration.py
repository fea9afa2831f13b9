"""docs/migration.md: it is up to date, and every line of it is parsed by the command."""

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from cluster.cli import main
from cluster.config.sglang_compat import DISABLES, TREE_FLAGS
from cluster.config.vllm_compat import ALL_ALWAYS, ALL_RENAMED, ALL_SPECULATION_KEYS
from tests.cluster.cli.test_serve import guard, served
from tests.shell_blocks import blocks_of
from tools.migration import PAGE, page

__all__ = ["guard", "served"]

ROOT = Path(__file__).parents[2]
LINES = [
    line
    for block in blocks_of(ROOT / PAGE, "bash")
    for line in block.text.splitlines()
    if line.startswith("specdec serve")
]


def test_the_page_is_generated_from_the_tables():
    assert (ROOT / PAGE).read_text() == page(), "run `make generate`"


def test_the_page_has_every_flag_of_the_tables():
    text = page()
    for name in (*ALL_RENAMED, *ALL_SPECULATION_KEYS, *ALL_ALWAYS, *DISABLES, *TREE_FLAGS):
        if name != "num_draft_tree_tokens":  # our own key
            assert f"--{name.replace('_', '-')}`" in text or name == "speculative_token_map", name


def test_the_page_has_lines_of_both_engines():
    assert len(LINES) == 13


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_the_page_is_parsed(line, served):
    result = CliRunner().invoke(main.main, shlex.split(line)[1:])
    assert result.exit_code == 0, result.stderr
    assert served[0].speculative_config is not None
