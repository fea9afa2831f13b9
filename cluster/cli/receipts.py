"""`specdec verify` and `specdec receipt-key`: receipts of answers, without a service."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cluster.cli.errors import EXIT_FAILED, EXIT_UNUSABLE, exits_as_unusable
from cluster.cli.output import counted, json_flag, show_result

if TYPE_CHECKING:
    from specdec.engine.receipts.report import ReceiptReport
    from specdec.types.reports.receipts import Receipt, Statement

_HEX_KEY = re.compile("[0-9a-fA-F]{64}")
_SETTINGS = ("dtype", "quantization", "kv_cache_dtype", "hf_overrides")
"""Settings of a model that decide about its tokens, as a receipt names them."""


@click.command(short_help="Verify the receipt of an answer.")
@click.argument("receipt", type=click.File("rb"))
@click.option(
    "--model",
    help="Alias, directory or Hub id of the model. Default: the name in the receipt, where "
    "--public-key is given.",
)
@click.option(
    "--implementation",
    type=click.Choice(["specdec", "transformers"]),
    default="specdec",
    help="Code that runs the model: this project's, or transformers' own on the CPU. Default: "
    "specdec.",
)
@click.option(
    "--public-key", help="Key that must have signed it, in hexadecimal. Default: any key."
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0, 100),
    help="Greatest change of the difference of two logits for which a token counts as a tie. "
    "Default: by dtype and quantization; docs/receipts.md.",
)
@click.option("--tensor-parallel-size", type=click.IntRange(1, 1024), default=1, help="Ranks.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="cpu")
@json_flag
@click.pass_context
def verify(
    ctx: click.Context,
    receipt: Any,
    model: str | None,
    implementation: str,
    public_key: str | None,
    tolerance: float | None,
    tensor_parallel_size: int,
    device: str,
    as_json: bool,
) -> None:
    """Verify RECEIPT, a JSON file with a receipt or an OpenAI answer that has one; - reads stdin.

    One pass over prompt and answer compares each token with the one that the model samples with
    the receipt's seed and parameters. Exit code 0: all are equal, or ties within the tolerance.
    1: a token is not possible, or signature or digests do not match. 2: it cannot be verified here.
    """
    from specdec.types.reports.receipts import MAX_RECEIPT_BYTES, Receipt, Statement

    if public_key is not None and _HEX_KEY.fullmatch(public_key) is None:
        raise click.BadParameter("must have 64 hexadecimal digits", param_hint="--public-key")
    if model is None and public_key is None:
        raise click.UsageError("without --public-key the receipt may name any model: give --model")
    with exits_as_unusable():
        given = Receipt.from_json(receipt.read(MAX_RECEIPT_BYTES + 1))
        statement = Statement.from_text(given.statement)
        ranks = {"tensor_parallel_size": tensor_parallel_size, "device": device}
        run = _by_transformers if implementation == "transformers" else _by_engine
        limits = {"tolerance": tolerance, "public_key": public_key}
        report = _forged(given, statement, public_key)
        if report is None:
            settings = {name: getattr(statement.model, name) for name in _SETTINGS}
            settings |= {"model": model or statement.model.name, "speculative_config": None}
            report = run(given, settings, ranks, limits)
    text = "\n".join(_lines(report, given, statement))
    show_result(report.to_mapping(), text, as_json)
    if not report.is_verified:
        ctx.exit(EXIT_UNUSABLE if report.outcome.value == "unverifiable" else EXIT_FAILED)


@click.command("receipt-key", short_help="Make a key that signs receipts.")
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path))
@json_flag
def receipt_key(path: Path, as_json: bool) -> None:
    """Write a new Ed25519 private key to PATH, readable by its owner alone, for --receipt-key-file.

    Prints the public key, by which clients recognize the service's receipts.
    """
    from specdec.engine.receipts.signatures import SigningKey

    key = SigningKey.generate()
    key.write(path)
    show_result({"public_key": key.public_key}, key.public_key, as_json)


def _forged(receipt: Receipt, statement: Statement, public_key: str | None) -> ReceiptReport | None:
    """Return the report of a changed receipt, for which no model has to be loaded."""
    from specdec.engine.receipts.report import Outcome, ReceiptReport
    from specdec.llm.receipts.verification import forgery

    reason = forgery(receipt, statement, public_key)
    return ReceiptReport(Outcome.FORGED, reason) if reason else None


def _by_engine(
    receipt: Receipt, settings: dict[str, Any], ranks: dict[str, Any], limits: dict[str, Any]
) -> ReceiptReport:
    from specdec import LLM

    with LLM(**settings, **ranks, disable_log_stats=True) as llm:
        return llm.verify(receipt, **limits)


def _by_transformers(
    receipt: Receipt, settings: dict[str, Any], ranks: dict[str, Any], limits: dict[str, Any]
) -> ReceiptReport:
    from specdec.config.llm import LLMConfig
    from specdec.llm.receipts.transformers_replay import TransformersReplayer
    from specdec.llm.receipts.verification import verify_receipt
    from specdec.models.resolve import print_progress, resolve

    if ranks != {"tensor_parallel_size": 1, "device": "cpu"}:
        raise click.UsageError("--implementation transformers runs on one rank of the CPU")
    directory = resolve(settings["model"], progress=print_progress)
    replayer = TransformersReplayer(directory, LLMConfig(**settings))
    return verify_receipt(receipt, replayer, **limits)


def _lines(report: ReceiptReport, receipt: Receipt, statement: Statement) -> list[str]:
    if report.outcome.value == "forged":  # its text is anyone's
        return [f"forged: {report.reason}"]
    reason = f": {report.reason}" if report.reason else ""
    lines = [f"{report.outcome.value}{reason} (signed by {receipt.public_key})", _claim(statement)]
    for choice in report.choices:
        counts = counted(choice.num_tokens, "token"), counted(choice.num_ties, "tie")
        line = f"choice {choice.index}: {', '.join(counts)}"
        if choice.num_resumed:
            line += f", the first {choice.num_resumed} supplied by the client and not verified"
        if choice.num_ties:
            line += f" up to {choice.largest_tie:.2g} (tolerance {report.tolerance:g})"
        if (found := choice.impossible) is not None:
            margin = "" if found.margin is None else f", margin {found.margin:.3g}"
            expected = "" if found.expected is None else f", expected {found.expected}"
            line += f"; position {found.position}: token {found.token_id}{expected}{margin}: "
            line += found.reason
        lines.append(line)
    return lines


def _claim(statement: Statement) -> str:
    """Return the model and the settings that a statement claims, without control characters."""
    names = ("name", *_SETTINGS)
    model = ", ".join(f"{name} {getattr(statement.model, name)!r}" for name in names)
    return f"claimed: {model}, seed {statement.seed}, verifier {statement.verifier}"
