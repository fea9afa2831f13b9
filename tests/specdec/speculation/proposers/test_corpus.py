"""The static corpus of suffix decoding: what it drafts, for which tenants, and its file."""

import json

import pytest

from specdec import LLM, SamplingParams
from specdec.config.speculation.methods import SuffixConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.config.speculative_keys import read_speculation
from specdec.speculation.proposers import corpus, load_corpora, make_proposer, proposer_memory
from specdec.speculation.proposers.suffix import SuffixProposer
from specdec.types.errors import InvalidValueError
from tests.specdec.llm.models import arguments
from tests.specdec.speculation.proposers.sequences import drafts, sequence

STORY = list(range(40, 60))


def encode(text):
    return [int(each) for each in text.split()]


def corpus_file(tmp_path, *texts):
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(json.dumps(each) for each in texts) + "\n\n")
    return str(path)


def text_of(tokens, **more):
    return {"text": " ".join(map(str, tokens)), **more}


def proposer(path):
    made = SuffixProposer(SuffixConfig(lookup_corpus=path, suffix_decoding_max_spec_factor=4.0))
    made.load_corpus(encode)
    return made


def test_a_text_of_the_corpus_is_drafted(tmp_path):
    made = proposer(corpus_file(tmp_path, text_of(STORY)))
    assert drafts(made, sequence(1, [1, 2, *STORY[:3]])) == [tuple(STORY[3:10])]
    assert made.corpus.num_tokens == len(STORY)
    without = SuffixProposer(SuffixConfig())
    without.load_corpus(encode)
    assert drafts(without, sequence(1, [1, 2, *STORY[:3]])) == [()]


def test_a_text_with_a_salt_is_for_its_tenant(tmp_path):
    path = corpus_file(tmp_path, text_of(STORY, cache_salt="a"), text_of([7, 8, 9, 10]))
    made = proposer(path)
    mine, other = sequence(1, STORY[:3], cache_salt="a"), sequence(2, STORY[:3], cache_salt="b")
    assert [bool(each) for each in drafts(made, mine, other)] == [True, False]
    shared = [sequence(seq_id, [7, 8], cache_salt=salt) for seq_id, salt in ((3, "a"), (4, "b"))]
    assert drafts(made, *shared) == [(9, 10)] * 2


def test_corpora_of_a_cascade_are_loaded(tmp_path):
    path = corpus_file(tmp_path, text_of(STORY))
    keys = {"method": "suffix", "lookup_corpus": path, "fallback": "ngram"}
    config = read_speculation(keys)
    made = make_proposer(config)
    load_corpora(made, encode)
    assert made.proposers[0].corpus.num_tokens == len(STORY)
    load_corpora(None, encode)
    plain = SpeculativeConfig.of("suffix")
    assert proposer_memory(config).fixed_bytes > proposer_memory(plain).fixed_bytes


def test_a_text_may_have_unicode_line_separators(tmp_path):
    texts = ["1\u2028 2", "3\u2029 4\x85", "5"]
    path = tmp_path / "corpus.jsonl"
    lines = [json.dumps({"text": each}, ensure_ascii=False) for each in texts]
    path.write_bytes("\r\n".join(lines).encode())
    assert [each.text for each in corpus.read_corpus(str(path))] == texts


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is '{'; it must be a JSON object such as"),
        ('"a"', "it must be a JSON object such as"),
        ('{"text": 3}', "it must be a JSON object such as"),
        ('{"text": "a", "salt": "b"}', "it must be a JSON object such as"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, message):
    path = tmp_path / "corpus.jsonl"
    path.write_text(f'{{"text": "1"}}\n{line}\n')
    with pytest.raises(InvalidValueError, match=message):
        proposer(str(path))


def test_a_missing_file_and_one_that_is_too_large_are_refused(tmp_path, monkeypatch):
    with pytest.raises(InvalidValueError, match=r"lookup_corpus is .* a readable file"):
        proposer(str(tmp_path / "absent.jsonl"))
    monkeypatch.setattr(corpus, "MAX_CORPUS_TOKENS", 19)
    with pytest.raises(InvalidValueError, match="at most 19 tokens in all"):
        proposer(corpus_file(tmp_path, text_of(STORY)))


def test_other_methods_have_no_corpus():
    with pytest.raises(InvalidValueError, match="unless method, first or fallback is suffix"):
        read_speculation({"method": "ngram", "lookup_corpus": "a.jsonl"})


def test_an_llm_drafts_from_its_corpus_and_changes_no_token(tiny_model_dir, tmp_path):
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompt = "Every spring the river"
    speculation = {"method": "suffix", "num_speculative_tokens": 7, "policy": "threshold"}
    with LLM(**arguments(tiny_model_dir, speculative_config=speculation)) as llm:
        [before] = llm.generate(prompt, greedy, use_tqdm=False)
    path = corpus_file(tmp_path, {"text": before.outputs[0].text})
    with_corpus = {**speculation, "lookup_corpus": path}
    with LLM(**arguments(tiny_model_dir, speculative_config=with_corpus)) as llm:
        [after] = llm.generate(prompt, greedy, use_tqdm=False)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids
    assert after.speculation.num_accepted_tokens > before.speculation.num_accepted_tokens
