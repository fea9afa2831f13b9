"""Program: sends large requests to an address at once, and prints how many had each status."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter

import grpc

from protos.specdec.v1 import inference_pb2 as pb

GENERATE = "/specdec.v1.InferenceService/Generate"


async def _code(call: grpc.aio.UnaryUnaryMultiCallable, message: bytes) -> str:
    try:
        await call(message, timeout=60)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def _send(address: str, count: int, num_bytes: int) -> Counter[str]:
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        message = pb.GenerateRequest(text="x" * num_bytes).SerializeToString()
        call = channel.unary_unary(GENERATE)
        return Counter(await asyncio.gather(*(_code(call, message) for _ in range(count))))


if __name__ == "__main__":
    for name, number in asyncio.run(_send(sys.argv[1], *map(int, sys.argv[2:]))).items():
        print(name, number)
