import ctypes
import threading

import pytest

from specdec.kernels.cpu.build import BuildError, build

SOURCE = 'extern "C" __attribute__((visibility("default"))) int answer() { return %d; }\n'


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE % 42)
    return path


def test_a_library_is_compiled_once(source, tmp_path):
    first = build([source], tmp_path / "kernels")
    made = first.stat().st_mtime_ns
    assert ctypes.CDLL(str(first)).answer() == 42
    assert build([source], tmp_path / "kernels") == first
    assert first.stat().st_mtime_ns == made


def test_another_source_is_another_library(source, tmp_path):
    first = build([source], tmp_path / "kernels")
    source.write_text(SOURCE % 43)
    second = build([source], tmp_path / "kernels")
    assert second != first
    assert ctypes.CDLL(str(second)).answer() == 43


def test_a_header_is_part_of_what_a_library_depends_on(source, tmp_path):
    header = tmp_path / "number.h"
    header.write_text("#define NUMBER 1\n")
    first = build([source, header], tmp_path / "kernels")
    header.write_text("#define NUMBER 2\n")
    assert build([source, header], tmp_path / "kernels") != first


def test_those_who_need_it_at_once_get_the_same(source, tmp_path):
    built = []
    threads = [
        threading.Thread(target=lambda: built.append(build([source], tmp_path / "kernels")))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 3
    assert len(set(built)) == 1


def test_the_compiler_s_words_are_in_the_error_and_nothing_is_left(source, tmp_path):
    source.write_text("int answer( {")
    with pytest.raises(BuildError, match=r"answer\.cpp"):
        build([source], tmp_path / "kernels")
    assert not list((tmp_path / "kernels").glob("*.tmp"))
    assert not list((tmp_path / "kernels").glob("*.so"))


def test_what_a_killed_process_left_is_removed(source, tmp_path):
    first = build([source], tmp_path / "kernels")
    left = first.with_suffix(".12345.tmp")
    left.mkdir()
    (left / first.name).write_text("half a library")
    first.unlink()
    assert build([source], tmp_path / "kernels") == first
    assert not left.exists()


def test_what_others_could_have_written_is_refused(source, tmp_path):
    library = build([source], tmp_path / "kernels")
    library.chmod(0o722)
    with pytest.raises(BuildError, match=r"\.so belongs to .* writable by its owner only"):
        build([source], tmp_path / "kernels")
    library.chmod(0o755)
    library.parent.chmod(0o777)
    with pytest.raises(BuildError, match="kernels belongs to"):
        build([source], tmp_path / "kernels")
    library.parent.chmod(0o755)
    assert build([source], tmp_path / "kernels") == library


def test_no_compiler_is_one_clear_error(source, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError, match="install"):
        build([source], tmp_path / "kernels")
