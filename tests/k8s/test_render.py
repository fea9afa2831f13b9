"""Tests that every example and combination of values renders valid objects."""

import jsonschema
import pytest
import yaml

from tests.k8s.rendering import EXAMPLES, only, ray_templates, render
from tests.k8s.validity import NEWEST, OLDEST, check
from tests.k8s.value_sets import VALUE_SETS

CASES = {
    **{path.stem: yaml.safe_load(path.read_text()) for path in EXAMPLES},
    **VALUE_SETS,
}


def test_the_number_of_examples_is_as_documented():
    assert len(EXAMPLES) >= 6
    assert len(VALUE_SETS) >= 40


@pytest.mark.parametrize("name", CASES)
def test_every_object_is_valid(name):
    objects = render(CASES[name])
    assert objects
    for each in objects:
        check(each, OLDEST)
        check(each, NEWEST)
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(set(names)) == len(names)
    assert {each["metadata"]["namespace"] for each in objects} == {"llm"}
    assert all(len(each) <= 63 for _, each in names)


def test_an_unknown_field_is_detected():
    service = only(render(), "RayService")
    container = ray_templates([service])["head"]["spec"]["containers"][0]
    container["portz"] = []
    with pytest.raises(jsonschema.ValidationError, match="portz"):
        check(service)


def test_notes_contain_example_requests():
    for name in ("laptop", "several-models", "no keys", "sidecar", "no network policy"):
        notes = render(CASES[name], notes=True)
        assert "/v1/chat/completions" in notes
        assert "helm test demo --namespace llm" in notes
        assert "<no value>" not in notes
