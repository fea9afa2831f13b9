# Modules: cluster.api.base.operator_service
"""AdminService from the Python client to the ControlPlane and back."""

import asyncio
from datetime import UTC, datetime

import grpc
import pytest

from cluster.control.plane import ControlPlane
from cluster.control.store import ControlStore
from protos.specdec.v1 import admin_pb2 as pb
from protos.specdec.v1.admin_pb2_grpc import AdminServiceStub
from specdec.client import (
    AdapterOrder,
    AdminClient,
    ClientError,
    Counts,
    DecisionNews,
    DrafterOrder,
    HistogramCounts,
    ProfileOrder,
    ReplicaReport,
    SampleOrder,
    SpeculationChange,
    connection,
)
from specdec.types.control import RateRule, SpeculationControl
from specdec.types.errors import InvalidValueError
from specdec.types.reports.stats import SpeculationStats
from tests.cluster.admin_service import (
    Adapters,
    Drafters,
    LocalHandle,
    running_admin_service,
    take_profile,
    take_samples,
)

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
    num_chosen_tokens=3,
    decision_reason="goodput",
    decision_changes=(DecisionNews(datetime(2026, 1, 2, tzinfo=UTC), 3, "goodput", 4),),
    counts=Counts(
        num_requests=9,
        num_prompt_tokens=50,
        num_generated_tokens=100,
        num_steps=40,
        speculation=SpeculationStats(10, 30, 20),
        accepted_by_position=(9, 7, 4),
        drafted_by_position=(10, 10, 10),
        decisions={"goodput": 30, "threshold": 10},
        histograms={
            "batch_size": HistogramCounts((1, 2.0, 4.0), (3, 0, 5, 1), 31.0),
            "e2e_request_latency_seconds": HistogramCounts((0.5,), (0, 0), 0.0),
        },
    ),
    estimated_speedup=1.25,
    estimated_tokens_per_s=80.5,
    head_probe_acceptance=0.625,
    mode="auto",
    is_draft_worker_up=False,
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


def test_a_change_of_one_setting_keeps_the_others(client):
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


def test_the_status_of_a_loading_replica(handle):
    loading = ReplicaReport("r1", is_ready=False, reason="the model is loading")
    with running_admin_service(handle, loading) as address, AdminClient(address) as client:
        assert client.status().replicas[0].report == loading


def test_a_change_for_another_version_is_aborted(client):
    with pytest.raises(
        ClientError, match="expected_version is 3; the current version is 0"
    ) as error:
        client.set_speculation(SpeculationChange(mode="off", expected_version=3))
    assert error.value.code is grpc.StatusCode.ABORTED
    assert client.get_speculation().version == 0


def test_without_a_control_plane_every_call_fails_with_a_reason(client, handle, monkeypatch):
    monkeypatch.setattr(connection, "RETRY_DELAYS_S", ())  # reads would be repeated, for 11 s
    handle.plane = None
    calls = (
        client.get_speculation,
        client.status,
        client.replicas,
        client.audit_log,
        lambda: next(client.watch()),
        lambda: client.set_speculation(SpeculationChange(mode="off")),
    )
    for call in calls:
        with pytest.raises(ClientError, match="the control plane does not answer") as error:
            call()
        assert error.value.code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (pb.SetSpeculationRequest(), "change is {}; it must be at least one of mode, threshold"),
        (pb.SetSpeculationRequest(mode=9), "mode is '9'; it must be one of auto, on, off"),
        (pb.SetSpeculationRequest(threshold=-1), "threshold is -1; it must be a whole number"),
        (pb.SetSpeculationRequest(method="luck"), "method is 'luck'; it must be left out"),
        (
            pb.SetSpeculationRequest(rules=pb.SpeculationRules(rules=[pb.SpeculationRule()])),
            r"rules\[0\] is",
        ),
        (pb.SetSpeculationRequest(reset=True, reason="a\nb"), r"reason is 'a\\nb'; it must be at"),
    ],
)
def test_the_service_validates_requests_as_the_client_does(address, request_, message):
    with (
        grpc.insecure_channel(address) as channel,
        pytest.raises(grpc.RpcError, match=message) as error,
    ):
        AdminServiceStub(channel).SetSpeculation(request_, timeout=10)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_everything_that_can_be_set_arrives(client):
    change = SpeculationChange(
        allow_request_override=False,
        allowed_verifiers=("coupled", "block"),
        rules=(RateRule(0.0, num_speculative_tokens=0), RateRule(9.5, mode="off")),
        ttl_s=60,
    )
    state = client.set_speculation(change)
    assert state.in_force.allow_request_override is False
    assert state.in_force.allowed_verifiers == ("coupled", "block")
    assert (state.rules, state.active_rule) == (change.rules, 0)
    assert state.in_force.num_speculative_tokens == 0
    assert state.expires_at > state.updated_at
    state = client.set_speculation(SpeculationChange(rules=()))
    assert (state.rules, state.active_rule) == ((), None)
    page = client.audit_log(page_size=1)
    assert page.entries[0].change == {"rules": []}
    [first] = client.audit_log(page_token=page.next_page_token).entries
    assert first.change["ttl_s"] == 60


def test_replicas_are_listed(client):
    client.status()
    [replica] = client.replicas()
    assert replica.report == REPORT


def test_statistics_are_streamed(client):
    client.status()
    moments = client.watch(interval_s=0.2)
    first, second = next(moments), next(moments)
    assert first.status.replicas[0].report == REPORT
    assert first.totals == REPORT.counts
    assert second.at > first.at


def test_a_profile_arrives_as_it_was_taken(client):
    order = ProfileOrder(num_steps=7, timeout_s=2.5, replica_id="r2")
    assert client.profile(order) == asyncio.run(take_profile(order))
    assert client.profile() == asyncio.run(take_profile(ProfileOrder()))


def test_a_profile_of_too_many_steps_is_refused(address):
    with (
        grpc.insecure_channel(address) as channel,
        pytest.raises(grpc.RpcError, match="num_steps is 101; it must be") as error,
    ):
        AdminServiceStub(channel).Profile(pb.ProfileRequest(num_steps=101), timeout=10)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_the_versions_of_all_replicas_arrive(client):
    assert client.drafters() == asyncio.run(Drafters()(DrafterOrder()))


@pytest.mark.parametrize(
    "order",
    [
        DrafterOrder(path="org/head"),
        DrafterOrder(version=2, replica_id="r1"),
        DrafterOrder(is_pinned=True),
        DrafterOrder(is_pinned=False),
    ],
    ids=str,
)
def test_an_order_for_the_drafter_arrives_as_it_was_sent(handle, order):
    drafters = Drafters()
    with (
        running_admin_service(handle, REPORT, drafters=drafters) as address,
        AdminClient(address) as client,
    ):
        assert client.set_drafter(order) == asyncio.run(Drafters()(order))
    assert drafters.orders == [order]


def test_orders_for_adapters_arrive_as_they_were_sent(handle):
    adapters = Adapters()
    with (
        running_admin_service(handle, REPORT, adapters=adapters) as address,
        AdminClient(address) as client,
    ):
        assert client.adapters() == asyncio.run(Adapters()(AdapterOrder()))
        load = AdapterOrder.load(
            "chat", "/adapters/chat", replaces=True, replica_id="r1", draft_path="/adapters/draft"
        )
        assert client.load_adapter(load) == asyncio.run(Adapters()(load))
        unload = AdapterOrder.unload("sql", replica_id="r2")
        assert client.unload_adapter("sql", "r2") == asyncio.run(Adapters()(unload))
        client.unload_adapter("sql")
    assert adapters.orders == [AdapterOrder(), load, unload, AdapterOrder.unload("sql")]


@pytest.mark.parametrize(
    ("method", "request_", "code", "message"),
    [
        ("LoadAdapter", pb.LoadAdapterRequest(path="/a"), "INVALID_ARGUMENT", "name is ''"),
        ("LoadAdapter", pb.LoadAdapterRequest(name="a"), "INVALID_ARGUMENT", "unless draft_path"),
        (
            "LoadAdapter",
            pb.LoadAdapterRequest(name="a b", path="/a"),
            "INVALID_ARGUMENT",
            "name is 'a b'; it must be 1 to 256 letters",
        ),
        (
            "LoadAdapter",
            pb.LoadAdapterRequest(name="a", path="/a\n"),
            "INVALID_ARGUMENT",
            "printable characters",
        ),
        (
            "LoadAdapter",
            pb.LoadAdapterRequest(name="sql", path="/a"),
            "INVALID_ARGUMENT",
            "lora_name is 'sql'; it must be a name that no loaded adapter has",
        ),
        ("UnloadAdapter", pb.UnloadAdapterRequest(), "INVALID_ARGUMENT", "name is ''"),
        (
            "UnloadAdapter",
            pb.UnloadAdapterRequest(name="other"),
            "NOT_FOUND",
            "model 'other' is not served; served: 'sql'",
        ),
    ],
)
def test_a_wrong_order_for_adapters_is_refused(address, method, request_, code, message):
    with (
        grpc.insecure_channel(address) as channel,
        pytest.raises(grpc.RpcError, match=message) as error,
    ):
        getattr(AdminServiceStub(channel), method)(request_, timeout=10)
    assert error.value.code() is grpc.StatusCode[code]


def test_samples_arrive_as_they_were_taken(client):
    assert client.take_samples() == asyncio.run(take_samples(SampleOrder()))
    order = SampleOrder(max_tokens=5, replica_id="r2")
    assert client.take_samples(order) == asyncio.run(take_samples(order))
    with pytest.raises(InvalidValueError, match="max_tokens is 200000; it must be from 1 to"):
        SampleOrder(max_tokens=200_000)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "path is ''; it must be given"),
        ({"path": "a", "version": 2}, "version is 2; it must be left out"),
        ({"version": -1}, "version is -1; it must be from 0"),
        ({"path": "a\n"}, "printable"),
        ({"version": 9}, "version is 9; it must be one of 1, 2"),
    ],
)
def test_a_wrong_order_for_the_drafter_is_refused(address, fields, message):
    with (
        grpc.insecure_channel(address) as channel,
        pytest.raises(grpc.RpcError, match=message) as error,
    ):
        AdminServiceStub(channel).SetDrafter(pb.SetDrafterRequest(**fields), timeout=10)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("interval_s", [0.1, 61, -1, float("nan")])
def test_an_invalid_interval_is_refused(client, interval_s):
    with pytest.raises(ClientError, match=r"interval_s is .*from 0\.2 to 60") as error:
        next(client.watch(interval_s))
    assert error.value.code is grpc.StatusCode.INVALID_ARGUMENT


TOKEN = "correct-horse-battery"


@pytest.mark.parametrize("presented", [None, "wrong-horse-battery", TOKEN + "x"])
def test_without_the_token_every_call_is_refused(handle, presented):
    with (
        running_admin_service(handle, REPORT, TOKEN) as address,
        AdminClient(address, token=presented) as client,
    ):
        for call in (
            client.get_speculation,
            client.status,
            client.replicas,
            client.audit_log,
            lambda: next(client.watch()),
            lambda: client.set_speculation(SpeculationChange(mode="off")),
            client.profile,
            client.drafters,
            lambda: client.set_drafter(DrafterOrder(version=1)),
            client.take_samples,
            client.adapters,
            lambda: client.load_adapter(AdapterOrder.load("a", "/a")),
            lambda: client.unload_adapter("sql"),
        ):
            with pytest.raises(ClientError, match="needs the admin token") as error:
                call()
            assert error.value.code is grpc.StatusCode.UNAUTHENTICATED


def test_with_the_token_calls_are_allowed(handle):
    with (
        running_admin_service(handle, REPORT, TOKEN) as address,
        AdminClient(address, token=TOKEN) as client,
    ):
        assert client.set_speculation(SpeculationChange(mode="off")).version == 1
        assert next(client.watch()).status.speculation.version == 1
