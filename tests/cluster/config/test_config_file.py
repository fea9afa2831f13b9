"""Valid and invalid configuration files."""

import pytest

from cluster.config.config_file import read_config_file
from specdec.types.errors import InvalidValueError


def test_keys_and_values_are_not_changed(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("model: tiny\nunknown: {deep: [1, 2.5, null]}\n")
    assert read_config_file(path) == {"model": "tiny", "unknown": {"deep": [1, 2.5, None]}}


def test_an_empty_file_is_an_empty_mapping(tmp_path):
    path = tmp_path / "serve.yaml"
    path.touch()
    assert read_config_file(path) == {}


@pytest.mark.parametrize(
    ("content", "limit"),
    [
        (b"- 1\n", "a YAML mapping of settings"),
        (b"model: [\n", "a readable YAML file"),
        (b"model: \xff\n", "a readable YAML file"),
        (b"model: !!python/name:os.system\n", "a readable YAML file"),
        (None, "a readable YAML file"),
    ],
)
def test_an_invalid_file(tmp_path, content, limit):
    path = tmp_path / "serve.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidValueError) as caught:
        read_config_file(path)
    assert caught.value.field == "configuration file"
    assert caught.value.limit.startswith(limit)
    assert "\n" not in str(caught.value)
