"""`specdec verify` and `specdec receipt-key`."""

import json
from dataclasses import replace

import pytest

from specdec.engine.receipts.signatures import SigningKey, is_signed
from specdec.types.reports.receipts import Receipt
from tests.cluster.cli.conftest import run_cli
from tests.specdec.engines import engine_config, local_engine, request
from tests.specdec.receipts import KEY, SteppedReplayer, answers


@pytest.fixture(scope="module")
def receipt(tiny_model_dir):
    each = request("r", range(5, 20), seed=3, temperature=1.0, max_tokens=20)
    [answer] = answers(local_engine(tiny_model_dir, engine_config(3)), [each])
    return SteppedReplayer(tiny_model_dir, None).receipt(answer)


@pytest.fixture
def verify(tmp_path):
    def run(receipt, *arguments):
        path = tmp_path / "receipt.json"
        path.write_text(json.dumps(receipt.to_mapping()))
        return run_cli("verify", str(path), "--public-key", KEY.public_key, *arguments)

    return run


@pytest.mark.parametrize("implementation", ["specdec", "transformers"])
def test_a_receipt_is_verified_by_the_model_that_it_names(verify, receipt, implementation):
    result = verify(receipt, "--implementation", implementation)
    assert result.exit_code == 0, result.stderr
    verdict, claim, choice = result.stdout.splitlines()
    assert verdict == f"equal (signed by {KEY.public_key})"
    assert "dtype 'float32', quantization 'none'" in claim
    assert claim.endswith("seed 3, verifier coupled")
    assert choice.startswith("choice 0: 20 tokens, 0")


def test_a_wrong_token_is_named(verify, receipt):
    [output] = receipt.opening.outputs
    wrong = changed(receipt, (*output[:9], 300, *output[10:]))
    result = verify(wrong, "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    found = report["choices"][0]["impossible"]
    assert (report["outcome"], found["position"], found["token_id"]) == ("impossible", 9, 300)
    assert found["expected"] == output[9]
    assert f"position 9: token 300, expected {output[9]}, margin" in verify(wrong).stdout


def changed(receipt, output):
    from specdec.types.reports.receipts import Statement
    from tests.specdec.llm.receipts.test_verification import signed

    statement = Statement.from_text(receipt.statement)
    return signed(statement, receipt.opening.prompt_token_ids, (output,))


def test_forged_and_unverifiable_have_different_exit_codes(verify, receipt, tmp_path):
    forged = verify(replace(receipt, signature="00"))
    assert forged.exit_code == 1
    assert forged.stdout == "forged: the signature does not match the statement\n"
    without_tokens = verify(replace(receipt, opening=None))
    assert without_tokens.exit_code == 2
    assert "unverifiable: the receipt has no tokens" in without_tokens.stdout
    path = tmp_path / "other.json"
    path.write_text("[]")
    assert "give --model" in run_cli("verify", str(path)).stderr
    no_key = run_cli("verify", str(path), "--public-key", "x" * 64)
    assert (no_key.exit_code, "64 hexadecimal digits" in no_key.stderr) == (2, True)
    result = run_cli("verify", str(path), "--model", "any")
    assert (result.exit_code, result.stderr) == (
        2,
        "error: receipt is []; it must be a JSON object\n",
    )


def test_a_key_is_made_once(tmp_path):
    path = tmp_path / "key.pem"
    result = run_cli("receipt-key", str(path))
    assert result.stdout == f"{SigningKey.read(path).public_key}\n"
    assert run_cli("receipt-key", str(path)).exit_code == 1
    assert is_signed(Receipt("s", SigningKey.read(path).sign("s"), result.stdout.strip()))
