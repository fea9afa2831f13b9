# Modules: cluster.__main__
"""The entry point of the `specdec` command."""

import importlib.abc
import sys

import pytest

from cluster.__main__ import run


class Interrupted(importlib.abc.MetaPathFinder):
    """Ctrl-C during the import of the command line."""

    def find_spec(self, name, path=None, target=None):
        if name == "cluster.cli.main":
            raise KeyboardInterrupt
        return None


def test_ctrl_c_during_the_imports_is_no_traceback(monkeypatch):
    monkeypatch.delitem(sys.modules, "cluster.cli.main", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as error:
        run()
    assert error.value.code == 130
