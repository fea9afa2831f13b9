import ctypes
import threading

import pytest

from specdec.kernels.cpu.build import BuildError, build

SOURCE = 'extern "C" __attribute__((visibility("default"))) int answer() { return %d; }\n'


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "answer.cpp").write_text(SOURCE % 42)
    return folder


def test_library_is_compiled_once(source, tmp_path, caplog):
    first = build(source, tmp_path / "kernels")
    made = first.stat().st_mtime_ns
    assert ctypes.CDLL(str(first)).answer() == 42
    assert build(source, tmp_path / "kernels") == first
    assert first.stat().st_mtime_ns == made
    assert [record.message.split(" (")[0] for record in caplog.records] == [
        "compiling the CPU kernels"
    ]


def test_changed_source_gives_another_library(source, tmp_path):
    first = build(source, tmp_path / "kernels")
    (source / "answer.cpp").write_text(SOURCE % 43)
    second = build(source, tmp_path / "kernels")
    assert second != first
    assert ctypes.CDLL(str(second)).answer() == 43


def test_changed_header_gives_another_library(source, tmp_path):
    header = source / "number.h"
    header.write_text("#define NUMBER 1\n")
    first = build(source, tmp_path / "kernels")
    header.write_text("#define NUMBER 2\n")
    assert build(source, tmp_path / "kernels") != first


def test_concurrent_builds_return_the_same_library(source, tmp_path):
    built = []
    threads = [
        threading.Thread(target=lambda: built.append(build(source, tmp_path / "kernels")))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 3
    assert len(set(built)) == 1


def test_failed_build_reports_compiler_output_and_leaves_no_files(source, tmp_path):
    (source / "answer.cpp").write_text("int answer( {")
    with pytest.raises(BuildError, match=r"answer\.cpp"):
        build(source, tmp_path / "kernels")
    assert not list((tmp_path / "kernels").glob("*.tmp"))
    assert not list((tmp_path / "kernels").glob("*.so"))


def test_files_of_a_killed_process_are_removed(source, tmp_path):
    first = build(source, tmp_path / "kernels")
    left = first.with_suffix(".12345.tmp")
    left.mkdir()
    (left / first.name).write_text("half a library")
    first.unlink()
    assert build(source, tmp_path / "kernels") == first
    assert not left.exists()


def test_library_that_other_users_can_write_is_rejected(source, tmp_path):
    library = build(source, tmp_path / "kernels")
    library.chmod(0o722)
    with pytest.raises(BuildError, match=r"\.so belongs to .* writable by its owner only"):
        build(source, tmp_path / "kernels")
    library.chmod(0o755)
    library.parent.chmod(0o777)
    with pytest.raises(BuildError, match="kernels belongs to"):
        build(source, tmp_path / "kernels")
    library.parent.chmod(0o755)
    assert build(source, tmp_path / "kernels") == library


def test_missing_compiler_is_reported(source, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError, match="install"):
        build(source, tmp_path / "kernels")
