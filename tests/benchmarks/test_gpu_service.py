"""The part `service` of the GPU check, on the CPU with a tiny model."""

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import benchmarks.service
from benchmarks.gpu import service
from benchmarks.gpu.page import page
from benchmarks.gpu.parts import Context, PartReport, PartSkippedError
from benchmarks.gpu.random_models import SMALL
from benchmarks.service_cpu import load
from benchmarks.service_cpu.load import Times
from specdec import LLM


@pytest.fixture
def small(tmp_path):
    return Context(torch.device("cpu"), tmp_path, is_small=True)


def test_a_service_is_loaded_and_shown_beside_engine_and_peer(small, monkeypatch):
    """Without a service: the loads and figures of one, from given times."""
    sent = []

    class Generator:
        def __init__(self, address, http_url):
            self.is_peer = http_url == "http://peer"

        def begin(self, load, seed):
            sent.append((load.streams, load.num_requests))
            self.num_requests = load.num_requests
            return self

        def wait(self):
            last_s = 2.0 if self.is_peer else 1.0
            return [Times(0.0, 0.3, last_s)] * self.num_requests

        def close(self):
            pass

    @contextmanager
    def started(model, **settings):
        assert "tokenizer.json" in {path.name for path in Path(model).iterdir()}
        yield SimpleNamespace(http_url="http://service")

    monkeypatch.setattr(load, "LoadGenerator", Generator)
    monkeypatch.setattr(benchmarks.service, "started_service", started)
    found = service.measure_service(replace(small, peer_url="http://peer"))
    assert sent == [(1, 1), (1, 2), (4, 4), (4, 8)] * 2, "first a warm load"
    rates = {"none": {"4": {"tokens_per_s": 80.0}}}
    shown = list(service.rows({"service": found, "speculation": {"rates": rates}}))
    latencies = ("300.0", "100.0", "300.0", "242.9")
    assert shown == [("1", "", "16", "8", *latencies), ("4", "80", "64", "32", *latencies)]
    report = PartReport(None, {"device": "a", "torch": "b"})
    report.add("service", {**found, "seconds": 1.0})
    assert "## Engine, service, peer" in page(report)


def test_a_service_needs_ray(small, monkeypatch):
    monkeypatch.setattr(service, "find_spec", lambda name: None)
    with pytest.raises(PartSkippedError, match="Ray is not installed"):
        service.measure_service(small)


def test_the_served_model_has_random_weights_and_a_tokenizer(small, monkeypatch):
    monkeypatch.setattr(service, "LLAMA_8B", SMALL)
    directory = service._model(replace(small, is_small=False))
    assert LLM(str(directory), device="cpu", speculative_config=None).generate("a")[0].outputs


@pytest.mark.slow
def test_the_service_itself_is_loaded(small):
    found = service.measure_service(small)
    assert [cell["streams"] for cell in found["service_cells"]] == [1, 4]
    assert all(cell["tokens_per_s"] > 0 for cell in found["service_cells"])
