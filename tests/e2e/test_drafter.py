"""The draft head of a running service: versions, samples for training, and the trainer."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

from cluster.cli.training import adapt
from specdec.client import AdminClient, Client, ClientError, DrafterOrder
from specdec.training.data.config import TrainingConfig
from specdec.training.data.target import Target, TargetPrecision
from specdec.training.drafters.base import drafter_class
from specdec.training.export import export
from specdec.types.sampling.sampling_params import SamplingParams
from tests.e2e.conftest import running_service

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PARAMS = SamplingParams(temperature=0.8, max_tokens=40, ignore_eos=True, seed=3)
PROMPTS = [[5 + index, 6, 7, 8 + index] * 3 for index in range(8)]


@pytest.fixture(scope="module")
def head(tiny_model_dir, tmp_path_factory):
    target = Target(tiny_model_dir, 128, TargetPrecision(kernels="torch"))
    config = TrainingConfig(method="medusa", depth=3)
    drafter = drafter_class("medusa")(target, torch.arange(target.config.vocab_size), config)
    directory = tmp_path_factory.mktemp("heads") / "head"
    export(drafter, directory, "float32", {})
    return directory


@pytest.fixture(scope="module")
def service(tiny_model_dir, head, tmp_path_factory):
    log = tmp_path_factory.mktemp("drafter") / "log"
    speculation = json.dumps({"model": str(head), "policy": "threshold"})
    flags = ["--tensor-parallel-size", "2", "--max-model-len", "512"]
    flags += ["--speculative-config", speculation, "--training-buffer-tokens", "5000"]
    with running_service(tiny_model_dir, log, *flags) as service:
        yield service


def specdec(service, *words):
    command = [sys.executable, "-m", "cluster", *words, "--address", service.grpc_address]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def generate(service, **options):
    with Client(service.grpc_address, timeout_s=60) as client:
        return [client.generate(each, PARAMS, **options) for each in PROMPTS]


def tokens(completions):
    return [each.choices[0].token_ids for each in completions]


def test_versions_change_and_tokens_do_not(service, head, tmp_path):
    expected = tokens(generate(service))
    copy = shutil.copytree(head, tmp_path / "copy")
    done = specdec(service, "drafter", "load", str(copy), "--json")
    assert done.returncode == 0, done.stderr
    [replica] = json.loads(done.stdout)["replicas"]
    assert [each["state"] for each in replica["versions"]] == ["ready", "active"]
    assert tokens(generate(service)) == expected
    with AdminClient(service.grpc_address) as admin:
        [report] = admin.drafters()
        assert report.versions[1].speculation.num_drafts > 0
        with pytest.raises(ClientError, match="not found"):
            admin.set_drafter(DrafterOrder(path=str(tmp_path / "absent")))
        [report] = admin.set_drafter(DrafterOrder(version=1))
        assert report.versions[0].state == "active"
        assert admin.status().replicas[0].report.is_ready


def test_only_answers_that_allow_it_are_trained_on(service, tmp_path, monkeypatch):
    with AdminClient(service.grpc_address) as admin:
        admin.take_samples()
        generate(service)
        generate(service, allow_training=True, cache_salt="tenant")
        assert [each.samples for each in admin.take_samples()] == [()]
        answers = tokens(generate(service, allow_training=True))
        [batch] = admin.take_samples()
    assert [list(each.token_ids) for each in batch.samples] == [
        [*prompt, *answer] for prompt, answer in zip(PROMPTS, answers, strict=True)
    ]
    generate(service, allow_training=True)
    model = service.process.cmdline()
    target = model[model.index("--model") + 1]
    monkeypatch.setattr(adapt, "run_when_idle", lambda num_threads: None)  # it would fork
    monkeypatch.setattr(adapt, "_MIN_HELD_OUT_TOKENS", 1)
    words = [target, str(tmp_path / "versions"), "--min-tokens", "100", "--num-versions", "1"]
    words += ["--interval", "0.5", "--address", service.grpc_address]
    done = CliRunner().invoke(adapt.adapt, words)
    assert done.exit_code == 0, done.stderr
    assert "8 samples: held-out acceptance length" in done.stderr
