"""pytest plugin that runs the peers' tests without the peers.

tests/peers/suites.py sets the variables PEER_*.
"""

import inspect
import json
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import anthropic
import openai
import pytest
from transformers import AutoTokenizer

URL = os.environ["PEER_URL"]


class _Kind(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(name)

    def __iter__(cls):
        return iter(())

    def __truediv__(cls, _):
        return stand_in("path")


def stand_in(name):
    """Return a class that takes every argument, has every attribute and is false."""
    base = Exception if name.endswith("Error") else object
    fields = {"__init__": lambda self, *_, **__: None, "__bool__": lambda self: False}
    for each in ("__call__", "__getattr__", "__getitem__", "__truediv__"):
        fields[each] = lambda self, *_, **__: stand_in(name)()
    return _Kind(name, (base,), fields)


class Tokenizers:
    @staticmethod
    def get_tokenizer(*_, **__):
        return AutoTokenizer.from_pretrained(os.environ["PEER_TOKENIZER"])


class RemoteOpenAIServer:
    """The running service in place of a server that the test starts with flags."""

    DUMMY_API_KEY = "none"
    url_root = URL

    def __init__(self, *_, **__):
        self.host, _, port = URL.removeprefix("http://").partition(":")
        self.port = int(port)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def url_for(self, *parts):
        return "/".join([URL, *(part.strip("/") for part in parts)])

    def _client(self, kind, *path, **arguments):
        arguments = {"timeout": 240, **arguments}
        return kind(base_url=self.url_for(*path), api_key="none", max_retries=0, **arguments)

    def get_client(self, **arguments):
        return self._client(openai.OpenAI, "v1", **arguments)

    def get_async_client(self, **arguments):
        return self._client(openai.AsyncOpenAI, "v1", **arguments)

    def get_client_anthropic(self, **arguments):
        return self._client(anthropic.Anthropic, **arguments)

    def get_async_client_anthropic(self, **arguments):
        return self._client(anthropic.AsyncAnthropic, **arguments)


NEEDS_GPUS = pytest.mark.skip(reason="needs GPUs")
KNOWN = {
    "tests.utils": {
        "RemoteOpenAIServer": RemoteOpenAIServer,
        "ROCM_EXTRA_ARGS": [],
        "multi_gpu_only": NEEDS_GPUS,
        "large_gpu_mark": lambda **_: NEEDS_GPUS,
    },
    "sglang.srt.utils": {"retry": lambda function, *_, **__: function()},
    "vllm.tokenizers": {"get_tokenizer": Tokenizers.get_tokenizer},
}


class StandIns(MetaPathFinder, Loader):
    """Finds every module of vllm, and of sglang all but its kits and its benchmark."""

    def find_spec(self, name, path, target=None):
        if name == "tests.utils" or name.partition(".")[0] in ("vllm", "datasets"):
            return ModuleSpec(name, self, is_package=True)
        if name == "sglang" or name.startswith(("sglang.srt", "sglang.lang", "sglang.kernels")):
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return ModuleType(spec.name)

    def exec_module(self, module):
        source = os.environ.get("PEER_SOURCE", "")
        module.__path__ = [f"{source}/sglang"] if module.__name__ == "sglang" else []
        module.__dict__.update(KNOWN.get(module.__name__, {}))
        module.__getattr__ = self._attribute

    def _attribute(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(name)


sys.meta_path.insert(0, StandIns())


def name_of_test(nodeid):
    """Return file::test; for a kit module.Class::test."""
    path, _, test = nodeid.partition("::")
    if not path.endswith("kits.py"):
        return nodeid
    kits = {each.partition(".")[2]: each for each in json.loads(os.environ["PEER_FILES"])}
    kit, _, test = test.partition("::")
    return f"{kits[kit]}::{test}"


def pytest_collection_modifyitems(config, items):
    """Keep the tests that send requests to a server and that the table does not leave out."""
    not_run = set(json.loads(os.environ["PEER_NOT_RUN"]))
    ours = [item for item in items if sends_requests(item) and not names(item) & not_run]
    config.hook.pytest_deselected(items=[item for item in items if item not in ours])
    items[:] = ours


def names(item):
    """Return the test's name with its parameters and without them."""
    name = name_of_test(item.nodeid)
    return {name, name.partition("[")[0]}


def sends_requests(item):
    fixtures = [each.func for all in item._fixtureinfo.name2fixturedefs.values() for each in all]
    sources = [inspect.getsource(each) for each in (item.function, *fixtures)]
    return item.path.name == "kits.py" or any("RemoteOpenAIServer(" in each for each in sources)


RESULTS = {}


def pytest_runtest_logreport(report):
    if report.when == "call" or not report.passed:
        reason = str(report.longrepr or "").strip().splitlines() or [""]
        earlier = RESULTS.get(name_of_test(report.nodeid), {"is_passed": True})
        if earlier["is_passed"]:
            result = {"is_passed": report.passed, "reason": reason[-1][:300]}
            RESULTS[name_of_test(report.nodeid)] = result


def pytest_sessionfinish():
    Path(os.environ["PEER_REPORT"]).write_text(json.dumps(RESULTS))
