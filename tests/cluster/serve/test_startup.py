# Modules: cluster.serve.start_errors
"""The checks of `specdec serve` before it starts Ray, and the message when it is ready."""

import json
import re
import socket
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from ray import serve

from cluster.config.serve_config import ServeConfig
from cluster.control.store import ControlStore, StoredSpeculation
from cluster.serve import start_errors, startup
from cluster.serve.first_command import command_name
from cluster.serve.ray_session import Listening, RaySession
from cluster.serve.start_errors import (
    InterruptedStartError,
    RefusedStartError,
    StartupError,
    refusing_repeatable,
    wait_until_running,
)
from cluster.serve.startup import (
    ServedModel,
    _access,
    _check_resources,
    _ready_message,
    deploy,
    running_service,
)
from cluster.workers.ray.resources import LocatedModels
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.models.model_resolution import ModelDirectories, Models
from specdec.llm import drafter_choice
from specdec.models.config.model_config import ModelConfig
from specdec.types.errors import (
    InvalidValueError,
    ModelNotFoundError,
    OutOfMemoryError,
    TargetFailedError,
)
from tests.e2e.conftest import free_ports
from tests.specdec.heads import fitted_medusa_dir
from tests.specdec.llm.shipped import DRAFTERS, HEAD, measured_speeds, shipped_aliases
from tests.specdec.tiny import renamed_dtype_dir


@pytest.fixture
def lines():
    """Return the list of lines that the service has reported."""
    return []


@pytest.fixture
def start(monkeypatch, tmp_path, lines):
    """Return a function that starts the service up to the start of Ray."""
    monkeypatch.setattr(RaySession, "start", lambda session: pytest.fail("Ray started"))

    def start(**settings):
        grpc_port, http_port = free_ports(2)
        ports = {"grpc_port": grpc_port, "http_port": http_port}
        settings = {"state_dir": tmp_path / "state"} | ports | settings
        with running_service(ServeConfig(**settings), lines.append):
            pass

    return start


@pytest.mark.parametrize("setting", ["grpc_port", "http_port"])
def test_a_port_in_use(start, setting):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = rf"cannot listen on 127.0.0.1:{port} \({setting}\): address already in use"
        with pytest.raises(StartupError, match=message):
            start(**{setting: port})


def test_a_host_of_another_machine(start):
    for host, address in (("203.0.113.7", "203.0.113.7"), ("2001:db8::1", "[2001:db8::1]")):
        with pytest.raises(StartupError, match=rf"cannot listen on {re.escape(address)}:\d+ "):
            start(host=host)


def test_a_missing_model(start):
    with pytest.raises(ModelNotFoundError):
        start(model="./no-such-model")


def test_more_ranks_than_cores(start, tiny_model_dir):
    with pytest.raises(InvalidValueError, match="tensor_parallel_size is 900"):
        start(model=str(tiny_model_dir), tensor_parallel_size=900)


def test_more_memory_than_is_available(start, tiny_model_dir):
    with pytest.raises(OutOfMemoryError, match="GiB are free"):
        start(model=str(tiny_model_dir), kv_cache_memory_gib=100_000.0)


def test_a_checkpoint_of_an_unsupported_dtype(start, tiny_model_dir, tmp_path):
    model = renamed_dtype_dir(tiny_model_dir, tmp_path / "model", dtype="float64")
    with pytest.raises(InvalidValueError, match=r"dtype is 'auto'.* config.json has float64"):
        start(model=str(model), dtype="auto")


class RayWouldStartError(Exception):
    """All checks have passed."""


def test_speculation_overrides_are_reported(start, lines, monkeypatch, tiny_model_dir, tmp_path):
    def stop(session):
        raise RayWouldStartError

    monkeypatch.setattr(RaySession, "start", stop)
    served = {"model": str(tiny_model_dir), "served_model_name": "tiny"}
    with pytest.raises(RayWouldStartError):
        start(**served)
    assert not any(line.startswith("speculation") for line in lines)
    stored = StoredSpeculation(1, {"mode": "off", "threshold": 4}, 1000.5, "ann@host", "a test")
    assert ControlStore(tmp_path / "state", "tiny").replace(stored, {})
    with pytest.raises(RayWouldStartError):
        start(**served)
    line = "speculation overrides by ann@host: mode off, threshold 4; "
    assert line + f"reset with `{command_name()} speculation reset`" in lines


def test_a_head_is_served_with_the_target_that_it_names(
    start, lines, monkeypatch, tiny_model_dir, tmp_path
):
    def stop(session):
        raise RayWouldStartError

    head = fitted_medusa_dir(tiny_model_dir, tmp_path / "head", [list(range(3, 30))])
    config = json.loads((head / "config.json").read_text())
    config["base_model_name_or_path"] = str(tiny_model_dir)
    (head / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(RaySession, "start", stop)
    with pytest.raises(RayWouldStartError):
        start(model=str(head), served_model_name="tiny")
    assert f"{head} is a head for method medusa; its target is {tiny_model_dir}" in lines
    assert any(line.startswith(f"head {head}: taken for Medusa") for line in lines)


def test_auto_serves_the_fastest_drafter_of_an_alias(
    start, lines, monkeypatch, tiny_model_dir, tmp_path
):
    def resolve_models(config, report):
        served.append(config.speculative_config)
        return ModelDirectories(tiny_model_dir, None)

    def stop(session):
        raise RayWouldStartError

    served = []
    shipped_aliases(tiny_model_dir, tmp_path, monkeypatch, (*DRAFTERS, HEAD))
    monkeypatch.setattr(drafter_choice, "measure_in_process", measured_speeds)
    monkeypatch.setattr(startup, "with_detected_models", lambda config, report: config)
    monkeypatch.setattr(startup, "resolve_models", resolve_models)
    monkeypatch.setattr(RaySession, "start", stop)
    with pytest.raises(RayWouldStartError):
        start(model="tiny")
    assert [each.method for each in served] == ["medusa"]
    expected = "drafter tiny-head: 1.30 times the speed without drafts, 130 tokens/s expected of"
    assert f"{expected} one stream" in lines


def test_a_fault_of_the_target_is_found_before_drafters_are_measured(
    start, monkeypatch, tiny_model_dir, tmp_path
):
    shipped_aliases(tiny_model_dir, tmp_path, monkeypatch, (*DRAFTERS, HEAD))
    monkeypatch.setattr(drafter_choice, "measure_in_process", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr(startup, "with_detected_models", lambda config, report: config)
    for settings in ({"max_model_len": 513}, {"kv_cache_memory_gib": 1e5}, {"device": "cuda"}):
        with pytest.raises((InvalidValueError, OutOfMemoryError)):
            start(model="tiny", **settings)


@pytest.mark.parametrize(
    ("num_seats", "raised"),
    [(2, nullcontext()), (64, pytest.raises(OutOfMemoryError, match="seats"))],
)
def test_draft_workers_whose_gpu_is_too_small_for_their_seats(
    monkeypatch, tiny_model_dir, num_seats, raised
):
    """They have separate GPUs, in whose memory a plan without seats fits."""
    monkeypatch.setattr(startup, "check_ranks", lambda *arguments: None)
    model = ModelConfig.from_directory(tiny_model_dir)
    model = replace(model, max_position_embeddings=2**17)
    config = ServeConfig(
        device="cuda",
        dtype="float32",
        num_replicas=num_seats,
        replicas_per_draft_worker=num_seats,
        ingress="serve",
        speculative_config=SpeculativeConfig.of("draft_model", model="/models/small"),
    )
    with raised:
        _check_resources(config, SimpleNamespace(configs=lambda: Models(model, model)), 4 * 2**30)


def test_the_access_to_each_model_is_summarized(tmp_path, monkeypatch):
    for name in ("SPECDEC_API_KEYS", "SPECDEC_ADMIN_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    keys = tmp_path / "keys.yaml"
    keys.write_text("- {name: ann, key: sk-battery-staple}\n")
    free, closed = (
        ServeConfig(served_model_name="a"),
        ServeConfig(served_model_name="b", api_key_file=keys),
    )
    assert _access([free, free]) == (
        "access: every client may generate and change settings; health and metrics are open"
    )
    assert _access([closed]) == (
        "access: generation, dashboard and changes need an API key; health and metrics are open"
    )
    both = _access([free, closed])
    assert "a: every client may generate" in both
    assert "b: generation, dashboard and changes need an API key" in both
    monkeypatch.setenv("SPECDEC_ADMIN_TOKEN", "correct-horse-battery")
    assert "dashboard and changes need the admin token" in _access([closed])


def test_an_invalid_state_directory(start, tiny_model_dir, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InvalidValueError, match=r"state_dir is .*file/state"):
        start(model=str(tiny_model_dir), state_dir=tmp_path / "file" / "state")


@pytest.mark.parametrize("setting", ["state_dir", "profile_dir"])
def test_an_unusable_directory_ends_the_start_before_drafters_are_measured(
    start, tiny_model_dir, tmp_path, monkeypatch, setting
):
    monkeypatch.setattr(startup, "with_detected_models", lambda *_: pytest.fail("reads models"))
    (tmp_path / "file").touch()
    with pytest.raises(InvalidValueError, match=rf"{setting} is .*file/x.*Not a directory"):
        start(model=str(tiny_model_dir), **{setting: tmp_path / "file" / "x"})


@pytest.mark.parametrize(("host", "called"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]")])
def test_the_suggested_command_calls_the_loopback_of_every_interface(host, called):
    config, listening = ServeConfig(served_model_name="a"), Listening(host, 9100, 8100)
    message = _ready_message([config], listening, "/", elapsed_s=1.0)
    assert f"generate --address {called}:9100 " in message
    message = _ready_message([config], listening, "/a", elapsed_s=1.0)
    assert f"curl http://{called}:8100/a/v1/models" in message


@pytest.fixture
def deployed(monkeypatch):
    """Return a function that deploys models beside running applications with these prefixes.

    It returns the ready message and the prefixes of the models.
    """

    def deployed(*names, **running):
        monkeypatch.setattr(startup, "route_prefixes", lambda: running)
        configs = [ServeConfig(served_model_name=name, ingress="serve") for name in names]
        routes = deploy([ServedModel(config) for config in configs])
        listening, prefix = Listening("10.0.0.1", 9100, 8100), routes[names[0]]
        return _ready_message(configs, listening, prefix, elapsed_s=1.0), list(routes.values())

    running = SimpleNamespace(applications=defaultdict(lambda: SimpleNamespace(status="RUNNING")))
    monkeypatch.setattr(serve, "run_many", lambda targets, **_: None)
    monkeypatch.setattr(serve, "status", lambda: running)
    return deployed


def test_the_first_of_several_models_has_the_root(deployed):
    message, routes = deployed("a", "b")
    assert routes == ["/", "/b"]
    assert "a, b are ready" in message
    assert "http://10.0.0.1:8100/v1 (OpenAI API), /health" in message
    assert "http://10.0.0.1:8100/dashboard" in message
    assert f"{command_name()} generate --address 10.0.0.1:9100" in message


def test_beside_another_application_the_message_has_prefix_and_name(deployed):
    message, routes = deployed("a", other="/")
    assert routes == ["/a"]
    assert "10.0.0.1:9100, model a (" in message
    assert "http://10.0.0.1:8100/a/dashboard" in message
    assert "curl http://10.0.0.1:8100/a/v1/models" in message


def started(monkeypatch, *statuses):
    """Deploy a model whose application has these statuses and messages, one after the other."""
    each = iter(statuses)

    def status():
        status, *messages = next(each)
        deployments = {str(i): SimpleNamespace(message=text) for i, text in enumerate(messages)}
        found = SimpleNamespace(status=status, message="", deployments=deployments)
        return SimpleNamespace(applications={"a": found})

    monkeypatch.setattr(startup, "route_prefixes", dict)
    monkeypatch.setattr(start_errors, "_POLL_S", 0.0)
    monkeypatch.setattr(serve, "run_many", lambda targets, **_: None)
    monkeypatch.setattr(serve, "status", status)
    return deploy([ServedModel(ServeConfig(served_model_name="a"))])


def test_a_start_that_would_fail_again_is_not_retried(monkeypatch):
    trace = f"Traceback:\n  File x\ncluster.RefusedStartError: {RefusedStartError('no head')}"
    with pytest.raises(StartupError, match=r"^no head$") as raised:
        started(monkeypatch, ("DEPLOYING",), ("DEPLOYING", f"Retrying 2 more times. {trace}\n"))
    assert not isinstance(raised.value, InterruptedStartError)


def test_other_starts_are_retried_by_serve(monkeypatch):
    lost = "Traceback:\nTargetFailedError: rank 0 of the target ended"
    assert started(monkeypatch, ("DEPLOYING", lost), ("RUNNING",)) == {"a": "/"}
    with pytest.raises(
        InterruptedStartError, match=r"did not start: .*rank 0 of the target ended$"
    ):
        started(monkeypatch, ("DEPLOYING", lost), ("DEPLOY_FAILED", lost))


@pytest.mark.parametrize("has_reader", [True, False])
def test_errors_of_files_and_settings_would_occur_again(monkeypatch, tmp_path, has_reader):
    waits = []
    monkeypatch.setattr(start_errors.time, "sleep", waits.append)
    refusal = tmp_path / "refusal"
    if has_reader:  # otherwise the command has ended its wait, and removed the file
        refusal.touch()
    located = LocatedModels(ModelDirectories(tmp_path, None, None), 1, 1, refusal)
    with (
        pytest.raises(RefusedStartError, match="would fail again: 1 GiB"),
        refusing_repeatable(located),
    ):
        raise OutOfMemoryError("1 GiB\nis free")
    assert refusal.exists() == has_reader == bool(waits)
    with pytest.raises(TargetFailedError), refusing_repeatable(located):
        raise TargetFailedError("rank 0 ended")
    if has_reader:
        waiting = SimpleNamespace(status="DEPLOYING", message="", deployments={})
        applications = SimpleNamespace(applications={"a": waiting})
        monkeypatch.setattr(serve, "status", lambda: applications)
        with refusal.open() as file, pytest.raises(StartupError, match=r"^1 GiB is free$"):
            wait_until_running(["a"], file)


def test_a_redeployed_first_model_keeps_the_root(deployed):
    assert deployed("a", a="/", b="/b")[1] == ["/"]


def test_a_prefix_may_not_hide_paths_of_another_application(deployed):
    assert deployed("metrics")[1] == ["/"]
    with pytest.raises(InvalidValueError, match="/metrics is an API path"):
        deployed("metrics", other="/")
