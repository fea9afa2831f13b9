"""Doors of files: checkpoints, GGUF, configuration files, chat templates, and grammars.

Each input is accepted, or refused with an error that is meant for users.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import yaml

from cluster.config.config_file import read_models
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.resolve import resolve
from specdec.text.grammar.compiler import GrammarCompiler
from specdec.text.tokenizer import Tokenizer
from specdec.types.errors import SpecdecError
from specdec.types.request import Conversation
from specdec.types.sampling.sampling_params import StructuredOutput
from specdec.worker import RankModel, load_target
from tests.e2e.random_messages import TEXTS
from tests.fuzz.doors import ACCEPTED, Door, typed
from tests.fuzz.head_doors import DetectionDoor, HeadDoor
from tests.fuzz.mutations import (
    changed_checkpoint,
    changed_json,
    mutated,
    mutated_bytes,
    mutated_text,
    wild,
)
from tests.specdec.engines import engine_config
from tests.specdec.models.tiny_gguf import write_gguf


class ConfigJsonDoor(Door):
    """`config.json` and `generation_config.json` of a model directory."""

    name, share = "config.json", 20

    def __init__(self, model: Path, scratch: Path) -> None:
        self._directory = scratch / "config"
        self._directory.mkdir()
        self._valid = json.loads((model / "config.json").read_text())
        self._generation = {"temperature": 0.5, "top_k": 4, "eos_token_id": [1, 2]}

    def enter(self, random: Random) -> str:
        for name, valid in (
            ("config.json", self._valid),
            ("generation_config.json", self._generation),
        ):
            content = json.dumps(mutated(valid, random)).encode()
            if random.random() < 0.1:
                content = mutated_bytes(content, random)
            (self._directory / name).write_bytes(content)
        try:
            ModelConfig.from_directory(self._directory)
        except SpecdecError as error:
            return typed(error)
        return ACCEPTED


class CheckpointDoor(Door):
    """The header of a safetensors file, the tokenizer, and the configuration, loaded as a rank."""

    name, share = "checkpoint", 4

    def __init__(self, model: Path, scratch: Path) -> None:
        self._directory = scratch / "checkpoint"
        shutil.copytree(model, self._directory)
        self._valid = {each.name: each.read_bytes() for each in model.iterdir() if each.is_file()}

    def enter(self, random: Random) -> str:
        name = random.choice(("model.safetensors", "model.safetensors", "tokenizer.json"))
        content = self._valid[name]
        change = changed_checkpoint if "safe" in name else changed_json
        (self._directory / name).write_bytes(change(content, random))
        try:
            Tokenizer(self._directory)
            config, group = engine_config(), TensorParallelGroup()
            load_target(RankModel(self._directory, "float32", config), group)
        except SpecdecError as error:
            return typed(error)
        finally:
            (self._directory / name).write_bytes(content)
        return ACCEPTED


class GgufDoor(Door):
    """A GGUF file with changed bytes, most of them in its header."""

    name, share = "GGUF", 2

    def __init__(self, model: Path, scratch: Path) -> None:
        self._scratch = scratch
        self._path = scratch / "tiny.gguf"
        write_gguf(model, self._path)
        self._valid = self._path.read_bytes()

    def enter(self, random: Random) -> str:
        end = random.choice((64, 2048, len(self._valid)))
        self._path.write_bytes(mutated_bytes(self._valid, random, end))
        cache = self._scratch / "gguf-cache"
        try:
            ModelConfig.from_directory(resolve(str(self._path), cache, lambda line: None))
        except SpecdecError as error:
            return typed(error)
        finally:
            shutil.rmtree(cache, ignore_errors=True)
        return ACCEPTED


class ConfigFileDoor(Door):
    """The YAML file of `specdec serve --config`."""

    name, share = "config file", 20

    _speculations: Sequence[Mapping[str, Any]] = (
        {"method": "ngram", "num_speculative_tokens": 3},
        {
            "method": "medusa",
            "model": "./head",
            "medusa_choices": [[0], [1], [0, 0], [0, 1]],
            "speculative_token_map": "./tokens.json",
        },
        {
            "method": "draft_model",
            "model": "org/draft",
            "draft_window": 64,
            "draft_confidence_threshold": 0.4,
            "parallel_drafting": False,
        },
        {
            "method": "eagle3",
            "model": "./head",
            "draft_window": 128,
            "num_draft_tree_tokens": 8,
            "first": "ngram",
            "fallback": {"method": "draft_model", "quantization": "int8"},
        },
        {"model": "./head", "draft_window": 16},
    )
    _valid: Mapping[str, Any] = {
        "model": "smollm2-135m-instruct",
        "max_model_len": 512,
        "allowed_hosts": ["a.example"],
        "tensor_parallel_size": 2,
        "num_replicas": 1,
    }

    def __init__(self, scratch: Path) -> None:
        self._path = scratch / "serve.yaml"

    def enter(self, random: Random) -> str:
        valid: Mapping[str, Any] = {
            **self._valid,
            "speculative_config": random.choice(self._speculations),
        }
        if random.random() < 0.3:
            valid = {"host": "127.0.0.1", "models": [valid, {"model": "other"}]}
        content = yaml.safe_dump(mutated(valid, random), allow_unicode=True).encode()
        if random.random() < 0.3:
            content = mutated_bytes(content, random)
        self._path.write_bytes(content)
        try:
            read_models(self._path)
        except SpecdecError as error:
            return typed(error)
        return ACCEPTED


class ChatTemplateDoor(Door):
    """A model's chat template, and conversations for it."""

    name, share = "chat template", 10

    _templates = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}",
        "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0]['content'] }}",
        "{{ raise_exception('no') }}{{ ''.__class__.__mro__ }}{% set x = messages | length %}",
    )

    def __init__(self, model: Path) -> None:
        self._model = model

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer(self._model)

    def enter(self, random: Random) -> str:
        template = random.choice(self._templates)
        template = mutated_text(template, random) if random.random() < 0.7 else template
        messages = mutated([{"role": "user", "content": "Hi"}] * 2, random)
        messages = (
            [each for each in messages if isinstance(each, dict)] if type(messages) is list else []
        )
        options = {"enable_thinking": wild(random)} if random.random() < 0.2 else {}
        conversation = Conversation(tuple(messages), template_kwargs=options)
        chat = self._tokenizer.chat_template
        names = ("text", "plain_text")
        with mock.patch.object(chat._tokenizer, "chat_template", template):
            for each in names:
                vars(chat).pop(each, None)
            try:
                self._tokenizer.encode_conversation(conversation)
            except SpecdecError as error:
                return typed(error)
            finally:
                for each in names:
                    vars(chat).pop(each, None)
        return ACCEPTED


class GrammarDoor(Door):
    """JSON schemas, regular expressions, choices and grammars, compiled."""

    name, share = "grammar", 8

    _schema: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        },
        "required": ["name"],
        "additionalProperties": False,
    }
    _grammars = (
        'start: NAME " " NAME\nNAME: /[A-Z][a-z]{1,8}/',
        'root ::= "a" item*\nitem ::= [0-9]+ "," ',
        'start: "x" | start "y"',
    )

    def __init__(self, model: Path) -> None:
        config = ModelConfig.from_directory(model)
        self._compiler = GrammarCompiler(Tokenizer(model), config.vocab_size, config.eos_token_ids)

    def enter(self, random: Random) -> str:
        try:
            self._compiler.compile(self._structure(random))
        except SpecdecError as error:
            return type(error).__name__  # texts of compilers have several lines
        return ACCEPTED

    def _structure(self, random: Random) -> StructuredOutput:
        kind = random.randrange(4)
        if kind == 0:
            schema = mutated(self._schema, random)
            return StructuredOutput(json_schema=json.dumps(schema))
        if kind == 1:
            return StructuredOutput(regex=mutated_text("[a-z]+(b|c)?", random))
        if kind == 2:
            return StructuredOutput(choice=tuple(random.choices(TEXTS, k=random.randrange(4))))
        return StructuredOutput(grammar=mutated_text(random.choice(self._grammars), random))

    def close(self) -> None:
        """End the compiler's processes."""
        self._compiler.close()


def file_doors(model: Path, scratch: Path) -> list[Door]:
    """Return the doors of files. scratch: an empty directory for changed copies of `model`."""
    return [
        ConfigJsonDoor(model, scratch),
        CheckpointDoor(model, scratch),
        HeadDoor(scratch),
        DetectionDoor(model, scratch),
        GgufDoor(model, scratch),
        ConfigFileDoor(scratch),
        ChatTemplateDoor(model),
        GrammarDoor(model),
    ]
