"""Spare ranks on a real Ray, which believes in three GPUs. Prints how long a restart takes."""

import os
import time
from functools import partial

import psutil
import pytest
import ray
from ray.util import placement_group

from cluster.observability.logs import LogConfig
from cluster.workers.group_spec import GroupSpec, ModelSource
from cluster.workers.groups.ranks import Ranks
from cluster.workers.groups.roles import DRAFT
from cluster.workers.groups.spare import SpareRanks
from cluster.workers.groups.supervisors import DraftSupervisor
from cluster.workers.groups.worker_group import WorkerGroup
from cluster.workers.rank.actor import DraftWorker
from cluster.workers.ray.ray_runtime import start_ray
from specdec.config.engine import DraftLimits
from specdec.sequences.sequence import Sequence
from specdec.speculation.proposers import DraftRequest, DraftVocabulary
from specdec.types.sampling.sampling_spec import SamplingRules
from tests.specdec.engines import request

START_TIMEOUT_S = 150.0
LIMITS = DraftLimits(num_blocks=200, block_size=16, max_model_len=512, max_catch_up_tokens=64)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(5 * START_TIMEOUT_S)]


@pytest.fixture(scope="module")
def own_ray():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        init = ray.init
        patch.setattr(ray, "init", lambda **options: init(num_gpus=3, **options))
        own = start_ray()
    yield own
    own.stop()


def spec_of(directory, device="cpu", size=1):
    return GroupSpec(
        "draft model", ModelSource(str(directory), directory), "float32", device, None, "auto",
        size, LIMITS, 1, (2,) * size, None, START_TIMEOUT_S, 10.0, LogConfig(),
    )  # fmt: skip


def wait_for(condition):
    ends_at_s = time.monotonic() + START_TIMEOUT_S
    while not condition():
        assert time.monotonic() < ends_at_s
        time.sleep(0.05)


def title_of(place):
    return psutil.Process(place.pid).cmdline()[0]  # empty words follow


def drafts(supervisor, seq):
    return supervisor.take([DraftRequest(seq, 3)])


def seconds_without_drafts(supervisor):
    """Kill the only rank, and return the seconds until another one drafts."""
    seq = Sequence(0, request("r", [1, 2, 3]), SamplingRules(), detokenizer=None)
    assert drafts(supervisor, seq)
    num_restarts = supervisor.num_restarts
    [place] = supervisor._group.ranks.places
    began_s = time.monotonic()
    os.kill(place.pid, 9)
    wait_for(lambda: drafts(supervisor, seq) and supervisor.num_restarts > num_restarts)
    return time.monotonic() - began_s


def test_a_spare_replaces_a_killed_rank_and_saves_its_start(own_ray, tiny_model_dir):
    placement = placement_group([{"CPU": 0.1}, {"CPU": 0.1}, {"CPU": 0.35}])
    spec = spec_of(tiny_model_dir)
    spare = SpareRanks(
        partial(WorkerGroup, DRAFT, spec, placement),
        lambda lost: Ranks.opened(DraftWorker, spec, placement, lost.places),
    )
    supervisor = DraftSupervisor(spare.start, LIMITS, DraftVocabulary(), spare)
    new_s = seconds_without_drafts(supervisor)
    supervisor.check()
    wait_for(lambda: spare._spare is not None and spare._spare.poll_prepared())
    [waiting] = spare._spare.places
    wait_for(lambda: title_of(waiting) == "ray::DraftWorker.stand_by")
    spare_bytes = psutil.Process(waiting.pid).memory_full_info().uss
    spare_s = seconds_without_drafts(supervisor)
    print(f"{new_s:.2f} s by a new process, {spare_s:.2f} s by a spare ({spare_bytes >> 20} MiB)")
    assert supervisor._group.ranks.places == [waiting]
    assert title_of(waiting) == "ray::DraftWorker.run"
    assert spare_s < new_s
    supervisor.check()
    wait_for(lambda: spare._spare is not None)
    pids = [each.pid for each in (*supervisor._group.ranks.places, *spare._spare.places)]
    supervisor.close()
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_spares_see_the_gpus_of_the_ranks_they_replace(own_ray, tiny_model_dir):
    """Another bundle has one of the three GPUs."""
    bundles = [{"CPU": 0.1}, {"CPU": 0.1, "GPU": 1}, {"CPU": 0.7, "GPU": 2}]
    placement, spec = placement_group(bundles), spec_of(tiny_model_dir, "cuda", 2)
    ranks = Ranks(DraftWorker, spec, placement)
    ranks.open(START_TIMEOUT_S)
    devices = [place.visible_devices for place in ranks.places]
    assert len(set(devices)) == 2
    assert set(devices) < {"0", "1", "2"}
    spares = Ranks.opened(DraftWorker, spec, placement, ranks.places)
    assert [place.visible_devices for place in spares.places] == devices
    wait_for(lambda: spares.poll_prepared())
    assert (ranks.loss(), spares.loss()) == (None, None)
    for each in (spares, ranks):
        each.kill()
