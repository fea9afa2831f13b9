"""KEDA's calls of a running picker, and the messages against KEDA's definitions."""

import grpc
import pytest

from cluster.api.endpoint_picker import pool_scaler
from cluster.api.endpoint_picker.external_scaler import METRIC, SERVICE
from cluster.control import replica_scaler
from protos.external_scaler import external_scaler_pb2 as pb
from tests.cluster.api.endpoint_picker.fake_replica import FakeReplica, picking
from tests.waiting import eventually

SLO = "ttft:2000 tpot:40"
METRICS = """
specdec:num_requests_running 400
specdec:num_requests_waiting 0
specdec:replica_ready 1
specdec:requests_received_total 400
specdec:expected_stream_tokens_per_second{streams="1"} 100
specdec:expected_stream_tokens_per_second{streams="16"} 25
specdec:expected_prompt_tokens_per_second 1000
"""

# Fields by number: kedacore/keda, pkg/scalers/externalscaler/externalscaler.proto, at 125494be,
# 2026-08-20. StreamMetricSpec there is optional.
STRING, INT64, DOUBLE, BOOL = "string", "int64", "double", "bool"
KEDA = {
    "ScaledObjectRef": {
        1: ("name", STRING),
        2: ("namespace", STRING),
        3: ("scalerMetadata", "ScaledObjectRef.ScalerMetadataEntry[]"),
    },
    "IsActiveResponse": {1: ("result", BOOL)},
    "GetMetricSpecResponse": {1: ("metricSpecs", "MetricSpec[]")},
    "MetricSpec": {
        1: ("metricName", STRING),
        2: ("targetSize", INT64),
        3: ("targetSizeFloat", DOUBLE),
    },
    "GetMetricsRequest": {1: ("scaledObjectRef", "ScaledObjectRef"), 2: ("metricName", STRING)},
    "GetMetricsResponse": {1: ("metricValues", "MetricValue[]")},
    "MetricValue": {
        1: ("metricName", STRING),
        2: ("metricValue", INT64),
        3: ("metricValueFloat", DOUBLE),
    },
}
TYPES = {9: STRING, 3: INT64, 1: DOUBLE, 8: BOOL}
"""Numbers of types in descriptors."""


def kind(field):
    name = TYPES.get(field.type)
    if field.message_type is not None:
        name = field.message_type.full_name.removeprefix("specdec.external_scaler.")
    return name + ("[]" if field.is_repeated else "")


def test_the_messages_are_those_of_kedas_definitions():
    ours = {
        name: {field.number: (field.name, kind(field)) for field in message.fields}
        for name, message in pb.DESCRIPTOR.message_types_by_name.items()
    }
    assert ours == KEDA
    entry = pb.ScaledObjectRef.ScalerMetadataEntry.DESCRIPTOR
    assert entry.GetOptions().map_entry
    assert [kind(field) for field in entry.fields] == [STRING, STRING]


class Keda:
    """KEDA's calls of the scaler."""

    REF = pb.ScaledObjectRef(name="chat", namespace="llm", scalerMetadata={"scalerAddress": "x"})

    def __init__(self, channel):
        self._channel = channel

    async def call(self, method, response, request=REF):
        call = self._channel.unary_unary(
            f"/{SERVICE}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=response.FromString,
        )
        return await call(request)

    async def value(self):
        request = pb.GetMetricsRequest(scaledObjectRef=self.REF, metricName=METRIC)
        [value] = (await self.call("GetMetrics", pb.GetMetricsResponse, request)).metricValues
        assert value.metricName == METRIC
        assert value.metricValueFloat == value.metricValue
        return value.metricValue

    async def activities(self):
        stream = self._channel.unary_stream(
            f"/{SERVICE}/StreamIsActive",
            request_serializer=pb.ScaledObjectRef.SerializeToString,
            response_deserializer=pb.IsActiveResponse.FromString,
        )
        return [each.result async for each in stream(self.REF)]


async def test_keda_reads_the_number_of_replicas(monkeypatch):
    monkeypatch.setattr(pool_scaler, "PERIOD_S", 0.02)
    monkeypatch.setattr(replica_scaler, "PERIOD_S", 0.01)
    monkeypatch.setattr(replica_scaler, "LEAST_S", 0.1)
    async with picking(FakeReplica(metrics=METRICS), slo=SLO) as picker:
        keda = Keda(picker.channel)
        await eventually(lambda: picker.server.scaler.number is not None)
        assert await keda.value() == 2  # it is full, and others wait
        [spec] = (await keda.call("GetMetricSpec", pb.GetMetricSpecResponse)).metricSpecs
        assert spec == pb.MetricSpec(metricName=METRIC, targetSize=1, targetSizeFloat=1)
        assert (await keda.call("IsActive", pb.IsActiveResponse)).result
        assert await keda.activities() == [True]
        assert isinstance(await picker.pick(), str), "it is an endpoint picker still"


async def test_an_unknown_number_is_no_metric_so_that_nothing_is_scaled():
    async with picking(FakeReplica(), slo=SLO) as picker:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await Keda(picker.channel).value()
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_without_an_objective_there_is_no_scaler():
    async with picking(FakeReplica()) as picker:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await Keda(picker.channel).value()
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
