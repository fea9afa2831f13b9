"""Tests of the documentation site: its pages, its links, and that it loads nothing external."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("mkdocs", reason="needs mkdocs-material: pip install -e '.[dev]'")

from protos.specdec.v1 import admin_pb2, inference_pb2
from tools.site.hooks import on_page_markdown
from tools.site.proto_page import proto_page

ROOT = Path(__file__).parents[2]
PAGES = (
    "index.md",
    "control.md",
    "adr/index.md",
    "adr/0001-a.md",
    "reference/grpc.md",
    "deploy.md",
)
EXTERNAL_RESOURCE = re.compile(
    r"""<(?:script|img|link|iframe)\b[^>]*?\b(?:src|href)=["']https?:|url\(https?:"""
)


@pytest.fixture(scope="module")
def page():
    return proto_page(ROOT / "protos")


def test_every_part_of_the_protos_is_on_the_page(page):
    for file in (inference_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR):
        for service in file.services_by_name.values():
            assert f"## {service.full_name}\n" in page
            assert all(f"### {method.name}\n" in page for method in service.methods)
        for message in file.message_types_by_name.values():
            assert f"### {message.name}\n" in page
            for field in message.fields:
                assert f"| `{field.name}` = {field.number} | " in page
        for enum in file.enum_types_by_name.values():
            assert all(f"| `{value.name}` = {value.number} | " in page for value in enum.values)


@pytest.mark.parametrize(
    "row",
    [
        "| `token_ids` = 3 | [`TokenIds`](#tokenids), one of `prompt` | Tokens that are used",
        "| `n` = 1 | `int32`, optional | Choices to generate",
        "| `logit_bias` = 9 | map of `int32` to `float` | Added to the logits",
        "| `stop` = 13 | list of `string` | Strings that end the text",
        "| `updated_at` = 5 | `google.protobuf.Timestamp` | When it was changed last",
    ],
)
def test_a_field_has_its_type_and_comment(page, row):
    assert row in page


def test_a_streaming_method_is_marked_as_a_stream(page):
    request, anchor = "[`GenerateRequest`](#generaterequest)", "(#generatestreamresponse)"
    assert f"{request} → stream of [`GenerateStreamResponse`]{anchor}" in page


@pytest.mark.parametrize(
    ("current", "link", "expected"),
    [
        ("index.md", "[a](control.md#x)", "[a](control.md#x)"),
        ("adr/0001-a.md", "[a](../control.md)", "[a](../control.md)"),
        ("control.md", "[a](../deploy/README.md)", "[a](deploy.md)"),
        ("deploy.md", "[a](../docs/control.md)", "[a](control.md)"),
        ("control.md", "[`x`](../protos/specdec/v1/admin.proto)", "[`x`](reference/grpc.md)"),
        ("control.md", "[a](../README.md)", "[a](index.md)"),
        ("control.md", "[rules](../deploy/rules.yaml)", "rules (`deploy/rules.yaml`)"),
        ("control.md", "[a](https://example.com/x.md)", "[a](https://example.com/x.md)"),
        ("control.md", "[a](missing.md)", "[a](missing.md)"),
    ],
)
def test_links_are_rewritten_to_pages_of_the_site(current, link, expected):
    page = SimpleNamespace(file=SimpleNamespace(src_uri=current))
    files = [SimpleNamespace(src_uri=path) for path in PAGES]
    assert on_page_markdown(f"See {link}.", page, None, files) == f"See {expected}."


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_loads_nothing_from_other_hosts(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    built = [path for suffix in ("html", "css") for path in tmp_path.rglob(f"*.{suffix}")]
    assert len(built) > 40
    assert [path for path in built if EXTERNAL_RESOURCE.search(path.read_text())] == []
