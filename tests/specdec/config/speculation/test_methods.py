# Modules: specdec.config.speculation.head_methods, specdec.config.speculation.method_config
"""Every configured method has a registration, and a name in the protos."""

import pytest

from protos.specdec.v1 import inference_pb2 as pb
from specdec.config.speculation.method_config import DraftPlace
from specdec.config.speculation.methods import METHOD_NAMES, METHODS
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.speculation.proposers import make_proposer, proposer_memory
from specdec.types.errors import InvalidValueError


def config_of(name, *options, **keys):
    """Return a configuration of a method, with a model where it must have one."""
    if METHODS[name].place is DraftPlace.TARGET:
        keys["model"] = "head"
    return SpeculativeConfig.of(name, *options, **keys)


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_each_method_makes_a_proposer_and_has_a_memory(name):
    config, of_worker = config_of(name), object()
    proposer = make_proposer(config, of_worker)
    assert (proposer is of_worker) == (METHODS[name].place is DraftPlace.DRAFT_WORKER)
    assert proposer_memory(config).bytes_per_token >= 0


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_each_method_has_a_name_in_the_protos(name):
    assert f"SPECULATION_METHOD_{name.upper()}" in pb.SpeculationMethod.keys()  # noqa: SIM118


def test_flat_keys_round_trip():
    for name in METHOD_NAMES:
        config = config_of(name, 5, adaptive_length=True)
        assert SpeculativeConfig.of(**config.to_mapping()) == config


@pytest.mark.parametrize("name", [["eagle"], 7])
def test_a_name_that_is_no_text_is_refused(name):
    with pytest.raises(InvalidValueError, match=r"^speculative_config\.method is "):
        SpeculativeConfig.of(name)
