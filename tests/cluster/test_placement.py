"""Which bundle goes where, and what is said where none can."""

import pytest

from cluster.config import ServeConfig
from cluster.placement import bundle_labels, require_placeable
from cluster.resources import DRAFT_BUNDLE, TARGET_BUNDLE, placement_bundles
from specdec.errors import InvalidValueError
from specdec.speculative_config import SpeculativeConfig

ANYWHERE = {"model": "tiny", "ingress": "serve"}
DRAFTING = {**ANYWHERE, "speculative_config": SpeculativeConfig("draft_model")}


def node(cpus=2, alive=True, gpus=0, **labels):
    return {"Alive": alive, "Resources": {"CPU": cpus, "GPU": gpus}, "Labels": labels}


def test_without_labels_any_node_will_do():
    assert bundle_labels(ServeConfig(**DRAFTING)) is None


def test_the_router_goes_with_the_target():
    config = ServeConfig(**DRAFTING, target_labels="role=t,zone=a", draft_labels="role=d")
    labels = bundle_labels(config)
    assert len(labels) == len(placement_bundles(config))
    assert labels[0] == labels[TARGET_BUNDLE] == {"role": "t", "zone": "a"}
    assert labels[DRAFT_BUNDLE] == {"role": "d"}


def test_without_a_draft_model_there_is_no_bundle_for_it():
    assert bundle_labels(ServeConfig(**ANYWHERE, target_labels="role=t")) == [{"role": "t"}] * 2


def test_one_node_may_be_enough():
    require_placeable(ServeConfig(**DRAFTING), [node()])


def test_the_labels_decide_which_node_must_have_the_room():
    config = ServeConfig(**DRAFTING, target_labels="role=t", draft_labels="role=d")
    require_placeable(config, [node(role="t"), node(role="d")])
    with pytest.raises(InvalidValueError, match=r"draft_labels is 'role=d'.*0\.35 CPU"):
        require_placeable(config, [node(role="t"), node(cpus=0.1, role="d"), node()])
    with pytest.raises(InvalidValueError, match="target_labels is 'role=t'"):
        require_placeable(config, [node(role="t", alive=False), node(role="d")])


def test_ranks_with_gpus_want_as_many_on_one_node():
    config = ServeConfig(
        **{**ANYWHERE, "speculative_config": None}, device="cuda", tensor_parallel_size=4
    )
    require_placeable(config, [node(gpus=4)])
    with pytest.raises(InvalidValueError, match="4 GPU"):
        require_placeable(config, [node(gpus=2), node(gpus=2)])


@pytest.mark.parametrize("text", ["", "a", "a=", "=b", "a=b,", "a=b=c", "a b=c", "a=b,,c=d"])
def test_what_is_no_list_of_labels_is_refused(text):
    with pytest.raises(InvalidValueError, match="target_labels"):
        ServeConfig(**ANYWHERE, target_labels=text)


def test_labels_of_a_draft_model_that_there_is_none_of():
    with pytest.raises(InvalidValueError, match="draft_labels"):
        ServeConfig(**{**ANYWHERE, "speculative_config": None}, draft_labels="a=b")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"ingress": "embedded"}, "ingress is 'embedded'; it must be serve where ray_address"),
        ({"device": "auto"}, "cpu or cuda where ray_address"),
    ],
)
def test_what_does_not_go_with_the_ray_of_others(settings, told):
    with pytest.raises(InvalidValueError, match=told):
        ServeConfig(**{**ANYWHERE, **settings}, ray_address="head:6379")
