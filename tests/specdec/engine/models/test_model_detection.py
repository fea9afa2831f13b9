"""What a configuration leaves open follows from files: the method of a draft, and the target."""

import json
import shutil

import pytest

from specdec.config.llm import LLMConfig
from specdec.config.speculative_keys import AUTO, read_speculation
from specdec.engine.models.model_detection import with_detected_models
from specdec.engine.models.model_resolution import resolve_models
from specdec.llm import LLM
from specdec.types.errors import InvalidValueError, ModelNotFoundError, UnsupportedModelError
from specdec.types.sampling.sampling_params import SamplingParams
from tests.specdec.heads import HEADS
from tests.specdec.llm.models import arguments
from tests.specdec.speculators import speculator_dir

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

    def test_a_tree_needs_a_method_that_drafts_trees(self, tiny_model_dir, head_dirs):
        keys = {"num_speculative_tokens": 2, "num_draft_tree_tokens": 6}
        found = detected(tiny_model_dir, {**keys, "model": str(head_dirs["medusa"])})
        assert found.speculative_config.num_draft_tree_tokens == 6
        with pytest.raises(InvalidValueError, match="it must be 0 unless method, first or"):
            detected(tiny_model_dir, {**keys, "model": str(tiny_model_dir)})

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

    def test_a_draft_model_after_a_head_that_is_detected(self, tiny_model_dir, head_dirs):
        fallback = {"method": "draft_model", "quantization": "int8"}
        keys = {"model": str(head_dirs["eagle"]), "fallback": fallback}
        found = detected(tiny_model_dir, keys)
        assert found.speculative_config.methods == ("eagle", "draft_model")
        assert found.draft_model.quantization == "int8"
        with pytest.raises(InvalidValueError, match="another method than method, since each draf"):
            detected(tiny_model_dir, {"model": str(tiny_model_dir), "fallback": fallback})

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


class TestTarget:
    @pytest.fixture
    def speculator(self, tiny_model_dir, head_dirs, tmp_path):
        """Return a function that writes an EAGLE-3 head in the layout of speculators."""

        def write(target=tiny_model_dir, num_tokens=2):
            return speculator_dir(head_dirs["eagle3"], tmp_path / "head", str(target), num_tokens)

        return write

    def test_the_head_drafts_for_the_target_that_it_names(self, speculator, tiny_model_dir):
        lines, head = [], speculator()
        found = detected(head, AUTO, lines.append)
        assert found.model == str(tiny_model_dir)
        keys = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2}
        assert found.speculative_config == read_speculation(keys)
        assert lines == [f"{head} is a head for method eagle3; its target is {tiny_model_dir}"]

    @pytest.mark.parametrize(
        ("keys", "expected"),
        [
            ({"num_speculative_tokens": 5}, {"method": "eagle3", "num_speculative_tokens": 5}),
            ({"first": "suffix"}, {"method": "eagle3", "num_speculative_tokens": 2}),
        ],
    )
    def test_other_keys_are_kept(self, speculator, keys, expected):
        head = speculator()
        found = detected(head, keys).speculative_config
        assert found == read_speculation({"model": str(head), **keys, **expected})

    def test_a_given_method_drafts_in_place_of_the_head(self, speculator, tiny_model_dir):
        for keys in (None, {"method": "ngram"}):
            found = detected(speculator(), keys)
            assert (found.model, found.head) == (str(tiny_model_dir), None)
            assert found.speculative_config == read_speculation(keys)

    def test_a_target_beside_the_head(self, speculator, tiny_model_dir, tmp_path):
        (tmp_path / "target").symlink_to(tiny_model_dir)
        assert detected(speculator("../target"), AUTO).model == str(tiny_model_dir)

    def test_an_alias_as_the_target(self, speculator):
        head = speculator("smollm2-135m-instruct")
        assert detected(head, AUTO, downloads=False).model == "smollm2-135m-instruct"

    def test_a_target_that_is_not_there(self, speculator):
        head = speculator("./no-such-model")
        with pytest.raises(ModelNotFoundError, match=r"for the target './no-such-model', which is"):
            detected(head, AUTO)

    @pytest.mark.parametrize("name", ["~no_such_user/target", "a" * 300, "./" + "a" * 300])
    def test_no_name_of_a_target_is_an_internal_error(self, speculator, name):
        """On a cluster that is joined, other nodes may have what this one does not."""
        assert detected(speculator(name), AUTO, downloads=False).model == name
        with pytest.raises(ModelNotFoundError, match="which is not available"):
            detected(speculator(name), AUTO)

    def test_a_name_that_no_file_can_have_is_refused(self, speculator):
        with pytest.raises(InvalidValueError, match="without null characters"):
            detected(speculator("a\0b"), AUTO, downloads=False)

    def test_a_model_that_names_the_one_it_was_tuned_from(self, tiny_model_dir, tmp_path):
        model = shutil.copytree(tiny_model_dir, tmp_path / "model")
        config = json.loads((model / "config.json").read_text())
        config["base_model_name_or_path"] = "org/base"
        (model / "config.json").write_text(json.dumps(config))
        assert detected(model, AUTO).model == str(model)

    def test_an_llm_of_a_speculator_writes_the_tokens_of_its_target(
        self, speculator, tiny_model_dir
    ):
        params = SamplingParams(temperature=0.8, seed=3, max_tokens=16, ignore_eos=True)
        tokens = []
        keys = {"num_speculative_tokens": 2, "policy": "threshold"}
        for model, speculation in ((speculator(), keys), (tiny_model_dir, None)):
            with LLM(**arguments(model, speculative_config=speculation)) as llm:
                [output] = llm.generate(["The river"], params, use_tqdm=False)
                tokens.append(output.outputs[0].token_ids)
        assert tokens[0] == tokens[1]
