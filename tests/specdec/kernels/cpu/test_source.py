"""The folders of the C++ kernels: few files, each described, and no include cycle of folders."""

import re
from graphlib import TopologicalSorter

import pytest

from specdec.kernels.cpu.build import SOURCE

MAX_ENTRIES = 20
INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)
FOLDERS = sorted(path for path in SOURCE.iterdir() if path.is_dir())
FILES = sorted(path for path in SOURCE.rglob("*") if path.is_file())


def includes_of(folder):
    return {name for path in folder.iterdir() for name in INCLUDE.findall(path.read_text())}


@pytest.mark.parametrize("folder", [SOURCE, *FOLDERS], ids=lambda path: path.name)
def test_a_folder_has_few_entries(folder):
    assert len(list(folder.iterdir())) <= MAX_ENTRIES


def test_includes_name_a_file_with_its_folder():
    names = {name for folder in FOLDERS for name in includes_of(folder)}
    assert names <= {path.relative_to(SOURCE).as_posix() for path in FILES}
    assert all("/" in name for name in names)


def test_folders_have_no_include_cycle():
    graph = {
        folder.name: {name.split("/")[0] for name in includes_of(folder)} - {folder.name}
        for folder in FOLDERS
    }
    assert set(TopologicalSorter(graph).static_order()) == {folder.name for folder in FOLDERS}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_begins_with_its_purpose(path):
    assert path.read_text().startswith("// ")
