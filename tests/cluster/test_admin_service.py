"""AdminService from the Python client to the ControlPlane and back."""

import grpc
import pytest

from cluster.control_plane import ControlPlane
from cluster.control_store import ControlStore
from protos.specdec.v1 import admin_pb2 as pb
from protos.specdec.v1.admin_pb2_grpc import AdminServiceStub
from specdec.client import AdminClient, ClientError, ReplicaReport, SpeculationChange
from specdec.speculation import SpeculationControl
from specdec.stats import SpeculationStats
from tests.cluster.admin_service import LocalHandle, running_admin_service

CONFIGURED = SpeculationControl("auto", threshold=32, num_speculative_tokens=3)
REPORT = ReplicaReport(
    "r1",
    is_ready=True,
    num_running=5,
    num_waiting=1,
    num_decoding=4,
    kv_cache_usage=0.25,
    is_speculation_on=True,
    speculation_version=0,
    num_generated_tokens=100,
    speculation=SpeculationStats(10, 30, 20),
)


@pytest.fixture
def handle(tmp_path):
    return LocalHandle(ControlPlane(CONFIGURED, ControlStore(tmp_path, "tiny")))


@pytest.fixture
def address(handle):
    with running_admin_service(handle, REPORT) as address:
        yield address


@pytest.fixture
def client(address):
    with AdminClient(address) as client:
        yield client


def test_a_change_and_what_it_left_alone(client):
    before = client.get_speculation()
    assert before.in_force == before.configured == CONFIGURED
    assert (before.version, before.updated_at) == (0, None)
    change = SpeculationChange(
        mode="on", num_speculative_tokens=5, expected_version=0, updated_by="ann", reason="why"
    )
    after = client.set_speculation(change)
    assert after.in_force == SpeculationControl("on", 32, 5)
    assert after.overridden == ("mode", "num_speculative_tokens")
    assert (after.version, after.updated_by, after.reason) == (1, "ann", "why")
    assert after.updated_at is not None
    assert client.get_speculation() == after
    assert client.set_speculation(SpeculationChange(reset=True)).in_force == CONFIGURED


def test_status_asks_the_replica_itself(client):
    status = client.status()
    [replica] = status.replicas
    assert replica.report == REPORT
    assert 0 <= replica.age_s < 5
    assert status.speculation == client.get_speculation()
    assert status.num_lost_replicas == 0


def test_a_replica_that_knows_no_state_yet(handle):
    loading = ReplicaReport("r1", is_ready=False, reason="the model is loading")
    with running_admin_service(handle, loading) as address, AdminClient(address) as client:
        assert client.status().replicas[0].report == loading


def test_a_change_for_another_version_is_aborted(client):
    with pytest.raises(ClientError, match="expected_version is 3; it must be 0") as error:
        client.set_speculation(SpeculationChange(mode="off", expected_version=3))
    assert error.value.code is grpc.StatusCode.ABORTED
    assert client.get_speculation().version == 0


def test_without_a_control_plane_every_call_says_so(client, handle):
    handle.plane = None
    calls = (
        client.get_speculation,
        client.status,
        lambda: client.set_speculation(SpeculationChange(mode="off")),
    )
    for call in calls:
        with pytest.raises(ClientError, match="the control plane does not answer") as error:
            call()
        assert error.value.code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (pb.SetSpeculationRequest(), "change is {}; it must be one of mode, threshold"),
        (pb.SetSpeculationRequest(mode=9), "mode is 9; it must be one of auto, on, off"),
        (pb.SetSpeculationRequest(threshold=-1), "threshold is -1; it must be a whole number"),
        (pb.SetSpeculationRequest(reset=True, reason="a\nb"), r"reason is 'a\\nb'; it must be at"),
    ],
)
def test_the_service_itself_refuses_what_the_client_would(address, request_, message):
    with (
        grpc.insecure_channel(address) as channel,
        pytest.raises(grpc.RpcError, match=message) as error,
    ):
        AdminServiceStub(channel).SetSpeculation(request_, timeout=10)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
