"""Tests of a draft model with another tokenizer, trained on the output of its target SmolLM2."""

import pytest

from specdec.speculation.proposers import DraftVocabulary
from specdec.text.tokenizer import Tokenizer
from specdec.types.request import ChatMessage
from tests.specdec.engines import draft_model, engine_config, local_engine, request, run
from tests.specdec.trained import byte_level, trained_llama_dir

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]

LEARNT = ["a bridge", "bread", "a map", "salt", "a lamp", "paper", "a bicycle", "glass"]
ASKED = ["a river", "wood", "a book"]
LIMITS = {"max_model_len": 256, "num_blocks": 400, "max_num_batched_tokens": 128}


def requests(directory, things, **params):
    tokenizer = Tokenizer(directory)
    prompts = [
        tokenizer.encode_chat(
            [ChatMessage("user", f"Explain in two sentences why {thing} is useful.")]
        )
        for thing in things
    ]
    return [
        request(thing, prompt, seed=index, max_tokens=64, **params)
        for index, (thing, prompt) in enumerate(zip(things, prompts, strict=True))
    ]


@pytest.fixture(scope="module")
def draft_dir(smollm2_dir, tmp_path_factory):
    engine = local_engine(smollm2_dir, engine_config(0, **LIMITS))
    transcripts = run(engine, requests(smollm2_dir, LEARNT, temperature=0.5))
    text = "\n".join(transcript.text for transcript in transcripts.values())
    directory = tmp_path_factory.mktemp("draft")
    return trained_llama_dir(directory, byte_level(text, 600), text, num_steps=300)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_some_drafts_are_accepted_and_the_output_is_unchanged(smollm2_dir, draft_dir, temperature):
    asked = requests(smollm2_dir, ASKED, temperature=temperature)
    plain = run(local_engine(smollm2_dir, engine_config(0, **LIMITS)), asked)
    vocabulary = DraftVocabulary.between(draft_dir, smollm2_dir)
    proposer = draft_model(draft_dir, vocabulary=vocabulary, max_model_len=256, num_blocks=400)
    engine = local_engine(smollm2_dir, engine_config(3, **LIMITS), proposer=proposer)
    drafted = run(engine, asked)
    assert {name: each.token_ids for name, each in drafted.items()} == {
        name: each.token_ids for name, each in plain.items()
    }
    speculation = engine.stats().counts.speculation
    assert speculation.num_draft_tokens > 100
    assert speculation.num_accepted_tokens > 5
