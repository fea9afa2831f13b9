"""What a configuration leaves open follows from files: the method of a draft."""

import json
import shutil

import pytest

from specdec.config.llm import LLMConfig
from specdec.config.speculative_keys import read_speculation
from specdec.engine.model_detection import with_detected_models
from specdec.engine.model_resolution import resolve_models
from specdec.types.errors import InvalidValueError, UnsupportedModelError
from tests.specdec.heads import HEADS

TEXT = [(29 * place) % 380 + 3 for place in range(40)]


def ignore(line):
    """Take no note of progress."""


def detected(target, speculation, progress=ignore, **options):
    """Return the configuration of a target with keys of speculative_config."""
    values = {"model": str(target), "speculative_config": speculation}
    return with_detected_models(LLMConfig.from_mapping(values), progress, **options)


@pytest.fixture(scope="module")
def head_dirs(tiny_model_dir, tmp_path_factory):
    """Return heads of three methods."""
    methods = ("medusa", "eagle", "eagle3")
    return {
        method: HEADS[method](tiny_model_dir, tmp_path_factory.mktemp(method), [TEXT])
        for method in methods
    }


class TestMethod:
    @pytest.mark.parametrize("method", ["medusa", "eagle", "eagle3"])
    def test_the_files_of_a_head_give_its_method(self, tiny_model_dir, head_dirs, method):
        lines = []
        keys = {"model": str(head_dirs[method]), "num_speculative_tokens": 2, "first": "ngram"}
        found = detected(tiny_model_dir, keys, lines.append)
        assert found.speculative_config == read_speculation({**keys, "method": method})
        assert lines == [f"{head_dirs[method]}: method {method}, by its files"]
        assert detected(tiny_model_dir, found.speculative_config.to_mapping()) == found
        assert resolve_models(found, ignore).head == head_dirs[method]

    def test_a_plain_model_stays_a_draft_model(self, tiny_model_dir):
        found = detected(tiny_model_dir, {"model": str(tiny_model_dir), "quantization": "int8"})
        assert found.draft_model.quantization == "int8"
        assert not found.speculative_config.left_out & {"method"}

    def test_a_pard_model_drafts_in_parallel(self, tiny_model_dir, tmp_path):
        draft = shutil.copytree(tiny_model_dir, tmp_path / "draft")
        config = json.loads((draft / "config.json").read_text())
        (draft / "config.json").write_text(json.dumps({**config, "pard_token": 380}))
        assert detected(tiny_model_dir, {"model": str(draft)}).draft_model.parallel_drafting

    def test_nothing_is_read_for_a_given_method(self, tiny_model_dir):
        keys = {"method": "draft_model", "model": "org/none"}
        assert detected(tiny_model_dir, keys).speculative_config == read_speculation(keys)

    @pytest.mark.parametrize("method", ["draft_model", "eagle3"])
    def test_another_method_than_that_of_the_files(self, tiny_model_dir, head_dirs, method):
        found = detected(tiny_model_dir, {"method": method, "model": str(head_dirs["eagle"])})
        with pytest.raises(InvalidValueError, match=f"'{method}'; it must be eagle: ") as caught:
            resolve_models(found, ignore)
        assert "\n" not in str(caught.value)

    def test_a_model_in_place_of_a_head(self, tiny_model_dir):
        found = detected(tiny_model_dir, {"method": "eagle", "model": str(tiny_model_dir)})
        with pytest.raises(UnsupportedModelError, match="is not a draft head of a known format"):
            resolve_models(found, ignore)

    def test_a_key_that_the_method_does_not_have(self, tiny_model_dir, head_dirs):
        keys = {"model": str(head_dirs["medusa"]), "draft_window": 9}
        with pytest.raises(
            InvalidValueError, match=r"draft_window is 9; it must be left out unles"
        ):
            detected(tiny_model_dir, keys)

    def test_a_model_on_other_machines_is_left_open(self, tiny_model_dir):
        found = detected(tiny_model_dir, {"model": "org/head"}, downloads=False)
        assert found.draft_model.model == "org/head"
        assert "method" in found.speculative_config.left_out
