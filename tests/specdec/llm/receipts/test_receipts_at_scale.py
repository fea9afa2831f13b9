# Modules: specdec.llm.receipts.verification
"""A million tokens that verify, ten thousand forgeries that are found, and what both cost.

Odds of a false alarm. With the kernels that generated it a row of logits has the same bits in any
batch, so an honest token is equal, never a tie: 0 of a million. With another implementation an
honest receipt fails only if the difference of two logits differs by more than the tolerance:
`test_transformers_differs_by_far_less_than_the_tolerance` measures the largest.

Odds of a miss. A changed token is missed only as a tie, with about the probability that another
token is within the tolerance, 1e-3 or less for each, and if no later token shows it. Another seed,
model, temperature or quantization changes each token with a probability of 1 to 99 %: an answer of
400 tokens is missed with less than 0.99^400 = 2 %, and then it has the tokens of the claim.
"""

import asyncio
import random
import time
from dataclasses import replace
from itertools import count

import pytest

from specdec.config.llm import LLMConfig
from specdec.engine.receipts.issuing import Answer
from specdec.engine.receipts.report import Outcome, default_tolerance
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.llm.receipts.transformers_replay import TransformersReplayer
from specdec.llm.receipts.verification import verify_receipt
from specdec.types.reports.receipts import Statement
from specdec.worker import LocalTarget, RankModel, load_target
from tests.specdec.engine.test_methods import METHODS, draft_dirs, engine_for
from tests.specdec.engines import engine_config, local_engine, make_engine, request
from tests.specdec.fakes import run_ranks
from tests.specdec.llm.receipts.test_verification import resigned, signed
from tests.specdec.receipts import SteppedReplayer, answers
from tests.specdec.tiny import tiny_llama_dir

__all__ = ["draft_dirs"]  # a fixture

SAMPLINGS = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20, "min_p": 0.01},
    {"temperature": 0.9, "presence_penalty": 0.5, "repetition_penalty": 1.1},
)
NUM_TOKENS = 100
NUM_REQUESTS = {8: 190, 1: 24}  # by batch size, for each method
NUM_ON_TWO_RANKS = 20


def requests(first, number):
    """Return requests that all differ, with prompts that repeat, so that lookups find drafts."""
    for index in range(first, first + number):
        piece = [(29 * index + 31 * j) % 380 + 3 for j in range(6)]
        sampling = SAMPLINGS[index % len(SAMPLINGS)]
        prompt = piece * (2 + index % 4)
        yield request(f"r{index}", prompt, seed=index, max_tokens=NUM_TOKENS, **sampling)


def verified_tokens(directory, found, replayer):
    """Verify answers; return their number of tokens, all of which must be equal."""
    for each in found:
        report = verify_receipt(replayer.receipt(each), replayer)
        assert report.outcome is Outcome.EQUAL, report
    return sum(len(tokens) for each in found for tokens in each.outputs.values())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("method", METHODS)
def test_tokens_of_every_method_verify(tiny_model_dir, draft_dirs, method, record_property):
    """With all 43, a million tokens: 234 answers of 100 tokens for each."""
    replayer = SteppedReplayer(tiny_model_dir, local_engine(tiny_model_dir, engine_config(0)))
    found, first = [], 0
    for batch_size, number in NUM_REQUESTS.items():
        engine = engine_for(tiny_model_dir, draft_dirs, method, 3, max_num_seqs=batch_size)
        found += answers(engine, list(requests(first, number)))
        first += number

    def on_rank(group):
        engine = engine_for(tiny_model_dir, draft_dirs, method, 3, group)
        return answers(engine, list(requests(first, NUM_ON_TWO_RANKS)))

    found += run_ranks(2, on_rank)[0]
    num_tokens = verified_tokens(tiny_model_dir, found, replayer)
    record_property("num_tokens", num_tokens)
    assert num_tokens == NUM_TOKENS * (sum(NUM_REQUESTS.values()) + NUM_ON_TWO_RANKS)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tokens_verify_after_losses_of_the_target(tiny_model_dir):
    """Every tenth step the target is replaced, and all sequences are computed again."""
    replayer = SteppedReplayer(tiny_model_dir, local_engine(tiny_model_dir, engine_config(0)))
    config = engine_config(3, num_blocks=60)
    engine, given = local_engine(tiny_model_dir, config), list(requests(0, 200))
    found = {each.request_id: Answer(each) for each in given}
    for each in given:
        engine.add(each)
    for step in count():
        if not engine.has_work:
            break
        if step % 10 == 9:
            runner = load_target(
                RankModel(tiny_model_dir, "float32", config), TensorParallelGroup()
            )
            engine.replace_target(LocalTarget(runner))
        for output in engine.step():
            found[output.request_id].add(output)
    assert engine.stats().counts.num_preemptions > 100
    assert verified_tokens(tiny_model_dir, found.values(), replayer) == 200 * NUM_TOKENS


LENGTH = 400
CLAIMED = {"temperature": 0.8, "max_tokens": LENGTH}
NUM_CHANGED, NUM_OTHER = 6000, 1000


@pytest.fixture(scope="module")
def long_answers(tiny_model_dir, tmp_path_factory):
    """Return a replayer, and answers of 400 tokens: honest, of another model, and of int8."""
    config = engine_config(0, max_model_len=512, num_blocks=1400)
    engine = local_engine(tiny_model_dir, config)
    replayer = SteppedReplayer(tiny_model_dir, engine, 512)
    other = tiny_llama_dir(tmp_path_factory.mktemp("other"), seed=1)
    given = [
        request(
            f"r{index}", [(7 * index + 3 * j) % 380 + 3 for j in range(9)], seed=index, **CLAIMED
        )
        for index in range(100)
    ]
    return (
        replayer,
        answers(engine, given),
        answers(local_engine(other, config), given),
        answers(local_engine(tiny_model_dir, config, quantization="int8"), given),
    )


def num_found(replayer, receipts):
    """Return how many receipts are found to be impossible."""
    outcomes = [verify_receipt(each, replayer).outcome for each in receipts]
    assert Outcome.UNVERIFIABLE not in outcomes
    return outcomes.count(Outcome.IMPOSSIBLE)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("share", range(6))
def test_changed_tokens_are_found(long_answers, share):
    """Each of 6,000 changes, at its position, or after it where the changed token is a tie."""
    replayer, honest, _, _ = long_answers
    chance = random.Random(share)
    for _ in range(NUM_CHANGED // 6):
        receipt = replayer.receipt(chance.choice(honest))
        position, token = chance.randrange(LENGTH), chance.randrange(3, 380)
        if receipt.opening.outputs[0][position] == token:
            continue
        report = verify_receipt(resigned(receipt, token_at={position: token}), replayer)
        assert report.outcome is Outcome.IMPOSSIBLE
        assert report.choices[0].impossible.position >= position


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("change", ["seed", "temperature", "model", "quantization"])
def test_other_claims_are_found(long_answers, change):
    """1,000 of each; answers of another model or quantization are cut to different lengths."""
    replayer, honest, other, quantized = long_answers
    receipts, chance = [], random.Random(7)
    for index in range(NUM_OTHER):
        answer = {"model": other, "quantization": quantized}.get(change, honest)[index % 100]
        receipt = replayer.receipt(answer)
        statement = Statement.from_text(receipt.statement)
        if change == "seed":
            forged = resigned(receipt, seed=chance.randrange(2**63))
        elif change == "temperature":
            temperature = 0.8 + chance.choice((-1, 1)) * chance.uniform(0.05, 0.4)
            parameters = {**statement.parameters, "temperature": temperature}
            forged = resigned(receipt, parameters=parameters)
        else:
            end = LENGTH - index // 100
            parameters = {**statement.parameters, "max_tokens": end}
            prompt, outputs = receipt.opening.prompt_token_ids, receipt.opening.outputs
            short = replace(statement, parameters=parameters)
            forged = signed(short, prompt, (outputs[0][:end],))
        receipts.append(forged)
    assert num_found(replayer, receipts) == NUM_OTHER


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "quantization"), [("float32", None), ("float32", "int8"), ("bfloat16", None)]
)
def test_other_kernels_stay_within_the_tolerance(tiny_model_dir, dtype, quantization):
    """2,400 tokens of the C++ decoder, replayed by torch."""
    config = engine_config(0)

    def engine_with(kernels):
        group = TensorParallelGroup()
        runner = load_target(
            RankModel(tiny_model_dir, dtype, config, quantization=quantization, kernels=kernels),
            group,
        )
        return make_engine(tiny_model_dir, config, LocalTarget(runner))

    replayer = SteppedReplayer(tiny_model_dir, engine_with("torch"))
    tolerance = default_tolerance(dtype, quantization or "none", "auto")
    found = answers(engine_with("native"), list(requests(0, 24)))
    reports = [verify_receipt(replayer.receipt(each), replayer, tolerance=100) for each in found]
    choices = [each.choices[0] for each in reports]
    largest = max(each.largest_tie for each in choices)
    print(dtype, quantization, "ties:", sum(each.num_ties for each in choices), largest)
    assert largest < tolerance


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_transformers_differs_by_far_less_than_the_tolerance(tiny_model_dir, long_answers):
    """40,000 tokens: no ties beyond a tenth of the tolerance, so no false alarm."""
    config = LLMConfig(
        model=str(tiny_model_dir), speculative_config=None, device="cpu", max_model_len=512
    )
    transformers = TransformersReplayer(tiny_model_dir, config)
    replayer, honest, _, _ = long_answers
    reports = [verify_receipt(replayer.receipt(each), transformers) for each in honest]
    assert all(each.is_verified for each in reports)
    assert max(each.choices[0].largest_tie for each in reports) < 1e-4


async def issued(replayer, each, outputs):
    """Record outputs as a Router does, one by one in a generator, and issue the receipt."""

    async def stream():
        for output in outputs:
            yield output

    async def recording(answer, stream):
        async for output in stream:
            answer.add(output)
            yield output

    answer = Answer(each)
    async for _ in recording(answer, stream()):
        pass
    return replayer.receipt(answer)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_cost_of_verification_and_of_issuing(tmp_path_factory):
    """Verification of 1,000 tokens takes a fifth of generating them; issuing 0.5 % of the CPU."""
    directory = tiny_llama_dir(tmp_path_factory.mktemp("long"), layers=6, max_positions=2048)
    config = engine_config(0, max_model_len=1200, num_blocks=400, max_num_batched_tokens=256)
    engine = local_engine(directory, config)
    replayer = SteppedReplayer(directory, engine, 1200)
    each = request("r", range(5, 30), seed=1, temperature=0.8, max_tokens=1000)
    seconds = {"generate": [], "issue": [], "verify": []}
    for _ in range(3):
        outputs, began_s = [], time.process_time()
        engine.add(each)
        while engine.has_work:
            outputs += engine.step()
        generated_s = time.process_time()
        receipt = asyncio.run(issued(replayer, each, outputs))
        issued_s = time.process_time()
        assert verify_receipt(receipt, replayer).outcome is Outcome.EQUAL
        seconds["generate"].append(generated_s - began_s)
        seconds["issue"].append(issued_s - generated_s)
        seconds["verify"].append(time.process_time() - issued_s)
    best = {name: min(each) for name, each in seconds.items()}
    print(best)
    assert best["verify"] < best["generate"] / 5
    assert best["issue"] < best["generate"] * 0.005
