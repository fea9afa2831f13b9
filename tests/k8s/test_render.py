"""Every object of every example and combination of values is one that an API server takes."""

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


def test_there_are_as_many_as_are_promised():
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


def test_a_field_that_kubernetes_does_not_know_is_found():
    service = only(render(), "RayService")
    container = ray_templates([service])["head"]["spec"]["containers"][0]
    container["portz"] = []
    with pytest.raises(jsonschema.ValidationError, match="portz"):
        check(service)


def test_a_long_release_name_still_gives_names_that_kuberay_does_not_cut():
    objects = render(name="a" * 53)
    assert max(len(each["metadata"]["name"]) for each in objects) <= 63
    [service] = [each for each in objects if each["kind"] == "RayService"]
    assert len(service["spec"]["serveService"]["metadata"]["name"]) <= 50


def test_notes_say_how_to_call_it():
    for name in ("laptop", "several-models", "no keys", "sidecar", "no network policy"):
        notes = render(CASES[name], notes=True)
        assert "/v1/chat/completions" in notes
        assert "helm test demo --namespace llm" in notes
        assert "<no value>" not in notes
