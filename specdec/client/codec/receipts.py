"""Conversion of receipts to messages and back."""

from __future__ import annotations

from protos.specdec.v1 import inference_pb2 as pb
from specdec.client.codec.message import MessageCodec, Options
from specdec.types.reports.receipts import Opening, Receipt

_OPENING = MessageCodec(pb.ReceiptOpening, Opening)
RECEIPT = MessageCodec(pb.Receipt, Receipt, Options(parts={"opening": _OPENING}))
