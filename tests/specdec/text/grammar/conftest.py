import threading

import numpy as np
import pytest

import specdec.text.grammar.compiler as compiler_module
from specdec.text.grammar.compiler import GrammarCompiler
from specdec.text.tokenizer import Tokenizer
from specdec.types.sampling.sampling_params import StructuredOutput
from tests.specdec.text.grammar.vocabulary import EOS, VOCAB_SIZE, TinyVocabulary


@pytest.fixture(scope="session")
def tokenizer(tiny_model_dir):
    return Tokenizer(tiny_model_dir)


@pytest.fixture(scope="session")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, VOCAB_SIZE, EOS)


@pytest.fixture(scope="session")
def vocabulary(tokenizer):
    return TinyVocabulary(tokenizer)


@pytest.fixture
def matcher(compiler):
    return lambda **spec: compiler.compile(StructuredOutput(**spec)).matcher()


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def counted(tokenizer, monkeypatch):
    """A separate compiler that counts its compilations and blocks them at a gate."""
    gate, calls = threading.Event(), []
    compile_now = compiler_module.first_matcher

    def first_matcher(llguidance_tokenizer, spec):
        calls.append(spec)
        assert gate.wait(60)
        return compile_now(llguidance_tokenizer, spec)

    monkeypatch.setattr(compiler_module, "first_matcher", first_matcher)
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, EOS, tries_first=False)
    yield compiler, gate, calls
    gate.set()
    compiler.close()
