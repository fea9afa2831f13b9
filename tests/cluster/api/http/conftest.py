"""AdminService over HTTP, down to a ControlPlane in this process."""

from types import SimpleNamespace

import httpx
import pytest

from cluster.api.http_app import make_app
from cluster.control.client import ControlClient
from cluster.control.plane import ControlPlane
from cluster.control.store import ControlStore
from specdec.client import Counts, ReplicaReport
from specdec.types.control import SpeculationControl
from tests.cluster.admin_service import LocalHandle, operator_service

CONFIGURED = SpeculationControl("auto", threshold=32, num_speculative_tokens=3)
REPORT = ReplicaReport("r1", is_ready=True, counts=Counts(num_requests=4))


async def ignore(state):
    pass


@pytest.fixture
async def handle(tmp_path):
    return LocalHandle(ControlPlane(CONFIGURED, ControlStore(tmp_path, "tiny")))


@pytest.fixture
async def admin(handle):
    link = ControlClient(handle, ignore, lambda: REPORT)
    return operator_service(link)


@pytest.fixture(scope="module")
def served():
    """The application, which takes longest to build, and the service that it calls: `admin`."""
    served = SimpleNamespace(admin=None)
    served.app = make_app(lambda: SimpleNamespace(), lambda: served.admin)
    return served


@pytest.fixture
async def http(served, admin):
    served.admin = admin
    transport = httpx.ASGITransport(served.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client
