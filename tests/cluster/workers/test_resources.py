import dataclasses

import pytest

from cluster.config.serve_config import ServeConfig
from cluster.workers.resources import (
    CPUS_PER_WORKER,
    check_ranks,
    check_together,
    memory_per_replica,
    placement_bundles,
    threads_per_worker,
)
from specdec.config.speculative import SpeculativeConfig
from specdec.engine.model_resolution import Models
from specdec.models.config import ModelConfig
from specdec.types.errors import InvalidValueError

GIB = 2**30


@pytest.fixture
def model(tiny_model_dir):
    return ModelConfig.from_directory(tiny_model_dir)


@pytest.mark.parametrize(("size", "num_cpus"), [(3, 2), (1, 1), (9, 64)])
def test_sizes_that_fit_a_machine(model, size, num_cpus):
    check_ranks(ServeConfig(tensor_parallel_size=size), Models(model), num_cpus)


@pytest.mark.parametrize(
    ("size", "num_cpus", "limit"), [(5, 2, 4), (10, 64, 9)], ids=["machine", "heads"]
)
def test_a_size_beyond_the_machine_or_the_model_is_refused(model, size, num_cpus, limit):
    message = f"tensor_parallel_size is {size}; it must be from 1 to {limit}"
    with pytest.raises(InvalidValueError, match=message):
        check_ranks(ServeConfig(tensor_parallel_size=size), Models(model), num_cpus)


def test_ranks_share_the_cores(monkeypatch):
    monkeypatch.setattr("cluster.workers.resources.available_cpus", lambda: 8)
    assert [threads_per_worker(size) for size in (1, 2, 3, 16)] == [8, 4, 2, 1]
    assert [threads_per_worker(2, replicas) for replicas in (1, 2, 3)] == [4, 2, 1]


def test_replicas_share_the_memory(monkeypatch):
    monkeypatch.setattr("cluster.workers.resources.available_memory_bytes", lambda: 12 * GIB)
    assert memory_per_replica(ServeConfig()) == 12 * GIB
    assert memory_per_replica(ServeConfig(ingress="serve", max_replicas=3)) == 4 * GIB


def test_two_replicas_fit_two_cores_each_with_a_draft(model):
    speculation = SpeculativeConfig.of("draft_model")
    config = ServeConfig(ingress="serve", num_replicas=2, speculative_config=speculation)
    check_ranks(config, Models(model, model), 2)


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        ({"num_replicas": 4}, "num_replicas is 4; it must be from 1 to 3, the most that fit"),
        ({"max_replicas": 9}, "max_replicas is 9; it must be from 1 to 3, the most that fit"),
    ],
)
def test_more_replicas_than_fit_are_refused(model, replicas, message):
    with pytest.raises(InvalidValueError, match=message):
        check_ranks(ServeConfig(model="tiny", ingress="serve", **replicas), Models(model), 2)


def test_the_error_for_a_replica_that_never_fits_names_its_ranks(model):
    config = ServeConfig(ingress="serve", tensor_parallel_size=9)
    with pytest.raises(InvalidValueError, match="tensor_parallel_size is 9"):
        check_ranks(config, Models(model), 2)


@pytest.fixture
def drafting():
    speculation = SpeculativeConfig.of(
        "draft_model", draft_tensor_parallel_size=2, max_model_len=100
    )
    return ServeConfig(speculative_config=speculation)


def test_each_model_has_a_separate_bundle(drafting):
    assert placement_bundles(drafting) == [{"CPU": 0.2}, {"CPU": 0.35}, {"CPU": 0.7}]
    assert len(placement_bundles(ServeConfig(speculative_config=None))) == 2


def test_a_bundle_holds_its_ranks_as_ray_counts():
    for size in range(1, 65):
        bundle = placement_bundles(ServeConfig(model="tiny", tensor_parallel_size=size))[1]
        assert int(bundle["CPU"] * 10_000) >= size * int(CPUS_PER_WORKER * 10_000)


def test_draft_ranks_count_too(model, drafting):
    check_ranks(drafting, Models(model, model), 2)
    with pytest.raises(InvalidValueError, match=r"draft_tensor_parallel_size is 2; .* from 1 to 1"):
        check_ranks(drafting, Models(model, model), 1)


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs with 16 and 24 GiB free, as torch reports them."""
    sizes = [16 * GIB, 24 * GIB]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(sizes))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda index: (sizes[index], 80 * GIB))


@pytest.mark.usefixtures("gpus")
def test_each_rank_has_a_separate_gpu(drafting):
    config = dataclasses.replace(drafting, device="cuda", tensor_parallel_size=2)
    assert placement_bundles(config) == [
        {"CPU": 0.2},
        {"CPU": 0.7, "GPU": 2.0},
        {"CPU": 0.7, "GPU": 2.0},
    ]
    assert memory_per_replica(config) == int(16 * GIB * 0.9)


@pytest.mark.usefixtures("gpus")
def test_more_ranks_than_gpus_are_refused(model, drafting):
    config = dataclasses.replace(drafting, device="cuda", tensor_parallel_size=1)
    with pytest.raises(InvalidValueError, match="3 are needed, 2 are available"):
        check_ranks(config, Models(model, model), 64)
    check_ranks(dataclasses.replace(config, speculative_config=None), Models(model), 64)


def test_models_have_to_fit_together(drafting):
    """In cores and in GPUs; a single model is checked against its own limits."""
    plain = dataclasses.replace(drafting, speculative_config=None)
    check_together([plain, plain], 2, count_gpus=None)
    with pytest.raises(
        InvalidValueError, match=r"models is '3 models'.*2\.35 CPU, 2 are available"
    ):
        check_together([plain, plain, drafting], 2, count_gpus=None)
    on_gpus = [dataclasses.replace(each, device="cuda") for each in (plain, drafting)]
    check_together(on_gpus, 16, lambda: 4)
    with pytest.raises(InvalidValueError, match="they need 4 GPU, 3 are available"):
        check_together(on_gpus, 16, lambda: 3)


def test_a_missing_gpu_is_reported(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InvalidValueError, match="device is 'cuda'; it must be cpu"):
        memory_per_replica(ServeConfig(model="tiny", device="cuda"))
