import numpy as np
import pytest

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
