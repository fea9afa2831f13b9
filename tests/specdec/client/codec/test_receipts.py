"""Receipts in messages."""

import pytest

from protos.specdec.v1 import inference_pb2 as pb
from specdec.client.codec.receipts import RECEIPT
from specdec.types.reports.receipts import Opening, Receipt


@pytest.mark.parametrize("opening", [None, Opening("00ff", (1, 2), ((3, 4), (5,)))])
def test_receipts_are_read_back(opening):
    receipt = Receipt('{"seed":9223372036854775807}', "aa", "bb", opening)
    message = pb.Receipt.FromString(RECEIPT.encode(receipt).SerializeToString())
    assert RECEIPT.decode(message) == receipt
