"""A Router on a target without a model, and a front end linked to it in this process."""

from dataclasses import replace

import pytest

from cluster.api.grpc.servicers import AdminServicer
from cluster.api.http_app import make_app
from cluster.control.peers import Applications
from tests.cluster.admin_service import operator_service
from tests.cluster.api.front_ends.linked import LinkedFrontEnd
from tests.cluster.replica_on_hash_target import MODEL, running_replica


@pytest.fixture
async def replica(tiny_model_dir, tmp_path):
    async with running_replica(tiny_model_dir, tmp_path) as replica:
        yield replica


@pytest.fixture
async def front_end(replica):
    operators = replace(operator_service(replica.link), applications=Applications(MODEL))
    app = make_app(lambda: replica.router, lambda: operators)
    front_end = await LinkedFrontEnd.start(replica.router, app, AdminServicer(operators))
    yield front_end
    front_end.close()
