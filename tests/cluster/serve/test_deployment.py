"""The Router as a Serve deployment."""

from types import SimpleNamespace

from cluster.serve.deployment import RouterReplica


async def test_a_replica_can_be_deleted_before_its_constructor_has_returned():
    incomplete = SimpleNamespace(_is_complete=RouterReplica._is_complete)
    await RouterReplica.__del__(incomplete)
