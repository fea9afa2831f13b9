"""Receipts of answers of engines that are stepped by tests, and their replay there."""

from collections.abc import Sequence
from pathlib import Path

from specdec.config.llm import LLMConfig
from specdec.engine.engine import Engine
from specdec.engine.receipts.issuing import Answer, issue
from specdec.engine.receipts.model import receipt_model
from specdec.engine.receipts.signatures import SigningKey
from specdec.engine.requests.replays import replay_request
from specdec.models.config.model_config import ModelConfig
from specdec.sequences.sequence import EngineRequest
from specdec.text.tokenizer import Tokenizer
from specdec.types.messages import Logprobs
from specdec.types.reports.receipts import Receipt
from specdec.types.sampling.sampling_spec import Replay

KEY = SigningKey.generate()
MAX_MODEL_LEN = 160


def answers(engine: Engine, requests: Sequence[EngineRequest]) -> list[Answer]:
    """Run requests together; return their answers in order."""
    found = {each.request_id: Answer(each) for each in requests}
    for each in requests:
        engine.add(each)
    while engine.has_work:
        for output in engine.step():
            found[output.request_id].add(output)
    return list(found.values())


class SteppedReplayer:
    """Replays outputs by an engine of a model in `directory`, one at a time; see Replayer."""

    def __init__(self, directory: Path, engine: Engine, max_model_len: int = MAX_MODEL_LEN) -> None:
        self.engine = engine
        self.model, self.tokenizer = ModelConfig.from_directory(directory), Tokenizer(directory)
        config = LLMConfig(model=str(directory), speculative_config=None, device="cpu")
        self.receipt_model = receipt_model(config, directory, self.model, max_model_len)

    def grammar(self, spec):
        raise AssertionError("no test has a grammar here")

    def replay(self, request: EngineRequest, replay: Replay) -> Logprobs:
        self.engine.add(replay_request(request, replay))
        outputs = []
        while self.engine.has_work:
            outputs += self.engine.step()
        assert len(outputs) == 1, "it ends with its first token"
        return outputs[0].prompt_logprobs

    def receipt(self, answer: Answer) -> Receipt:
        """Issue a receipt that states this model."""
        return issue(answer, KEY, self.receipt_model, self.model.sampling_defaults, 0)
