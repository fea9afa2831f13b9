"""The programs and files that docs/openai.md shows work against the real HTTP interface."""

import asyncio
from pathlib import Path

import pytest
import yaml

from cluster.api.base.authentication import ApiKeys, read_keys
from cluster.api.http_app import make_app
from tests.cluster.api.openai.conftest import alone
from tests.cluster.http_server import running_server
from tests.shell_blocks import blocks_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGE = Path(__file__).parents[4] / "docs" / "openai.md"
PROGRAMS = blocks_of(PAGE, "python")


async def test_the_page_shows_both_clients_and_a_call_of_a_tool():
    shown = ["chat.completions.create(", "tool_call_id", "from anthropic import"]
    assert [text in each.text for text, each in zip(shown, PROGRAMS, strict=True)] == [True] * 3


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
async def test_a_program_of_the_page_runs(program, router, capsys):
    app = make_app(lambda: router, lambda: alone(router), ApiKeys)
    async with running_server(app) as port:
        text = program.text.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
        text = text.replace("smollm2-135m-instruct", "tiny")
        await asyncio.to_thread(exec, compile(text, str(program), "exec"), {})
    assert capsys.readouterr().out.strip()


async def test_the_keys_of_the_page_are_read(tmp_path):
    shown = PAGE.read_text().split("```yaml\n")[1].split("```")[0]
    path = tmp_path / "keys.yaml"
    path.write_text(shown)
    path.chmod(0o600)
    keys = read_keys("api_key_file", path)
    assert [each.name for each in keys] == [each["name"] for each in yaml.safe_load(shown)]
    assert keys[0].max_concurrent_requests == 8
