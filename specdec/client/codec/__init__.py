"""Conversion between protobuf messages and this package's dataclasses, in both directions.

Shared by the client and the gRPC servicers. A codec checks only what a message cannot carry; limits
are checked by the dataclasses themselves and, for requests, by the service.
"""
