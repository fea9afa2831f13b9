"""Drafters of the package: cards, size, and what the wheel contains."""

import json
import tomllib
from pathlib import Path

import pytest

from specdec.config.model_aliases import ALIASES
from specdec.models.drafters.card import (
    SuiteAcceptance,
    drafter_directory,
    read_acceptance,
)
from specdec.models.resolve import resolve
from specdec.models.weights.fingerprint import weights_fingerprint
from specdec.types.errors import UnsupportedModelError

ROOT = Path(__file__).parents[4]
FOLDER = ROOT / "specdec" / "models" / "drafters"
SHIPPED = [(alias, each) for alias, source in ALIASES.items() for each in source.drafters]
MAX_BYTES = 25_000_000
SUITES = {"mt_bench", "humaneval", "gsm8k"}


@pytest.mark.parametrize(("alias", "drafter"), SHIPPED, ids=lambda each: getattr(each, "name", ""))
def test_a_drafter_has_what_its_entry_promises(alias, drafter):
    directory = drafter_directory(drafter.name)
    found = read_acceptance(directory)
    assert {each.suite for each in found} >= SUITES
    assert {each.temperature for each in found} >= {0.0, 0.8}
    assert max(len(each.accepted_per_step) for each in found) <= drafter.num_speculative_tokens
    evaluation = json.loads((directory / "card.json").read_bytes())["evaluation"]
    method = drafter.method.removeprefix("colocated_")  # the same drafts in another process
    assert (evaluation["target"], evaluation["method"]) == (alias, method)
    if drafter.has_weights:
        assert (resolve(drafter.name) / "model.safetensors").is_file()
    else:
        assert [each.name for each in directory.iterdir()] == ["card.json"]


def test_every_folder_is_listed():
    folders = {each.name for each in FOLDER.iterdir() if each.is_dir()} - {"__pycache__"}
    assert folders == {drafter.name for _, drafter in SHIPPED}


def test_together_they_are_small():
    """25 MB is what a wheel may grow by for a demo."""
    assert sum(each.stat().st_size for each in FOLDER.rglob("*") if each.is_file()) <= MAX_BYTES


def test_wheel_and_images_contain_them():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = settings["package-data"]["specdec.models.drafters"]
    packed = {path for each in patterns for path in FOLDER.glob(each)}
    files = {each for each in FOLDER.glob("*/*") if each.is_file()}
    assert files - {each for each in files if each.parent.name == "__pycache__"} <= packed
    assert "!specdec" in (ROOT / ".dockerignore").read_text().split()  # the images build the wheel


@pytest.mark.model
@pytest.mark.slow
def test_the_drafters_were_made_for_the_weights_of_the_alias(smollm2_dir):
    source = ALIASES["smollm2-135m-instruct"]
    assert weights_fingerprint(smollm2_dir) == source.weights_sha256


def test_acceptance_counts_steps_without_a_draft(tmp_path):
    result = {
        "suite": "a",
        "temperature": 0.8,
        "num_steps": 20,
        "num_drafts": 10,
        "num_accepted": [8, 4],
    }
    (tmp_path / "card.json").write_text(json.dumps({"evaluation": {"results": [result]}}))
    [found] = read_acceptance(tmp_path)
    assert found == SuiteAcceptance("a", 0.8, 0.5, (0.4, 0.2))
    assert [found.expected_tokens(count) for count in (0, 1, 2, 9)] == pytest.approx(
        [1.0, 1.4, 1.6, 1.6]
    )


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{}", '{"evaluation": {"results": []}}', '{"evaluation": {"results": [{}]}}'),
        "[" * 9000,
    ],
    ids=lambda content: content[:30],
)
def test_a_card_without_an_evaluation_is_refused(content, tmp_path):
    (tmp_path / "card.json").write_text(content)
    with pytest.raises(UnsupportedModelError, match=r"card\.json has"):
        read_acceptance(tmp_path)


def test_a_name_of_no_drafter_is_not_a_folder():
    for _, drafter in SHIPPED:
        if not drafter.has_weights:
            with pytest.raises(Exception, match="not found"):
                resolve(drafter.name)
