"""An `LLM` on a tiny checkpoint of each family, as a service loads it, generates text."""

import pytest

from specdec import LLM, SamplingParams
from tests.specdec.llm.models import arguments
from tests.specdec.models.families import FAMILIES, save_family
from tests.specdec.models.hybrid_families import HYBRIDS
from tests.specdec.tiny import train_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES | HYBRIDS)
def test_a_tiny_checkpoint_is_served(tmp_path, family):
    save_family(tmp_path, family)
    train_tokenizer(383).save_pretrained(tmp_path)
    texts = []
    for speculation in (None, {"method": "ngram", "num_speculative_tokens": 3}):
        given = arguments(tmp_path, kernels="auto", speculative_config=speculation)
        with LLM(**given) as llm:
            outputs = llm.generate(["The river begins", "Ask the baker, ask"], GREEDY)
        texts.append([output.outputs[0].token_ids for output in outputs])
    assert texts[0] == texts[1]
    assert all(len(tokens) == 16 for tokens in texts[0])
