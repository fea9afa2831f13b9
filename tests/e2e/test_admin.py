"""Tests of the admin interface on the running service."""

import json
import subprocess
import sys
import time

import httpx
import psutil
import pytest

from specdec.client import AdminClient, Client, ClientError, SpeculationChange
from specdec.types.sampling.sampling_params import SamplingParams

pytestmark = pytest.mark.e2e

IN_FORCE_WITHIN_S = 30.0
"""`test_control_in_force.py` has the limit of an idle machine."""
LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
PROMPT = [5, 6, 7, 8] * 6


@pytest.fixture
def admin(service):
    with AdminClient(service.grpc_address) as admin:
        yield admin
        admin.set_speculation(SpeculationChange(reset=True, updated_by="the test's end"))


def endless(client):
    """Yield the chunks of one request after another."""
    while True:
        yield from client.generate_stream(PROMPT, LONG)


def replica(admin):
    [status] = admin.status().replicas
    return status.report


def wait_until(condition, timeout_s):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.02)


def drafts_while_reading(admin, chunks, count=100):
    """Count draft tokens verified during `count` chunks, which is more than a stream buffers."""
    before = replica(admin).counts.speculation.num_draft_tokens
    for _ in range(count):
        next(chunks)
    return replica(admin).counts.speculation.num_draft_tokens - before


def test_speculation_is_toggled_while_streams_run(service, admin):
    command = [sys.executable, "-m", "cluster", "speculation", "set", "--json"]
    command += ["--address", service.grpc_address, "--reason", "a test"]
    with Client(service.grpc_address, timeout_s=60) as client:
        plain = client.generate(PROMPT, LONG)
        chunks = endless(client)
        assert drafts_while_reading(admin, chunks) > 0
        done = subprocess.run([*command, "--mode", "off"], capture_output=True, check=True)
        assert json.loads(done.stdout)["in_force"]["mode"] == "off"
        wait_until(lambda: not replica(admin).is_speculation_on, IN_FORCE_WITHIN_S)
        assert drafts_while_reading(admin, chunks) == 0
        assert client.generate(PROMPT, LONG).usage.speculation.num_draft_tokens == 0
        admin.set_speculation(SpeculationChange(mode="on"))
        wait_until(lambda: replica(admin).is_speculation_on, IN_FORCE_WITHIN_S)
        assert drafts_while_reading(admin, chunks) > 0
        chunks.close()
        assert client.generate(PROMPT, LONG).token_ids == plain.token_ids


def test_a_change_over_http_is_visible_over_grpc(service, admin):
    url = f"{service.http_url}/v1/admin/speculation"
    before = httpx.get(url, timeout=30)
    change = {"num_speculative_tokens": 2, "updated_by": "ann"}
    match = {"if-match": before.headers["etag"]}
    after = httpx.put(url, json=change, headers=match, timeout=30)
    assert after.status_code == 200
    late = httpx.put(url, json=change, headers=match, timeout=30)
    assert late.status_code == 412
    assert admin.get_speculation().in_force.num_speculative_tokens == 2
    wait_until(
        lambda: replica(admin).speculation_version == after.json()["version"], IN_FORCE_WITHIN_S
    )
    wrong = httpx.put(url, json={"threshold": -1}, timeout=30)
    assert (wrong.status_code, wrong.json()["error"]["field"]) == (400, "threshold")
    log = httpx.get(f"{service.http_url}/v1/admin/audit-log", timeout=30).json()
    assert log["entries"][0]["updated_by"] == "ann"


def test_statistics_are_watched_while_a_stream_runs(service, admin):
    with Client(service.grpc_address, timeout_s=60) as client:
        admin.status()  # makes the replica report immediately
        moments = admin.watch(0.2)
        before = next(moments).totals.num_generated_tokens
        client.generate(PROMPT, LONG)
        wait_until(lambda: next(moments).totals.num_generated_tokens >= before + 40, 30)
        fleet = next(moments)
    counts = fleet.status.replicas[0].report.counts
    assert sum(counts.decisions.values()) > 0
    url = f"{service.http_url}/v1/admin/watch"
    with httpx.stream("GET", url, params={"interval_s": 0.2}, timeout=10) as response:
        lines = response.iter_lines()
        assert next(lines) == "event: stats"
        data = json.loads(next(lines).removeprefix("data: "))
    assert data["totals"]["num_requests"] >= fleet.totals.num_requests


@pytest.mark.slow
def test_state_survives_a_killed_control_plane(embedded):
    with AdminClient(embedded.grpc_address) as admin:
        state = admin.set_speculation(SpeculationChange(mode="off", updated_by="ann"))
        wait_until(lambda: replica(admin).speculation_version == state.version, IN_FORCE_WITHIN_S)
        [process] = [each for each in embedded.descendants() if is_control_plane(each)]
        process.kill()
        with Client(embedded.grpc_address, timeout_s=60) as client:
            usage = client.generate(PROMPT, LONG).usage  # does not wait for its restart
            assert usage.speculation.num_draft_tokens == 0
    with AdminClient(embedded.grpc_address, timeout_s=60) as admin:
        wait_until(lambda: answers(admin), 60)
        assert admin.get_speculation() == state
        changed = admin.set_speculation(SpeculationChange(reset=True))
        wait_until(lambda: replica(admin).speculation_version == changed.version, 5)
        assert replica(admin).is_speculation_on


def is_control_plane(process):
    try:
        return "ControlPlane" in " ".join(process.cmdline())
    except psutil.Error:  # the process has just ended
        return False


def answers(admin):
    try:
        return len(admin.status().replicas) == 1
    except ClientError:
        return False


def test_refused_changes_leave_no_traceback_in_the_log(embedded, on_serve):
    """Serve logs one for each exception of a deployment."""
    for service in (embedded, on_serve):
        with httpx.Client(base_url=service.http_url, timeout=30) as http:
            path = "/v1/admin/audit-log?page_token=wombat"
            assert http.get(path).status_code == 400
            body = {"mode": "off", "expected_version": 10**6}
            assert http.put("/v1/admin/speculation", json=body).status_code in (409, 412)
    time.sleep(2)  # Ray forwards lines every second
    for service in (embedded, on_serve):
        assert "wombat" not in service.log.read_text()
        assert "VersionConflictError" not in service.log.read_text()
