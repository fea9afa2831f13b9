"""Export of traces to a collector when a replica closes."""

import asyncio
import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from cluster.replica.tracing import tracing_to
from tests.cluster.replica.test_tracing import begun
from tests.waiting import DEADLINE_S


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Collector that keeps what an exporter sends."""

    def __init__(self):
        self.received = queue.SimpleQueue()

    def Export(self, request, context):  # noqa: N802
        self.received.put(request)
        return trace_service_pb2.ExportTraceServiceResponse()


def test_closing_exports_the_remaining_traces(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # not for loopback
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    tracing = tracing_to(f"http://127.0.0.1:{port}", "tiny", "replica-1")
    begun(tracing).end(101.0, None)
    tracing.close()
    [of_resource] = collector.received.get(timeout=30).resource_spans
    resource = {each.key: each.value.string_value for each in of_resource.resource.attributes}
    assert (resource["service.name"], resource["service.instance.id"]) == ("specdec", "replica-1")
    [scope] = of_resource.scope_spans
    assert [each.name for each in scope.spans] == ["prepare", "text_completion tiny"]
    server.stop(0)


async def test_an_unavailable_collector_does_not_block_closing(monkeypatch, caplog):
    monkeypatch.setattr("cluster.replica.tracing._FLUSH_S", 0.2)
    tracing = tracing_to("http://127.0.0.1:1", "tiny", "replica-1")
    begun(tracing).end(101.0, None)
    shutdown = tracing._exporter.shutdown

    def shut_down():
        monkeypatch.setattr("cluster.replica.tracing._FLUSH_S", DEADLINE_S)
        shutdown()

    tracing._exporter.shutdown = shut_down
    await asyncio.to_thread(tracing.close)
    assert "the last traces were not sent within 0.2 s" in caplog.text
    ours = {"traces", "OtelBatchSpanRecordProcessor"}
    assert not ours & {each.name for each in threading.enumerate()}
