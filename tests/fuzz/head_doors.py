"""Doors of draft heads: their files, and the detection of methods and targets from files.

Each input is accepted, or refused with an error that is meant for users.
"""

from __future__ import annotations

import json
import shutil
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

from specdec.config.llm import LLMConfig
from specdec.engine.models.model_detection import with_detected_models
from specdec.models.config.model_config import ModelConfig
from specdec.models.heads.config import HeadConfig
from specdec.models.heads.loading import load_head
from specdec.types.errors import SpecdecError
from tests.fuzz.doors import ACCEPTED, Door, typed
from tests.fuzz.mutations import changed_checkpoint, mutated, mutated_bytes
from tests.specdec.models.heads.driver import TARGET_SIZES, save, target_model
from tests.specdec.models.heads.test_malformed import base_of
from tests.specdec.tiny import tiny_llama_dir

KINDS = ("medusa", "mlp", "hydra", "eagle", "eagle3", "speculators", "p_eagle", "dflash", "dspark")
FILES = ("model.safetensors", "pytorch_model.bin")


class HeadDoor(Door):
    """Configuration, weights and list of tokens of a head, loaded beside its target."""

    name, share = "draft head", 6

    def __init__(self, scratch: Path) -> None:
        self._target_dir = tiny_llama_dir(scratch / "head-target", **TARGET_SIZES)
        self._target = ModelConfig.from_directory(self._target_dir)
        self._scratch = scratch / "heads"
        self._scratch.mkdir()
        self._token_map = scratch / "tokens.json"

    @cached_property
    def _model(self) -> Any:
        return target_model(self._target_dir)

    def enter(self, random: Random) -> str:
        directory = self._valid(random.choice(KINDS), random.choice(FILES))
        path = random.choice([each for each in directory.iterdir() if each.name != "tokens.json"])
        content = path.read_bytes()
        path.write_bytes(_changed(path.name, content, random))
        try:
            config = HeadConfig.from_directory(
                directory, self._target, random.choice((None, 0, 7, 2**40)), self._tokens(random)
            )
            load_head(config, self._model)
        except SpecdecError as error:
            return typed(error)
        finally:
            path.write_bytes(content)
        return ACCEPTED

    def _valid(self, kind: str, file: str) -> Path:
        """Return the directory of a head without a fault."""
        directory = self._scratch / f"{kind}-{Path(file).suffix[1:]}"
        return directory if directory.is_dir() else save(directory, *base_of(kind), file)

    def _tokens(self, random: Random) -> str | None:
        """Return the path of a list of tokens in half of all cases."""
        if random.random() < 0.5:
            return None
        content = json.dumps(mutated([*range(0, 300, 3)], random, random.randrange(2))).encode()
        if random.random() < 0.2:
            content = mutated_bytes(content, random)
        self._token_map.write_bytes(content)
        return str(self._token_map)


class DetectionDoor(Door):
    """`--model` and `speculative_config.model` of which the files give method and target."""

    name, share = "detection", 6

    def __init__(self, model: Path, scratch: Path) -> None:
        self._model = model
        self._head = save(scratch / "detected", *base_of("speculators"))
        self._plain = shutil.copytree(model, scratch / "plain")
        self._configs = {
            each: json.loads((each / "config.json").read_text())
            for each in (self._head, self._plain)
        }
        verifier = {"name_or_path": str(model)}
        self._configs[self._head]["speculators_config"] = {"verifier": verifier}
        self._configs[self._plain]["base_model_name_or_path"] = str(model)

    def enter(self, random: Random) -> str:
        directory, config = random.choice([*self._configs.items()])
        content = json.dumps(mutated(config, random)).encode()
        if random.random() < 0.1:
            content = mutated_bytes(content, random)
        (directory / "config.json").write_bytes(content)
        keys = {"model": str(random.choice((directory, self._model)))}
        if random.random() < 0.7:
            speculation = {"model": str(directory), "num_speculative_tokens": 2}
            keys["speculative_config"] = mutated(speculation, random, random.randrange(2))
        try:
            with_detected_models(LLMConfig.from_mapping(keys), lambda line: None, downloads=False)
        except SpecdecError as error:
            return typed(error)
        return ACCEPTED


def _changed(name: str, content: bytes, random: Random) -> bytes:
    """Return a file of a head with changes, of values or of bytes."""
    if name.endswith(".json") and random.random() < 0.9:
        return json.dumps(mutated(json.loads(content), random)).encode()
    if name.endswith(".safetensors"):
        return changed_checkpoint(content, random)
    return mutated_bytes(content, random, random.choice((2048, None)))
