"""Resolution of models, and which draft models a target accepts."""

import json
import shutil
from dataclasses import replace

import pytest

from specdec.config.llm import LLMConfig
from specdec.config.model_aliases import ALIASES
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.models import model_resolution
from specdec.engine.models.model_resolution import (
    ModelDirectories,
    resolve_models,
    with_resolved_dtype,
)
from specdec.models import resolve as models_resolve
from specdec.models.weights.fingerprint import weights_fingerprint
from specdec.types.errors import InvalidValueError, UnsupportedModelError
from tests.specdec.heads import fitted_medusa_dir
from tests.specdec.tiny import renamed_dtype_dir, tiny_llama_dir


def resolved(target, draft):
    config = LLMConfig(
        model=str(target),
        speculative_config=SpeculativeConfig.of("draft_model", model=draft and str(draft)),
    )
    return resolve_models(config, lambda line: None)


def test_the_target_drafts_for_itself_unless_another_is_named(tiny_model_dir):
    assert resolved(tiny_model_dir, None).draft == tiny_model_dir


@pytest.mark.parametrize("method", ["medusa", "draft_model"])
def test_a_drafter_of_the_package_needs_the_weights_that_it_was_made_for(
    method, tiny_model_dir, tmp_path, monkeypatch
):
    files = {
        "medusa": lambda: fitted_medusa_dir(tiny_model_dir, tmp_path, [list(range(3, 30))]),
        "draft_model": lambda: tiny_llama_dir(tmp_path, hidden=36, heads=3, kv_heads=1),
    }
    directory = files[method]()
    monkeypatch.setattr(models_resolve, "drafter_directory", lambda name: directory)
    sha256 = weights_fingerprint(tiny_model_dir)
    for each in (sha256, "0" * 64):
        source = replace(ALIASES["smollm2-135m-instruct"], weights_sha256=each)
        monkeypatch.setattr(model_resolution, "ALIASES", {"tiny": source})
        for module in (model_resolution, models_resolve):
            monkeypatch.setattr(module, "TARGETS_OF_DRAFTERS", {"tiny-drafter": "tiny"})
        keys = SpeculativeConfig.of(method, model="tiny-drafter")
        config = LLMConfig(model=str(tiny_model_dir), speculative_config=keys)
        if each == sha256:
            lines = []
            found = resolve_models(config, lines.append)
            assert directory in (found.head, found.draft)
            assert lines == []
        else:
            with pytest.raises(InvalidValueError, match="this one was made for tiny"):
                resolve_models(config, lambda line: None)


@pytest.mark.parametrize("vocab", [383, 420])
def test_a_draft_may_have_another_vocabulary(tiny_model_dir, tmp_path, vocab):
    draft = tiny_llama_dir(tmp_path, vocab=vocab, hidden=36, heads=3, kv_heads=1)
    assert resolved(tiny_model_dir, draft).draft == draft


def test_a_draft_with_too_few_shared_tokens_is_rejected(tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("specdec.text.vocab_map.MIN_SHARED_PART", 1.01)
    draft = tiny_llama_dir(tmp_path, vocab=420, hidden=36, heads=3, kv_heads=1)
    with pytest.raises(InvalidValueError, match=r"speculative_config.model is .*shares 100%"):
        resolved(tiny_model_dir, draft)


def resolved_head(target, head, method, progress=lambda line: None):
    speculation = SpeculativeConfig.of(method, model=str(head))
    return resolve_models(LLMConfig(model=str(target), speculative_config=speculation), progress)


def test_a_head_is_reported_as_what_its_files_are(tiny_model_dir, tmp_path):
    lines = []
    text = list(range(3, 30))
    head = fitted_medusa_dir(tiny_model_dir, tmp_path, [text])
    directories = resolved_head(tiny_model_dir, head, "medusa", lines.append)
    assert directories == ModelDirectories(tiny_model_dir, None, head, head_method="medusa")
    assert lines[0].startswith(f"head {head}: taken for Medusa (vLLM): 5 heads of 1 layers")
    assert directories.configs().head.max_draft_tokens == 5


def test_a_head_is_checked_against_the_overridden_model(tiny_model_dir, tmp_path):
    """The file alone has an activation that no model has."""
    head = fitted_medusa_dir(tiny_model_dir, tmp_path / "head", [list(range(3, 30))])
    target = shutil.copytree(tiny_model_dir, tmp_path / "target")
    raw = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(raw | {"hidden_act": "unknown"}))
    config = LLMConfig(
        model=str(target),
        speculative_config=SpeculativeConfig.of("medusa", model=str(head)),
        hf_overrides={"hidden_act": "silu"},
    )
    assert resolve_models(config, lambda line: None).head == head
    with pytest.raises(UnsupportedModelError, match="hidden_act"):
        resolve_models(replace(config, hf_overrides=None), lambda line: None)


def test_a_draft_model_beside_a_head(tiny_model_dir, tmp_path):
    head = fitted_medusa_dir(tiny_model_dir, tmp_path, [list(range(3, 30))])
    keys = {"method": "medusa", "model": str(head)}
    fallback = {"method": "draft_model", "quantization": "w8a8"}
    speculation = SpeculativeConfig.of(**keys, fallback=fallback)
    config = LLMConfig(model=str(tiny_model_dir), speculative_config=speculation)
    directories = resolve_models(config, lambda line: None)
    assert directories == ModelDirectories(
        tiny_model_dir, tiny_model_dir, head, head_method="medusa"
    )
    with pytest.raises(
        InvalidValueError,
        match="quantization is 'w8a8'; it must be left out, int8 or int",
    ):
        LLMConfig(device="cuda", speculative_config=speculation)


def test_a_head_of_another_method_is_rejected(tiny_model_dir, tmp_path):
    head = fitted_medusa_dir(tiny_model_dir, tmp_path, [list(range(3, 30))])
    with pytest.raises(InvalidValueError, match=r"method is 'mlp_speculator'; it must be medusa: "):
        resolved_head(tiny_model_dir, head, "mlp_speculator")


def settled(model_dir, to, names, dtype="auto"):
    """names: what config.json has for data types."""
    directories = ModelDirectories(renamed_dtype_dir(model_dir, to / "model", **names), None)
    return with_resolved_dtype(LLMConfig(dtype=dtype), directories.configs()).dtype


@pytest.mark.parametrize(
    ("names", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "float32", "torch_dtype": "float16"}, "float32"),
        ({"dtype": None}, "float32"),
        ({}, "float32"),
    ],
)
def test_auto_is_the_dtype_of_the_checkpoint(tiny_model_dir, tmp_path, names, dtype):
    assert settled(tiny_model_dir, tmp_path, names) == dtype


def test_an_explicit_dtype_overrides_the_checkpoints(tiny_model_dir, tmp_path):
    assert settled(tiny_model_dir, tmp_path, {"dtype": "float64"}, "float16") == "float16"


def test_an_unsupported_checkpoint_dtype_is_rejected(tiny_model_dir, tmp_path):
    with pytest.raises(InvalidValueError, match=r"dtype is 'auto'.* config.json has float64"):
        settled(tiny_model_dir, tmp_path, {"dtype": "float64"})
