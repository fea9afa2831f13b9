"""Settings of receipts and of the audit of answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from specdec.config.fields import FILE, NOT_NEGATIVE, at_most, setting
from specdec.config.llm import LLMConfig

_SHARE = replace(at_most(NOT_NEGATIVE, 1), text="a number from 0 to 1", brief="0 to 1")


@dataclass(frozen=True)
class ReceiptConfig(LLMConfig):
    """Configuration of a model whose answers may have receipts."""

    receipt_key_file: Path | None = setting(
        None,
        FILE,
        "File with the Ed25519 private key that signs receipts, which requests may then ask for; "
        "`specdec receipt-key` makes one",
        "no receipts",
    )
    audit_share: float = setting(
        0.0,
        _SHARE,
        "Share of the answers that the service computes again in a pass over prompt and answer "
        "while it is idle; metrics count the results",
    )

    def _check_together(self) -> None:
        super()._check_together()
        if self.receipt_key_file is not None:
            from specdec.engine.receipts.signatures import SigningKey  # imports cryptography

            SigningKey.read(self.receipt_key_file)
