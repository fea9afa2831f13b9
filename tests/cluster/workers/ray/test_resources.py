"""Resources of replicas, their placement, and the errors where there is no room."""

import dataclasses
import itertools

import pytest

from cluster.config.serve_config import ServeConfig
from cluster.workers.ray.resources import (
    CPUS_PER_WORKER,
    bundle_labels,
    check_ranks,
    check_together,
    draft_bundle,
    gpus_per_rank,
    memory_per_replica,
    placement_bundles,
    placement_strategy,
    require_placeable,
    service_bundles,
    shared_draft_bundle,
    shared_draft_labels,
    target_bundles,
    total,
)
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.models.model_resolution import Models
from specdec.models.config.model_config import ModelConfig
from specdec.types.errors import InvalidValueError

GIB = 2**30


@pytest.fixture
def model(tiny_model_dir):
    return ModelConfig.from_directory(tiny_model_dir)


def test_a_draft_model_without_a_core_is_no_range_of_zero(model):
    speculation = {"method": "draft_model", "model": "./a"}
    settings = {"tensor_parallel_size": 4, "speculative_config": speculation}
    config = ServeConfig.from_mapping(settings)
    with pytest.raises(InvalidValueError) as caught:
        check_ranks(config, Models(model, draft=model), 2)
    assert "from 1 to 0" not in str(caught.value)
    assert "left out, and the method one without a draft model" in str(caught.value)


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


def test_replicas_share_the_memory(monkeypatch):
    monkeypatch.setattr("cluster.workers.ray.resources.available_memory_bytes", lambda: 12 * GIB)
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


def shared(drafting):
    speculation = SpeculativeConfig.of("draft_model", share_gpu=True)
    return dataclasses.replace(
        drafting, device="cuda", tensor_parallel_size=1, speculative_config=speculation
    )


def test_models_that_share_a_gpu_reserve_half_of_it_each(model, drafting, monkeypatch):
    config = shared(drafting)
    assert [bundle.get("GPU") for bundle in placement_bundles(config)] == [None, 0.5, 0.5]
    assert gpus_per_rank(config) == 0.5
    assert gpus_per_rank(drafting) == 0.0
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    check_ranks(config, Models(model, model), 64)
    apart = dataclasses.replace(config, speculative_config=SpeculativeConfig.of("draft_model"))
    with pytest.raises(InvalidValueError, match=r"2 are needed, 1 are available; .*share_gpu"):
        check_ranks(apart, Models(model, model), 64)


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


ANYWHERE = {"model": "tiny", "ingress": "serve"}
DRAFTING = {**ANYWHERE, "speculative_config": SpeculativeConfig.of("draft_model")}


_ids = itertools.count()


def node(cpus=2, alive=True, gpus=0, **labels):
    resources = {"CPU": cpus, "GPU": gpus}
    return {"Alive": alive, "Resources": resources, "Labels": labels, "NodeID": f"n{next(_ids)}"}


def test_without_labels_any_node_is_suitable():
    assert bundle_labels(ServeConfig(**DRAFTING)) is None


def test_the_router_goes_with_the_target():
    config = ServeConfig(**DRAFTING, target_labels="role=t,zone=a", draft_labels="role=d")
    labels = bundle_labels(config)
    assert len(labels) == len(placement_bundles(config))
    assert labels == [{"role": "t", "zone": "a"}] * 2 + [{"role": "d"}]


def test_without_a_draft_model_there_is_no_bundle_for_it():
    assert bundle_labels(ServeConfig(**ANYWHERE, target_labels="role=t")) == [{"role": "t"}] * 2


def test_one_node_can_be_sufficient():
    require_placeable([ServeConfig(**DRAFTING)], [node()])
    with pytest.raises(InvalidValueError, match="CPU"):
        require_placeable([ServeConfig(**DRAFTING)], [node(cpus=0.8)])  # it needs 0.9


def test_the_labels_decide_which_node_must_have_the_room():
    config = ServeConfig(**DRAFTING, target_labels="role=t", draft_labels="role=d")
    require_placeable([config], [node(role="t"), node(role="d")])
    with pytest.raises(InvalidValueError, match=r"draft_labels is 'role=d'.*0\.35 CPU"):
        require_placeable([config], [node(role="t"), node(cpus=0.1, role="d"), node()])
    with pytest.raises(InvalidValueError, match="target_labels is 'role=t'"):
        require_placeable([config], [node(role="t", alive=False), node(role="d")])


def test_ranks_with_gpus_need_them_on_one_node():
    config = ServeConfig(
        **{**ANYWHERE, "speculative_config": None}, device="cuda", tensor_parallel_size=4
    )
    require_placeable([config], [node(gpus=4)])
    with pytest.raises(InvalidValueError, match=r"tensor_parallel_size is 4; .* 4 GPU"):
        require_placeable([config], [node(gpus=2), node(gpus=2)])


PACKED = {**DRAFTING, "tensor_parallel_size": 3, "target_placement": "pack"}


@pytest.mark.parametrize(("placement", "strategy"), [("pack", "PACK"), ("spread", "SPREAD")])
def test_ranks_that_may_be_on_several_nodes_have_a_bundle_each(placement, strategy):
    settings = {**PACKED, "target_placement": placement}
    config = ServeConfig(**settings, target_labels="role=t", draft_labels="role=d")
    assert placement_strategy(config) == strategy
    assert placement_bundles(config) == [{"CPU": 0.2}, *[{"CPU": 0.35}] * 4]
    assert (target_bundles(config), draft_bundle(config)) == (range(1, 4), 4)
    assert bundle_labels(config) == [{"role": "t"}] * 4 + [{"role": "d"}]


@pytest.mark.parametrize(("device", "placement"), [("cpu", "spread"), ("cuda", "pack")])
def test_the_error_for_ranks_that_fit_no_node_names_the_placement(device, placement):
    nodes = [node(cpus=1, gpus=2), node(cpus=1, gpus=2)]
    together = ServeConfig(**{**PACKED, "target_placement": "strict_pack", "device": device})
    assert placement_strategy(together) == "PACK"
    message = rf"a node with 1\.05 CPU.*, or target_placement is {placement}"
    with pytest.raises(InvalidValueError, match=message):
        require_placeable([together], nodes)
    require_placeable([ServeConfig(**PACKED)], nodes)
    with pytest.raises(InvalidValueError, match=r"unless the cluster has nodes with 1\.6 CPU"):
        require_placeable([ServeConfig(**PACKED)], nodes[:1])


def test_replicas_and_models_have_to_fit_together():
    """Each alone fits; Ray would wait for the last indefinitely."""
    settings = {**ANYWHERE, "speculative_config": None, "device": "cuda"}
    two = ServeConfig(**settings, num_replicas=2)
    require_placeable([two], [node(gpus=1), node(gpus=1)])
    with pytest.raises(InvalidValueError, match=r"tensor_parallel_size is 1; .* 2 GPU together"):
        require_placeable([two], [node(gpus=1), node(gpus=1, alive=False)])
    with pytest.raises(InvalidValueError, match="3 GPU together"):
        require_placeable([two, ServeConfig(**settings)], [node(gpus=1), node(gpus=1)])
    require_placeable([ServeConfig(**settings, max_replicas=9)], [node(gpus=1)])


def test_nodes_with_labels_must_hold_all_bundles_that_need_them():
    config = ServeConfig(**DRAFTING, num_replicas=3, draft_labels="role=d")
    nodes = [node(cpus=8), node(cpus=1, role="d")]
    with pytest.raises(InvalidValueError, match=r"draft_labels is 'role=d'.* 1\.05 CPU together"):
        require_placeable([config], nodes)
    require_placeable([config], [*nodes, node(cpus=1, role="d")])


def test_the_error_for_a_draft_model_that_fits_nowhere_names_its_ranks():
    speculation = SpeculativeConfig.of("draft_model", draft_tensor_parallel_size=8)
    config = ServeConfig(**{**ANYWHERE, "speculative_config": speculation})
    field = r"speculative_config\.draft_tensor_parallel_size is 8; it must be fewer"
    with pytest.raises(InvalidValueError, match=field):
        require_placeable([config], [node(cpus=2)])


def test_shares_of_a_core_add_up_as_ray_adds_them():
    """Six replicas of a Router and a rank need exactly 3.3 cores."""
    config = ServeConfig(**{**ANYWHERE, "speculative_config": None}, num_replicas=6)
    require_placeable([config], [node(cpus=3.3)])
    with pytest.raises(InvalidValueError, match=r"3\.3 CPU"):
        require_placeable([config], [node(cpus=3.2999)])


@pytest.mark.parametrize("text", ["", "a", "a=", "=b", "a=b,", "a=b=c", "a b=c", "a=b,,c=d"])
def test_malformed_labels_are_refused(text):
    with pytest.raises(InvalidValueError, match="target_labels"):
        ServeConfig(**ANYWHERE, target_labels=text)


def test_draft_labels_without_a_draft_model_are_refused():
    with pytest.raises(InvalidValueError, match="draft_labels"):
        ServeConfig(**{**ANYWHERE, "speculative_config": None}, draft_labels="a=b")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ingress": "embedded"}, "ingress is 'embedded'; it must be serve where ray_address"),
        ({"device": "auto"}, "cpu or cuda where ray_address"),
    ],
)
def test_settings_that_exclude_ray_address_are_refused(settings, message):
    with pytest.raises(InvalidValueError, match=message):
        ServeConfig(**{**ANYWHERE, **settings}, ray_address="head:6379")


SHARED = {**DRAFTING, "num_replicas": 4, "ingress": "serve", "replicas_per_draft_worker": 2}


def test_replicas_that_share_draft_workers_reserve_none_themselves():
    config = ServeConfig(**SHARED)
    assert placement_bundles(config) == [{"CPU": 0.2}, {"CPU": 0.35}]
    assert shared_draft_bundle(config) == {"CPU": 0.35}
    assert total(service_bundles(config)) == {"CPU": pytest.approx(4 * 0.55 + 2 * 0.35)}
    on_gpus = ServeConfig(**{**SHARED, "device": "cuda"})
    assert total(service_bundles(on_gpus))["GPU"] == 4 + 2


def test_shared_draft_workers_are_placed_by_the_labels_of_drafts():
    config = ServeConfig(**{**SHARED, "ray_address": "auto"}, draft_labels="role=d")
    assert bundle_labels(config) == [{}, {}]
    assert shared_draft_labels(config) == [{"role": "d"}]
    wide = {"NodeID": "a", "Alive": True, "Labels": {}, "Resources": {"CPU": 16}}
    with pytest.raises(InvalidValueError, match=r"draft_labels is 'role=d'.*0\.35 CPU"):
        require_placeable([config], [wide])
    narrow = {**wide, "NodeID": "b", "Labels": {"role": "d"}, "Resources": {"CPU": 0.5}}
    with pytest.raises(InvalidValueError, match=r"draft_labels is 'role=d'.* 0\.7 CPU together"):
        require_placeable([config], [wide, narrow])
    require_placeable([config], [wide, {**narrow, "Resources": {"CPU": 0.9}}])
