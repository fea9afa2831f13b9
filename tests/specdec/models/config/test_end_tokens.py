"""Tokens that end a text: the union of what a model's files name."""

import json
import shutil

import pytest

from specdec.config.llm import LLMConfig
from specdec.engine.models.model_report import Precision, report_model
from specdec.engine.models.model_resolution import resolve_models
from specdec.models.config.end_tokens import find_end_tokens, read_tokenizer_end
from specdec.models.config.model_config import ModelConfig
from specdec.types.errors import UnsupportedModelError
from specdec.types.responses import FinishReason
from tests.specdec.engines import engine_config, local_engine, request, run

GENERATION, CONFIG = "generation_config.json", "config.json"
TOKENIZER = "tokenizer_config.json"


@pytest.fixture
def model_dir(tiny_model_dir, tmp_path):
    return shutil.copytree(tiny_model_dir, tmp_path / "model")


def write(directory, name, **changes):
    path = directory / name
    known = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(known | changes))


def test_every_file_of_a_model_may_name_some(model_dir):
    write(model_dir, GENERATION, eos_token_id=[5, 6])
    write(model_dir, CONFIG, eos_token_id=6)
    write(model_dir, TOKENIZER, eos_token="<|im_end|>")
    assert ModelConfig.from_directory(model_dir).eos_token_ids == {2, 5, 6}
    found = find_end_tokens(model_dir, {"eos_token_id": 6}, {"eos_token_id": [5, 6]})
    assert found == {2: (TOKENIZER,), 5: (GENERATION,), 6: (GENERATION, CONFIG)}


def test_a_text_model_within_another_may_name_some(model_dir):
    raw = {"eos_token_id": 7, "text_config": {"eos_token_id": [8]}}
    assert set(find_end_tokens(model_dir, raw, {})) == {2, 7, 8}


def test_an_answer_ends_with_the_end_token_of_the_tokenizer_alone(model_dir):
    for name in (GENERATION, CONFIG):
        write(model_dir, name, eos_token_id=0)
    write(model_dir, TOKENIZER, eos_token="<|im_end|>")
    engine = local_engine(model_dir, engine_config(4))
    asked = request("r", [40, 41], max_tokens=4, allowed_token_ids=(2,), ignore_eos=False)
    [transcript] = run(engine, [asked]).values()
    assert transcript.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        (TOKENIZER, {"eos_token": {"content": "a"}, "added_tokens_decoder": {"9": "a"}}, 9),
        (TOKENIZER, {"eos_token": "<|im_end|>"}, 2),
        (TOKENIZER, {"eos_token": "the"}, "the"),
        (TOKENIZER, {"eos_token": "<absent>"}, None),
        (TOKENIZER, {"eos_token": None}, None),
        ("special_tokens_map.json", {"eos_token": {"content": "<|im_start|>"}}, 1),
    ],
)
def test_forms_of_the_tokenizers_end_token(model_dir, name, content, expected):
    (model_dir / TOKENIZER).unlink()
    write(model_dir, name, **content)
    if isinstance(expected, str):
        raw = json.loads((model_dir / "tokenizer.json").read_text())
        expected = raw["model"]["vocab"][expected]
    assert read_tokenizer_end(model_dir) == expected


def test_a_unigram_vocabulary_is_a_list(tmp_path):
    vocabulary = [["<unk>", 0.0], ["</s>", -1.0]]
    write(tmp_path, "tokenizer.json", model={"vocab": vocabulary})
    write(tmp_path, TOKENIZER, eos_token="</s>")
    assert read_tokenizer_end(tmp_path) == 1


@pytest.mark.parametrize(
    ("name", "token_id", "changes"),
    [
        (TOKENIZER, 9999, {"eos_token": "x", "added_tokens_decoder": {"9999": {"content": "x"}}}),
        (GENERATION, 383, {"eos_token_id": [2, 383]}),
        (CONFIG, -1, {"eos_token_id": [-1, 2]}),
    ],
)
def test_an_end_token_outside_the_vocabulary_is_ignored(model_dir, name, token_id, changes):
    """Masks of structured output and min_tokens have no place for it."""
    write(model_dir, name, **changes)
    assert ModelConfig.from_directory(model_dir).eos_token_ids == {2}
    note = f"no text ends at {token_id} ({name}): the vocabulary has 383 tokens"
    lines = []
    resolve_models(LLMConfig(str(model_dir)), lines.append)
    assert lines == [f"{model_dir}: {note}"]
    report = report_model(model_dir, Precision("float32", None, is_native=False), 1)
    assert note in report.checkpoint.notes
    assert report.end_tokens.keys() == {2}


@pytest.mark.parametrize("name", [GENERATION, CONFIG])
def test_an_error_names_the_file(model_dir, name):
    write(model_dir, name, eos_token_id="2")
    with pytest.raises(UnsupportedModelError, match=rf"eos_token_id in {name} is '2'; it must"):
        ModelConfig.from_directory(model_dir)


def test_files_that_are_not_a_tokenizers_are_one_clear_error(model_dir):
    write(model_dir, TOKENIZER, eos_token="x")
    write(model_dir, "tokenizer.json", added_tokens=[7])
    with pytest.raises(UnsupportedModelError, match="invalid files of a tokenizer"):
        ModelConfig.from_directory(model_dir)
