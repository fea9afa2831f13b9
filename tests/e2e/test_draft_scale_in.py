"""Shared draft workers that Serve removes while Routers have seats at them."""

import time

import pytest

from tests.e2e.conftest import running_service
from tests.e2e.streams import Streams
from tests.e2e.test_shared_draft_worker import SPECULATION, draft_on_both, num_drafted, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

LONG, SHORT = Streams(max_tokens=120), Streams(max_tokens=20)
POOL = ["--max-draft-workers", "2", "--target-draft-utilization", "0.3"]
POOL += ["--upscale-delay-s", "1", "--downscale-delay-s", "5"]


def test_routers_leave_a_worker_that_is_removed_and_go_on_drafting(tiny_model_dir, tmp_path):
    flags = ["--speculative-config", SPECULATION, "--ingress", "serve", "--num-replicas", "2"]
    flags += ["--routing-policy", "random", *POOL]
    with running_service(tiny_model_dir, tmp_path / "log", *flags) as service:
        plain = LONG.run_all(service, enabled=False)

        def num_workers():
            return len(service.processes(":DraftPool"))

        def has_moved():
            assert LONG.run_all(service) == plain
            return "drafting again, with a new worker" in service.log.read_text()

        wait_until(has_moved)
        since = len(service.log.read_text())
        index = 0
        while num_workers() > 1:
            tokens = SHORT.run(service, index % len(plain))
            assert tokens == plain[index % len(plain)][: SHORT.max_tokens]
            index += 1
            time.sleep(1)
            assert index < 90, "no worker was removed"
        before = num_drafted(service)
        wait_until(lambda: draft_on_both(service, before))
        log = service.log.read_text()[since:]
        assert "drafting again, with a new worker" in log
        assert "going on without drafts" not in log
