"""Conversion of receipts to messages and back."""

from __future__ import annotations

from protos.specdec.v1 import inference_pb2 as pb
from specdec.types.reports.receipts import Opening, Receipt


def encode_receipt(receipt: Receipt) -> pb.Receipt:
    """Return the message of a receipt."""
    opening = receipt.opening
    return pb.Receipt(
        statement=receipt.statement,
        signature=receipt.signature,
        public_key=receipt.public_key,
        opening=None if opening is None else _encode_opening(opening),
    )


def decode_receipt(message: pb.Receipt) -> Receipt:
    """Return the receipt in a message."""
    opening = _decode_opening(message.opening) if message.HasField("opening") else None
    return Receipt(message.statement, message.signature, message.public_key, opening)


def _encode_opening(opening: Opening) -> pb.ReceiptOpening:
    outputs = [pb.TokenIds(ids=output) for output in opening.outputs]
    prompt = opening.prompt_token_ids
    return pb.ReceiptOpening(salt=opening.salt, prompt_token_ids=prompt, outputs=outputs)


def _decode_opening(message: pb.ReceiptOpening) -> Opening:
    outputs = tuple(tuple(output.ids) for output in message.outputs)
    return Opening(message.salt, tuple(message.prompt_token_ids), outputs)
