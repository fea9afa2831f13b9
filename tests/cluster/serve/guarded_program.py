"""A program under a guard that stands in for the service: it starts processes, but no Ray.

python guarded_program.py SCENARIO, with the repository on the path. Every process that it starts
has its environment.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from cluster.serve import processes
from cluster.serve.processes import guarded
from cluster.serve.signals import Signals
from specdec.config.fields import LONGEST_WAIT_S

DRAIN_S = 0.2
STOP_S = 3.0
LONG_S = LONGEST_WAIT_S + processes.JOINED_STOP_S
IGNORE_SIGTERM = "trap '' TERM INT HUP; exec sleep 300"


def start_processes():
    """Start a child, one that ignores signals, one in another session and an orphan."""
    child = subprocess.Popen(["sleep", "300"])
    subprocess.Popen(["sh", "-c", IGNORE_SIGTERM], start_new_session=True)
    subprocess.run(["sh", "-c", "setsid sleep 300 & setsid sleep 300 &"], check=True)
    return child


def serve(to_guard, scenario):
    child = start_processes()
    to_guard.require({"raylet": child.pid})
    if scenario == "fails":
        to_guard.ending()
        print("error: no memory", file=sys.stderr)
        sys.exit(1)
    if scenario in ("starts", "joins"):
        show("started")
        time.sleep(300)
    signals = Signals(to_guard)
    show_when_ready(to_guard)
    signals.wait()
    show("stopping")
    if signals.abort.wait(DRAIN_S if scenario != "hangs" else 300):
        show("aborted")
    to_guard.ending()
    time.sleep(300)  # Ray hangs while it ends


def show_when_ready(to_guard):
    """Show it once `Signals.wait` has installed its handlers and reported to the guard."""
    report = to_guard.ready

    def ready():
        report()
        show("ready")

    to_guard.ready = ready


def show(line):
    with Path(os.environ["LOG"]).open("a") as log:
        log.write(f"{line}\n")


if __name__ == "__main__":
    scenario = sys.argv[1]
    processes.STOP_S = processes.JOINED_STOP_S = LONG_S if scenario == "drains long" else STOP_S
    with guarded(DRAIN_S, is_joined=scenario == "joins") as to_guard:
        try:
            serve(to_guard, scenario)
        except KeyboardInterrupt:
            show("interrupted")
            sys.exit(130)
