"""The gRPC service that KEDA calls: the number of replicas as a metric of an external scaler."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from cluster.api.endpoint_picker.pool_scaler import PoolScaler
from protos.external_scaler import external_scaler_pb2 as pb

SERVICE = "externalscaler.ExternalScaler"
METRIC = "replicas_needed"


class ExternalScaler:
    """An external scaler with one metric, whose target is 1 for each replica."""

    def __init__(self, scaler: PoolScaler) -> None:
        self._scaler = scaler

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler of the methods."""
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        methods = (
            (unary, self.IsActive, pb.ScaledObjectRef),
            (stream, self.StreamIsActive, pb.ScaledObjectRef),
            (unary, self.GetMetricSpec, pb.ScaledObjectRef),
            (unary, self.GetMetrics, pb.GetMetricsRequest),
        )
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                method.__name__: make(
                    method, request.FromString, lambda response: response.SerializeToString()
                )
                for make, method, request in methods
            },
        )

    async def IsActive(self, request: pb.ScaledObjectRef, context: Any) -> pb.IsActiveResponse:
        """Return true: a pool without replicas refuses requests, so the last one stays."""
        return pb.IsActiveResponse(result=True)

    async def StreamIsActive(
        self, request: pb.ScaledObjectRef, context: Any
    ) -> AsyncIterator[pb.IsActiveResponse]:
        """Yield true once: it never changes."""
        yield pb.IsActiveResponse(result=True)

    async def GetMetricSpec(
        self, request: pb.ScaledObjectRef, context: Any
    ) -> pb.GetMetricSpecResponse:
        """Return the metric and its target."""
        spec = pb.MetricSpec(metricName=METRIC, targetSize=1, targetSizeFloat=1.0)
        return pb.GetMetricSpecResponse(metricSpecs=[spec])

    async def GetMetrics(
        self, request: pb.GetMetricsRequest, context: Any
    ) -> pb.GetMetricsResponse:
        """Return the number of replicas; UNAVAILABLE while it is unknown, so that it stays."""
        number = self._scaler.number
        if number is None:
            text = "no recent reports of expected tokens per second"
            await context.abort(grpc.StatusCode.UNAVAILABLE, text)
            raise AssertionError("abort raises")
        value = pb.MetricValue(metricName=METRIC, metricValue=number, metricValueFloat=number)
        return pb.GetMetricsResponse(metricValues=[value])
