import errno
import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import huggingface_hub
import huggingface_hub.constants
import pytest

from specdec.models import hub
from specdec.models.resolve import resolve, resolve_adapter
from specdec.types.errors import ModelNotFoundError

COMMIT = "0123456789012345678901234567890123456789"
REPO_ID = "org/tiny"


@dataclass
class FakeHub:
    """The part of the Hub's HTTP API that downloads use; records the downloaded files."""

    files: dict[str, bytes]
    status: int = 200
    error_code: str = ""
    downloaded: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    unavailable: set[str] = field(default_factory=set)

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        self.asked.append(path)
        if self.status != 200:
            return self.status, {"X-Error-Code": self.error_code}, b"{}"
        if path.startswith(f"/{REPO_ID}/resolve/{COMMIT}/"):
            name = unquote(path.removeprefix(f"/{REPO_ID}/resolve/{COMMIT}/"))
            if name in self.unavailable:
                return 404, {}, b"{}"
            self.downloaded.append(name)
            return 200, {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT}, self.files[name]
        return 200, {}, json.dumps(self._listing(path)).encode()

    def _listing(self, path: str) -> object:
        sizes = {name: len(data) for name, data in self.files.items()}
        if "/tree/" in path:
            return [{"type": "file", "path": n, "size": s, "oid": n} for n, s in sizes.items()]
        siblings = [{"rfilename": n, "size": s, "blobId": n} for n, s in sizes.items()]
        return {"id": REPO_ID, "sha": COMMIT, "siblings": siblings}


@pytest.fixture
def use_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def fake_hub(use_hub: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    fake = FakeHub(
        {
            "config.json": b"{}",
            "model.safetensors": bytes(3_000_000),
            "tokenizer.json": b"{}",
            "modeling_tiny.py": b"print('run')",
            "pytorch_model.bin": b"pickle",
            "onnx/model.safetensors": b"other",
        }
    )

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = fake.answer(self.path.partition("?")[0])
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815 - the name that http.server looks for

        def log_message(self, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(
        huggingface_hub.constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        endpoint + "/{repo_id}/resolve/{revision}/{filename}",
    )
    yield fake
    server.shutdown()
    server.server_close()


def test_a_model_is_downloaded_without_its_code(
    fake_hub: FakeHub, capfd: pytest.CaptureFixture[str]
) -> None:
    lines: list[str] = []
    model_dir = resolve(REPO_ID, progress=lines.append)
    names = sorted(path.name for path in model_dir.iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    assert set(fake_hub.downloaded) == set(names)
    assert lines[0] == "fetching org/tiny from the Hugging Face Hub (3 MB)"
    assert lines[-1] == "fetching org/tiny: 100 %"
    assert len(lines) <= 11
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("has_safetensors", [True, False])
def test_pickled_weights_of_a_head_are_downloaded_if_there_are_no_others(
    fake_hub: FakeHub, has_safetensors: bool
) -> None:
    if not has_safetensors:
        del fake_hub.files["model.safetensors"]
    directory = resolve(REPO_ID, progress=lambda line: None, may_be_pickled=True)
    weights = "model.safetensors" if has_safetensors else "pytorch_model.bin"
    assert sorted(each.name for each in directory.iterdir()) == sorted(
        ["config.json", "tokenizer.json", weights]
    )
    fake_hub.status = 503
    assert resolve(REPO_ID, progress=lambda line: None, may_be_pickled=True) == directory


SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
INDEX = json.dumps({"weight_map": dict(zip("ab", SHARDS, strict=True))}).encode()


@pytest.mark.parametrize(
    ("weights", "others"),
    [
        (SHARDS, ["consolidated.safetensors", "model.safetensors", "adapter_model.safetensors"]),
        (["model.safetensors"], ["consolidated-00001-of-00002.safetensors"]),
        (["consolidated.safetensors"], []),
    ],
)
def test_weights_are_downloaded_once(
    fake_hub: FakeHub, weights: list[str], others: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    del fake_hub.files["model.safetensors"]
    fake_hub.files |= dict.fromkeys([*weights, *others], bytes(1_000_000))
    if weights == SHARDS:
        fake_hub.files["model.safetensors.index.json"] = INDEX
    lines: list[str] = []
    resolve(REPO_ID, progress=lines.append)
    found = {name for name in fake_hub.downloaded if name.endswith(".safetensors")}
    assert found == set(weights)
    assert lines[0] == f"fetching org/tiny from the Hugging Face Hub ({len(weights)} MB)"
    assert lines[-1] == "fetching org/tiny: 100 %"
    assert capfd.readouterr() == ("", "")


def test_all_files_of_tokenizers_and_templates_are_downloaded(fake_hub: FakeHub) -> None:
    names = {
        *("tiktoken.model", "spiece.model", "sentencepiece.bpe.model", "qwen.tiktoken"),
        *("chat_template.jinja", "additional_chat_templates/tool_use.jinja", "chat_[1].json"),
    }
    fake_hub.files |= dict.fromkeys(names, b"{}")
    fake_hub.files["additional_chat_templates/other.json"] = b"{}"
    resolve(REPO_ID, progress=lambda line: None)
    assert names < set(fake_hub.downloaded)
    assert "additional_chat_templates/other.json" not in fake_hub.downloaded


@pytest.mark.parametrize("has_safetensors", [True, False])
def test_only_the_files_of_an_adapter_are_downloaded(
    fake_hub: FakeHub, has_safetensors: bool
) -> None:
    fake_hub.files |= {"adapter_config.json": b"{}", "adapter_model.bin": b"pickle"}
    if has_safetensors:
        fake_hub.files["adapter_model.safetensors"] = bytes(1_000_000)
    lines: list[str] = []
    directory = resolve_adapter(REPO_ID, lines.append)
    weights = "adapter_model.safetensors" if has_safetensors else "adapter_model.bin"
    assert set(fake_hub.downloaded) == {"adapter_config.json", weights}
    size = "1 MB" if has_safetensors else "0 MB"
    assert lines[0] == f"fetching org/tiny from the Hugging Face Hub ({size})"
    fake_hub.status = 503
    assert resolve_adapter(REPO_ID, lines.append) == directory


@pytest.mark.parametrize("revision", ["v1.0", "refs/pr/1", COMMIT])
def test_the_requested_revision_is_downloaded(fake_hub: FakeHub, revision: str) -> None:
    lines: list[str] = []
    model_dir = resolve(f"{REPO_ID}@{revision}", progress=lines.append)
    assert (model_dir / "config.json").is_file()
    assert lines[0] == f"fetching org/tiny@{revision} from the Hugging Face Hub (3 MB)"
    asked = revision.replace("/", "%2F")
    assert fake_hub.asked[0] == f"/api/models/{REPO_ID}/revision/{asked}"
    fake_hub.status = 503
    assert resolve(f"{REPO_ID}@{revision}", progress=lambda line: None) == model_dir
    with pytest.raises(ModelNotFoundError, match="answered HTTP 503"):
        resolve(f"{REPO_ID}@other", progress=lambda line: None)


def test_a_cached_copy_is_used_while_the_hub_is_down(fake_hub: FakeHub) -> None:
    model_dir = resolve(REPO_ID, progress=lambda line: None)
    fake_hub.status = 503
    assert resolve(REPO_ID, progress=lambda line: None) == model_dir


@pytest.mark.parametrize(
    "missing",
    ["tokenizer.json", "generation_config.json", SHARDS[1], "model.safetensors.index.json"],
)
def test_an_incomplete_copy_is_rejected_while_the_hub_is_down(
    fake_hub: FakeHub, missing: str
) -> None:
    fake_hub.files |= {"generation_config.json": b"{}", "model.safetensors.index.json": INDEX}
    fake_hub.files |= dict.fromkeys(SHARDS, b"")
    model_dir = resolve(REPO_ID, progress=lambda line: None)
    fake_hub.status = 503
    assert resolve(REPO_ID, progress=lambda line: None) == model_dir
    (model_dir / missing).unlink()
    with pytest.raises(ModelNotFoundError, match="answered HTTP 503"):
        resolve(REPO_ID, progress=lambda line: None)


def test_a_copy_without_a_list_of_its_files_is_used_while_the_hub_is_down(
    fake_hub: FakeHub,
) -> None:
    model_dir = resolve(REPO_ID, progress=lambda line: None)
    shutil.rmtree(model_dir.parents[1] / "trees")
    fake_hub.status = 503
    assert resolve(REPO_ID, progress=lambda line: None) == model_dir


@pytest.mark.parametrize("copy", ["whole", "cut", "none"])
def test_a_cached_copy_is_used_if_another_commit_cannot_be_stored(
    fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch, copy: str
) -> None:
    """The cache is on a read-only volume; directory modes would not stop root."""
    cached = None if copy == "none" else resolve(REPO_ID, progress=lambda line: None)
    if cached is not None and copy == "cut":  # without a list of its files
        shutil.rmtree(cached.parents[1] / "trees")
        (cached / "model.safetensors").unlink()

    def download_to_read_only_cache(repo_id: str, **options: Any) -> Any:
        if not options.get("local_files_only"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), f"/models/snapshots/{'f' * 40}")
        return huggingface_hub.snapshot_download(repo_id, **options)

    monkeypatch.setattr(hub, "snapshot_download", download_to_read_only_cache)
    lines: list[str] = []
    reason = r"could not be read or stored \(.*Read-only file system"
    if copy == "whole":
        assert resolve(REPO_ID, progress=lines.append) == cached
        assert re.match(f"warning: using the cached org/tiny: .* {reason}", lines[-1])
    else:
        with pytest.raises(ModelNotFoundError, match=reason):
            resolve(REPO_ID, progress=lines.append)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_an_interrupted_download_is_not_used(fake_hub: FakeHub, name: str) -> None:
    fake_hub.unavailable.add(name)
    for _ in range(2):
        with pytest.raises(ModelNotFoundError, match="404 Not Found"):
            resolve(REPO_ID, progress=lambda line: None)
    fake_hub.unavailable.clear()
    assert (resolve(REPO_ID, progress=lambda line: None) / name).is_file()


def test_a_repository_without_config_is_rejected(fake_hub: FakeHub) -> None:
    del fake_hub.files["config.json"]
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        resolve(REPO_ID, progress=lambda line: None)


@pytest.mark.parametrize(
    ("status", "error_code", "reason"),
    [
        (404, "RepoNotFound", "has no such model"),
        (404, "RevisionNotFound", "has no such revision"),
        (403, "GatedRepo", "is gated"),
        (500, "", "answered HTTP 500"),
    ],
)
def test_the_reason_of_a_hub_error_is_reported(
    fake_hub: FakeHub, status: int, error_code: str, reason: str
) -> None:
    fake_hub.status, fake_hub.error_code = status, error_code
    with pytest.raises(ModelNotFoundError, match=reason) as caught:
        resolve(REPO_ID, progress=lambda line: None)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("use_hub")
def test_an_unreachable_hub_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelNotFoundError, match="could not be reached") as caught:
        resolve("HuggingFaceTB/SmolLM2-135M-Instruct", progress=lambda line: None)
    assert "did you mean 'smollm2-135m-instruct'" in str(caught.value)


@pytest.mark.usefixtures("use_hub")
@pytest.mark.parametrize("name", ["org/a--b", "org/a..b", "org/tiny.git"])
def test_an_invalid_hub_name_is_rejected(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="has no such model"):
        resolve(name, progress=lambda line: None)


@pytest.mark.usefixtures("use_hub")
def test_a_hub_that_does_not_respond_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{port}")
        began = time.monotonic()
        with pytest.raises(ModelNotFoundError, match="could not be reached"):
            resolve(REPO_ID, progress=lambda line: None)
    assert time.monotonic() - began < 10
