import numpy as np
import pytest

from specdec.sampling_params import StructuredOutput
from specdec.structured_output import GrammarCompiler
from specdec.tokenizer import Tokenizer
from tests.specdec.structured_output.vocabulary import EOS, VOCAB_SIZE, TinyVocabulary


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
