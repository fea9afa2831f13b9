"""Lines of `vllm serve` from documents, as they are pasted."""

import shlex

import pytest
from click.testing import CliRunner

from cluster.cli import main
from tests.cluster.cli.test_serve import guard, served

__all__ = ["guard", "served"]

MODEL = "facebook/opt-6.7b"


def run(line):
    return CliRunner().invoke(main.main, shlex.split(line)[1:])


SPECULATION = """'{"model": "facebook/opt-125m", "num_speculative_tokens": 5}'"""


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ("--seed 42 -tp 1", {"seed": 42}),
        ("--disable-log-stats", {}),
        ("--no-disable-log-stats --metric-aliases vllm", {"metric_aliases": "vllm"}),
        ("--chat-template {template}", {"chat_template": "{template}"}),
        (
            "--host 127.0.0.1 --port 8000 --seed 42 --gpu_memory_utilization 0.8 "
            f"--speculative_config {SPECULATION}",
            {"seed": 42, "http_port": 8000},
        ),
    ],
)
def test_a_line_of_vllm_is_served(flags, settings, served, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    result = run(f"vllm serve {MODEL} " + flags.replace("{template}", str(template)))
    assert result.exit_code == 0, result.stderr
    [config] = served
    assert config.model == MODEL
    for name, value in settings.items():
        expected = template if value == "{template}" else value
        assert getattr(config, name) == expected


def test_a_missing_template_is_named(served):
    result = run(f"vllm serve {MODEL} --chat-template ./absent.jinja")
    assert "chat_template is" in result.stderr
    assert served == []
