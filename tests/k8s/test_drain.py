"""A worker's hook on two real Ray nodes: a replica answers until its replacement does."""

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

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

DRAIN_S, MIGRATION_S = 5, 120
HELD_S = 40.0
"""Far beyond the 20 s after which Serve would stop the replica if migrationSeconds were 0."""
LONGEST_ANSWER_S = 10.0

TAKE_THE_HEAD = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)

@ray.remote(num_cpus=2, label_selector={"role": "target"})
class Taken:
    def is_made(self):
        return True

taken = Taken.remote()
print(ray.get(taken.is_made.remote()), flush=True)
sys.stdin.read()
"""


@contextmanager
def head_without_room(made):
    """All cores of the head are reserved until the process that is given reads the end of input."""
    command = made.command(made.head, sys.executable, "-c", TAKE_THE_HEAD, f"{HEAD}:{PORT}")
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
    """A service whose one replica is on the worker, and what keeps it from the head."""
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
    """preStop of a worker pod, on the worker."""
    values = {"drainSeconds": DRAIN_S, "migrationSeconds": MIGRATION_S}
    [container] = ray_templates(render(values))["target"]["spec"]["containers"]
    made = service.cluster
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = made.environment | {"RAY_ADDRESS": f"{HEAD}:{PORT}", "PATH": path}
    *shell, script = container["lifecycle"]["preStop"]["exec"]["command"]
    everybodys = "/proc/[0-9]*/cmdline"  # a pod sees its own processes alone, a namespace all
    assert everybodys in script
    own = f"$(ip netns pids {made.worker} | sed 's,.*,/proc/&/cmdline,')"
    script = script.replace(everybodys, own)
    # Ray finds a driver's node by a file in /tmp, which pods have one each of.
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


def test_a_replica_answers_until_its_replacement_does(draining):
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
