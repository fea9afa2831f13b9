"""SGLang's test kits as test cases against the running service."""

import importlib
import json
import os
from types import SimpleNamespace

import openai
from transformers import AutoTokenizer

URL, MODEL = os.environ["PEER_URL"], os.environ["PEER_MODEL"]
FIXTURES = {"spec_server_kits": ("spec_eagle_fixture", "SpecEagleServerBase")}
SERVICE = {
    "base_url": URL,
    "model": MODEL,
    "served_model_name": MODEL,
    "api_key": "none",
    "cache_chunk_size": 64,
    "process": SimpleNamespace(poll=lambda: None),
    "client": openai.Client(base_url=f"{URL}/v1", api_key="none"),
    "tokenizer": AutoTokenizer.from_pretrained(os.environ["PEER_TOKENIZER"]),
    # The fixtures start SGLang's server here, and stop it.
    "setUpClass": classmethod(lambda cls: None),
    "tearDownClass": classmethod(lambda cls: None),
}


def case(kit, name):
    """Return a class of a kit joined with the fixture that has its helpers."""
    file, fixture = FIXTURES.get(kit, ("default_fixture", "DefaultServerBase"))
    fixtures = importlib.import_module(f"sglang.test.server_fixtures.{file}")
    mixin = getattr(importlib.import_module(f"sglang.test.kits.{kit}"), name)
    return type(name, (mixin, getattr(fixtures, fixture)), dict(SERVICE))


for each in json.loads(os.environ["PEER_FILES"]):
    kit, _, name = each.partition(".")
    globals()[name] = case(kit, name)
