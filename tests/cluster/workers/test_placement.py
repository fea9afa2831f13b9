"""Placement of bundles, and the errors where there is no room."""

import itertools

import pytest

from cluster.config.serve_config import ServeConfig
from cluster.workers.placement import bundle_labels, require_placeable
from cluster.workers.resources import DRAFT_BUNDLE, TARGET_BUNDLE, placement_bundles
from specdec.config.speculative import SpeculativeConfig
from specdec.types.errors import InvalidValueError

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
    assert labels[0] == labels[TARGET_BUNDLE] == {"role": "t", "zone": "a"}
    assert labels[DRAFT_BUNDLE] == {"role": "d"}


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
