"""Tests that overrides are applied on every replica within a second, and survive killed actors."""

import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from specdec.client import AdminClient, Client, ClientError, ProfileOrder, SpeculationChange
from specdec.types.sampling.sampling_params import SamplingParams
from tests.e2e.conftest import ALWAYS_DRAFT, running_service

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_REPLICAS = 3
IN_FORCE_WITHIN_S = 1.0
RECOVERY_S = 150.0
PARAMS = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def service(tiny_model_dir, tmp_path_factory):
    log = tmp_path_factory.mktemp("in_force") / "log"
    flags = ["--ingress", "serve", "--num-replicas", str(NUM_REPLICAS), "--max-model-len", "128"]
    flags += ["--profile-dir", str(log.parent / "profiles")]
    with running_service(tiny_model_dir, log, *flags, *ALWAYS_DRAFT) as service:
        wait_until(lambda: len(versions(service)) == NUM_REPLICAS, "every replica's report")
        yield service


def versions(service):
    """Return the applied version of each replica; empty while the service is unavailable."""
    try:
        with AdminClient(service.grpc_address, timeout_s=5) as admin:
            return versions_in(admin.status())
    except ClientError:
        return {}


def versions_in(status):
    return {
        each.report.replica_id: each.report.speculation_version
        for each in status.replicas
        if each.report.is_ready
    }


def have_applied(versions, version):
    """Return whether NUM_REPLICAS replicas have applied a version.

    The status still lists a killed replica for a while, with its last report.
    """
    return list(versions.values()).count(version) >= NUM_REPLICAS


def wait_until(condition, what, timeout_s=RECOVERY_S):
    """Wait until the condition holds; return the seconds."""
    started_at = time.monotonic()
    while not condition():
        assert time.monotonic() - started_at < timeout_s, f"no {what} within {timeout_s} s"
        time.sleep(0.02)
    return time.monotonic() - started_at


def set_mode(service, mode):
    """Set the mode, assert that all replicas apply it within a second, and return the state."""
    with AdminClient(service.grpc_address) as admin:
        moments = admin.watch(0.2)
        next(moments)  # connects before the measurement
        started_at = time.monotonic()
        state = admin.set_speculation(SpeculationChange(mode=mode, updated_by="ann"))
        answered_s = time.monotonic() - started_at
        while not have_applied(versions_in(next(moments).status), state.version):
            assert time.monotonic() - started_at < IN_FORCE_WITHIN_S, f"{mode} is not in force"
        elapsed_s = time.monotonic() - started_at
        moments.close()
    print(
        f"mode {mode} in force on {NUM_REPLICAS} replicas after {elapsed_s:.2f} s at most, "
        f"acknowledged after {answered_s:.3f} s"
    )
    assert elapsed_s <= IN_FORCE_WITHIN_S
    return state


def drafts_of_requests(service, count=12):
    """Return the draft tokens of `count` requests, which Serve distributes over the replicas."""

    def ask(index):
        with Client(service.grpc_address, timeout_s=60) as client:
            return client.generate([5, 6, 7, 8] * (3 + index), PARAMS).usage.speculation

    with ThreadPoolExecutor(4) as pool:
        return [each.num_draft_tokens for each in pool.map(ask, range(count))]


def kill_one(service, name):
    """Kill one process of that name with SIGKILL; return the seconds until it is replaced."""
    before = {each.pid for each in service.processes(name)}
    assert before, f"no process is called {name}"
    psutil.Process(min(before)).kill()

    def is_replaced():
        now = {each.pid for each in service.processes(name)}
        return min(before) not in now and len(now) >= len(before)

    return wait_until(is_replaced, f"another {name}")


def test_changes_are_in_force_on_three_replicas_within_a_second(service):
    set_mode(service, "on")
    assert sum(drafts_of_requests(service)) > 0
    for mode in ("off", "on", "auto", "off"):
        set_mode(service, mode)
    assert sum(drafts_of_requests(service)) == 0


def test_a_profile_is_taken_on_the_named_replica(service):
    """Without requests, each profile ends with no steps at its timeout."""
    with AdminClient(service.grpc_address) as admin:
        for replica_id in versions(service):
            report = admin.profile(ProfileOrder(1, timeout_s=0.2, replica_id=replica_id))
            assert report.replica_id == replica_id
            [target] = report.workers
            assert (target.worker, target.num_steps, target.fault) == ("target", 0, "")
        with pytest.raises(ClientError, match="replica_id is 'unknown'; it must be"):
            admin.profile(ProfileOrder(1, replica_id="unknown"))


@pytest.mark.parametrize("name", ["ControlPlane", ":Router", "ServeController"])
def test_overrides_survive_a_killed_actor(service, name):
    set_mode(service, "on")
    state = set_mode(service, "off")
    known = set(versions(service))
    print(f"another {name} after {kill_one(service, name):.1f} s")
    if name == ":Router":
        elapsed_s = wait_until(lambda: set(versions(service)) - known, "other replica's report")
        [successor] = set(versions(service)) - known
        assert versions(service)[successor] == state.version
    else:
        elapsed_s = wait_until(
            lambda: have_applied(versions(service), state.version), f"version {state.version}"
        )
    print(f"as it was set on {NUM_REPLICAS} replicas {elapsed_s:.1f} s later")
    with AdminClient(service.grpc_address) as admin:
        assert admin.get_speculation() == state
    assert sum(drafts_of_requests(service)) == 0
    set_mode(service, "on")
    assert sum(drafts_of_requests(service)) > 0
