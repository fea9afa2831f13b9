"""Tests the preStop hook of a worker on two real Ray nodes."""

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.two_nodes import HEAD, PORT, WORKER, cluster, joined_service, missing
from tests.k8s.rendering import ray_templates, render

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

DRAIN_S, MIGRATION_S = 5, 120
HELD_S = 40.0
"""Well above the 20 s after which Serve would stop the replica with migrationSeconds 0."""
LONGEST_ANSWER_S = 10.0

RESERVE_HEAD = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)

@ray.remote(num_cpus=2, label_selector={"role": "target"})
class Reservation:
    def is_created(self):
        return True

reservation = Reservation.remote()
print(ray.get(reservation.is_created.remote()), flush=True)
sys.stdin.read()
"""


@contextmanager
def head_without_room(made):
    """Reserve all cores of the head until the yielded process reads the end of its input."""
    command = made.command(made.head, sys.executable, "-c", RESERVE_HEAD, f"{HEAD}:{PORT}")
    popen = subprocess.Popen(
        command, env=made.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert popen.stdout.readline().strip() == "True"
        yield popen
    finally:
        popen.kill()
        popen.wait()


@pytest.fixture(scope="module")
def draining(tiny_model_dir, tmp_path_factory):
    """A service whose only replica is on the worker, and the process that reserves the head."""
    if reason := missing():
        pytest.skip(reason)
    log = tmp_path_factory.mktemp("drain") / "log"
    flags = ["--model", str(tiny_model_dir), "--speculative-config", "none"]
    flags += ["--drain-timeout-s", str(DRAIN_S), "--log-level", "info"]
    with (
        cluster() as made,
        head_without_room(made) as taken,
        joined_service(made, log, *flags) as service,
    ):
        yield service, taken


@contextmanager
def running_hook(service):
    """Run the preStop hook of a worker pod on the worker."""
    values = {"drainSeconds": DRAIN_S, "migrationSeconds": MIGRATION_S}
    [container] = ray_templates(render(values))["target"]["spec"]["containers"]
    made = service.cluster
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = made.environment | {"RAY_ADDRESS": f"{HEAD}:{PORT}", "PATH": path}
    *shell, script = container["lifecycle"]["preStop"]["exec"]["command"]
    all_processes = "/proc/[0-9]*/cmdline"  # in a pod only its own, in a network namespace all
    assert all_processes in script
    own = f"$(ip netns pids {made.worker} | sed 's,.*,/proc/&/cmdline,')"
    script = script.replace(all_processes, own)
    # Ray finds the node of a driver by a file in /tmp, which every pod has separately.
    joined = 'ray.init(address="auto", '
    assert joined in script
    script = script.replace(joined, f'{joined}_node_ip_address="{WORKER}", ')
    command = [*shell, script]
    popen = subprocess.Popen(made.command(made.worker, *command), env=environment)
    try:
        yield popen
    finally:
        popen.kill()
        popen.wait()


def answer(service):
    output, errors = service.ask("1", "8", "120").communicate(timeout=180)
    assert errors == "" or output, errors
    [only] = json.loads(output)
    return only


def test_a_replica_serves_until_its_replacement_is_ready(draining):
    service, taken = draining
    made = service.cluster
    assert service.named(made.worker, ":Router")
    began_s, answers = time.monotonic(), []
    with running_hook(service) as hook:
        while hook.poll() is None:
            answers.append(answer(service))
            if not taken.stdin.closed and time.monotonic() - began_s > HELD_S:
                assert service.named(made.worker, ":Router")
                taken.stdin.close()
    took_s = time.monotonic() - began_s
    answers.append(answer(service))
    print(
        f"{len(answers)} answers, the slowest in {max(each['took_s'] for each in answers):.1f} s,"
        f" while the hook took {took_s:.0f} s"
    )
    assert hook.returncode == 0
    assert HELD_S < took_s < DRAIN_S + MIGRATION_S + 30
    assert [each["error"] for each in answers] == [""] * len(answers)
    assert max(each["took_s"] for each in answers) < LONGEST_ANSWER_S
    assert service.named(made.head, ":Router")
    assert not service.named(made.worker, ":Router")
