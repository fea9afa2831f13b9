"""Tests that the chart's files derive from its typed values, and those from the service."""

import json
import re
import tomllib
from collections import defaultdict
from importlib import import_module
from itertools import product

import jsonschema
import pytest
import yaml

pytest.importorskip("helm_python", reason="needs helm-python-sdk: pip install -e '.[dev]'")

from cluster.config.serve_config import ServeConfig
from specdec.types.errors import InvalidValueError
from tests.k8s.rendering import CHART, ROOT, parsed, render, serve_config
from tests.k8s.validity import check
from tests.k8s.value_sets import AUTOSCALER, GATEWAY, GPU, KEDA, SECOND, with_model
from tools.chart.__main__ import main
from tools.chart.files import CHART as CHART_IN_ROOT
from tools.chart.files import MANIFESTS, generated_files
from tools.chart.serve_settings import (
    CHART_SETTINGS,
    STANDALONE_SETTINGS,
    settings_schema,
    speculation_schema,
)
from tools.chart.values import ChartValues
from tools.generated_files import changed_files, write_files
from tools.monitoring.files import DASHBOARD, RULES

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = (CHART / "values.yaml").read_text()
QUANTIZATION = ServeConfig.settings()["quantization"].limit


def test_the_generated_files_are_up_to_date():
    assert changed_files(generated_files(ROOT)) == []


def test_a_file_that_was_edited_by_hand_is_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    write_files(generated_files(tmp_path))
    assert main(["check"]) == 0
    edited = tmp_path / CHART_IN_ROOT / "values.yaml"
    edited.write_text(edited.read_text().replace("drainSeconds: 30", "drainSeconds: 20"))
    assert main(["check"]) == 1
    assert "values.yaml" in capsys.readouterr().err
    assert main(["write"]) == 2


def test_alerts_and_dashboard_equal_those_of_deploy():
    for name, source in (("rules.yaml", RULES), ("dashboard.json", DASHBOARD)):
        assert (CHART / "files" / name).read_bytes() == (ROOT / "deploy" / source).read_bytes()


def test_the_chart_has_the_projects_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == project["version"]


def models(of=ChartValues, seen=None):
    """Return every class of values that `of` contains, and itself."""
    seen = set() if seen is None else seen
    if of in seen:
        return seen
    seen.add(of)
    for field in of.model_fields.values():
        for module, name in re.findall(r"(tools\.chart\.\w+)\.(\w+)", repr(field.annotation)):
            model = getattr(import_module(module), name)
            models(model, seen)
    return seen


def test_every_value_is_documented():
    fields = [
        (of.__name__, name, field) for of in models() for name, field in of.model_fields.items()
    ]
    assert len(fields) > 150
    assert [(of, name) for of, name, field in fields if not field.description] == []


def test_every_mapping_of_values_rejects_unknown_keys():
    for name, schema in SCHEMA["$defs"].items():
        assert schema["additionalProperties"] is False, name
    assert SCHEMA["additionalProperties"] is False


def test_values_yaml_passes_the_schema_and_equals_the_defaults_in_code():
    values = yaml.safe_load(VALUES)
    jsonschema.validate(values, SCHEMA)
    assert values == json.loads(ChartValues().model_dump_json(by_alias=True))


def test_a_models_settings_are_those_of_the_service():
    allowed = set(settings_schema()["properties"])
    excluded = {*CHART_SETTINGS, *STANDALONE_SETTINGS}
    assert allowed | excluded == set(ServeConfig.settings())
    assert not allowed & excluded


PROBES = (-1, 0, 1, 2, 0.5, 1.5, 4096, 4097, 10**7, 2**24 + 1, True, False, "", "text", "bfloat16")
FORMS = ({"rope_theta": 1e6}, '{"rope_theta": 1e6}', ["a"])


@pytest.mark.parametrize("name", settings_schema()["properties"])
def test_the_schema_accepts_every_value_that_the_service_accepts(name):
    """The service may reject more values, such as URLs; for numbers both accept the same."""
    schema, limit = settings_schema()["properties"][name], ServeConfig.settings()[name].limit
    validator = jsonschema.Draft7Validator(schema)
    for probe in (*PROBES, *FORMS):
        if limit.accepts(probe):
            assert validator.is_valid(probe), probe
    numbers = [probe for probe in PROBES if type(probe) in (int, float)]
    if limit.kind in (int, float):
        assert [number for number in numbers if validator.is_valid(number)] == [
            number for number in numbers if limit.accepts(number)
        ]


@pytest.mark.parametrize(
    ("value", "is_valid"),
    [
        ("auto", True),
        ("none", True),
        ("on", False),
        ({"method": "ngram", "num_speculative_tokens": 3}, True),
        ({"num_speculative_tokens": 33}, False),
        ({"num_speculative_tokens_per_batch_size": [[1, 4, 5]]}, True),
        ({"acceptance_threshold": "strict"}, True),
        ({"acceptance_threshold": 0.5}, True),
        ({"acceptance_threshold": "high"}, False),
        ({"method": "eagle3", "fallback": {"method": "draft_model", "model": "org/small"}}, True),
        ({"first": "suffix"}, True),
        ({"first": 1}, False),
        ({"first": {"method": "eagle9"}}, False),
        ({"fallback": {"metod": "ngram"}}, False),
        ({"fallback": {"method": "ngram", "promt_lookup_max": 3}}, False),
        ({"fallback": {"method": "ngram", "prompt_lookup_max": "3"}}, False),
        ({"method": "eagle9"}, False),
        ({"num_speculative_tokens": "3"}, False),
        ({"tokens": 3}, False),
    ],
)
def test_the_schema_validates_speculative_config(value, is_valid):
    assert jsonschema.Draft7Validator(speculation_schema()).is_valid(value) is is_valid


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lora_modules", {"sql": "/models/sql"}),
        ("lora_modules", ["sql=/models/sql"]),
        ("lora_modules", "sql=/models/sql"),
        ("hf_overrides", {"rope_theta": 1e6}),
        ("hf_overrides", '{"rope_theta": 1e6}'),
    ],
)
def test_a_setting_is_in_the_forms_of_a_configuration_file(name, value):
    settings = {"enable_lora": True, name: value}
    ServeConfig.from_sources(settings)
    [application] = serve_config(render(with_model(settings=settings)))["applications"]
    assert application["args"][name] == value


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "draft",
    [
        lambda keys: {"method": "draft_model", **keys},
        lambda keys: {"method": "suffix", "fallback": "draft_model", **keys},
        lambda keys: {"method": "ngram", "fallback": {"method": "draft_model", **keys}},
    ],
)
def test_a_draft_model_of_any_role_needs_its_gpus(draft, ranks):
    config = draft({"model": "org/small", "draft_tensor_parallel_size": ranks})
    values = {**with_model(speculativeConfig=config), "workerGroups": {"target": GPU}}
    with pytest.raises(Exception, match=rf"the models need {1 + ranks} GPUs|: {ranks} ranks need"):
        render(values)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_chart_accepts_a_quantization_where_the_service_does(device):
    """The accepted ones are those of the models of one release, which an error names."""
    accepted, groups = [], {**AUTOSCALER, "workerGroups": {"target": {**GPU, "maxReplicas": 100}}}
    options = ServeConfig.settings()["kernels"].limit.options
    for quantization, kernels in product(QUANTIZATION.options, options):
        settings = {"quantization": quantization, "kernels": kernels}
        model = {**SECOND, "name": f"{quantization}-{kernels}", "settings": settings}
        try:
            ServeConfig.from_sources({**settings, "device": device})
        except InvalidValueError as error:
            if error.field == "quantization":  # of other combinations the service rejects more
                with pytest.raises(Exception, match=r"settings\.quantization: "):
                    render({"models": [{**model, "device": device}], **groups})
        else:
            accepted.append({**model, "device": device})
    render({"models": accepted, **groups})


def referenced_names(content):
    """Return the names of secrets and priority classes that a manifest refers to, at any depth."""
    if isinstance(content, list):
        return set().union(*map(referenced_names, content))
    if not isinstance(content, dict):
        return set()
    found = {each["name"] for each in content.get("imagePullSecrets", [])}
    found |= {each["name"] for each in content.get("certificateRefs", [])}
    found |= {content[key] for key in ("secretName", "priorityClassName") if key in content}
    return found.union(*map(referenced_names, content.values()))


def introduction(manifest):
    """Return the comment before the objects."""
    return manifest.read_text().partition("---")[0]


@pytest.mark.parametrize("path", sorted((ROOT / MANIFESTS).glob("*.yaml")), ids=lambda p: p.stem)
def test_a_manifest_begins_with_its_prerequisites(path):
    objects = parsed(path.read_text())
    created = {item["spec"]["secretName"] for item in objects if item["kind"] == "Certificate"}
    commands = [line for line in introduction(path).splitlines() if "kubectl" in line]
    words = {word for line in commands for word in line.split()}
    required = referenced_names(objects) - created
    assert {"specdec-api-keys", "llm-api-keys"} & required
    assert required <= words
    assert not created & words
    assert len(set(commands)) == len(commands)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("two-gpus", "-n specdec create secret generic hugging-face --from-file=token\n"),
        ("air-gapped", "-n specdec create secret generic llm-api-keys --from-file=api-keys.yaml\n"),
        ("air-gapped", "-n specdec create secret docker-registry registry --from-file="),
        ("two-nodes", "-n specdec create secret tls llm-tls --cert=tls.crt --key=tls.key\n"),
        ("several-models", "create priorityclass placeholder --value=-10\n"),
        ("several-models", "get clusterissuer letsencrypt\n"),
    ],
)
def test_the_prerequisites_of_each_kind_have_a_command(name, command):
    assert f"#   kubectl {command}" in introduction(ROOT / MANIFESTS / f"{name}.yaml")


def test_manifests_are_valid_and_contain_no_secret():
    paths = sorted((ROOT / MANIFESTS).glob("*.yaml"))
    assert len(paths) >= 6
    for path in paths:
        objects = parsed(path.read_text())
        assert objects[0]["kind"] == "Namespace"
        kinds = {each["kind"] for each in objects}
        assert "RayService" in kinds
        assert "Secret" not in kinds
        for each in objects:
            check(each)
        assert "helm.sh" not in path.read_text()


ALL_OBJECTS = {
    **GATEWAY,
    "head": {"schedulable": True},
    "ingress": {"enabled": True, "host": "a.b", "grpcHost": "c.d"},
    "monitoring": {name: {"enabled": True} for name in ("serviceMonitor", "rules", "dashboard")},
    "workerGroups": {"draft": {"enabled": True}},
    "keda": KEDA,
    "endpointPicker": {
        "enabled": True,
        "slo": "ttft:2000 tpot:40",
        "scaledObject": {"enabled": True, "name": "pool"},
    },
}


FEW_OBJECTS = {
    name: each for name, each in ALL_OBJECTS.items() if name not in ("keda", "endpointPicker")
}
"""Those that need no group of a name."""


def paths(values, path=()):
    """Return the paths of all values, those of mappings before those below."""
    below = (paths(each, (*path, key)) for key, each in values.items() if isinstance(each, dict))
    return [(*path, key) for key in values] + [each for group in below for each in group]


def value_at(values, path):
    for key in path:
        values = values[key]
    return values


def with_value(values, path, value):
    """Return a copy of values with one replaced."""
    key, *rest = path
    return {**values, key: with_value(values.get(key) or {}, rest, value) if rest else value}


DEFAULTS = yaml.safe_load(VALUES)
PATHS = paths(DEFAULTS)
REJECTED = {
    **dict.fromkeys(
        (
            *("auth", "auth.apiKeys", "auth.adminToken", "networkPolicy", "security"),
            *("security.podSecurityContext", "security.containerSecurityContext"),
        ),
        "must not be null",
    ),
    **dict.fromkeys(("models", "gatewayApi.parentRefs", "gatewayApi.grpcHostnames"), ""),
}


def rendered(values):
    """Return the objects without the secrets, which are random."""
    return [each for each in render(values) if each["kind"] != "Secret"]


def switches(path):
    """Return what turns a mapping of values off."""
    return [each for each in ("enabled", "create") if each in value_at(DEFAULTS, path)]


NULLABLE = [path for path in PATHS if isinstance(value_at(DEFAULTS, path), dict | list)]
"""A key without a value is null in YAML, and Helm then removes its default."""

ACCEPTED = [path for path in NULLABLE if ".".join(path) not in REJECTED]


def base_of(path):
    return FEW_OBJECTS if path[0] == "workerGroups" else ALL_OBJECTS


@pytest.mark.parametrize("name", REJECTED)
def test_a_mapping_or_list_that_is_null_is_rejected_with_its_name(name):
    path = tuple(name.split("."))
    assert path in NULLABLE
    with pytest.raises(Exception, match=rf"{name}[^:]*: {REJECTED[name]}"):
        render(with_value(ALL_OBJECTS, path, None))


@pytest.mark.parametrize("path", [*filter(switches, ACCEPTED)], ids=".".join)
def test_a_mapping_that_is_null_is_off(path):
    base = base_of(path)
    objects = rendered(with_value(base, path, None))
    if base is ALL_OBJECTS:
        off = with_value(base, path, dict.fromkeys(switches(path), False))
        assert objects == rendered(off)


def groups_of_nulls():
    """Return lists of at most ten paths that may be null at once, none of which is in another."""
    groups = defaultdict(list)
    for path in ACCEPTED:
        if not switches(path):
            groups[path[0] == "workerGroups", len(path)].append(path)
    return [each[at : at + 10] for each in groups.values() for at in range(0, len(each), 10)]


@pytest.mark.parametrize("group", groups_of_nulls(), ids=lambda group: ".".join(group[0]))
def test_mappings_and_lists_that_are_null_are_empty(group):
    values = base_of(group[0])
    for path in group:
        values = with_value(values, path, None)
    assert rendered(values)


def is_section(path):
    """Return whether the schema lists the keys of a mapping, whose defaults Helm would remove."""
    schema = SCHEMA
    for key in path:
        schema = schema.get("properties", {}).get(key, {})
        schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    return schema.get("additionalProperties") is False


def test_a_scalar_that_is_null_is_its_default():
    given = paths(ALL_OBJECTS)
    nulls = [
        path
        for path in PATHS
        if not isinstance(value_at(DEFAULTS, path), dict | list)
        and path[-1] not in ("enabled", "create", "mountPath")  # the last is required
        and path not in given
        and is_section(path[:-1])  # not in workerGroups, which are named by the user
    ]
    assert len(nulls) > 80
    values = ALL_OBJECTS
    for path in nulls:
        values = with_value(values, path, None)
    assert rendered(values) == rendered(ALL_OBJECTS)
