"""Grammar compilers for tests of what applies grammars, but not of their compilation."""

from __future__ import annotations

from pathlib import Path

from specdec.models.config.model_config import ModelConfig
from specdec.text.grammar.compiler import GrammarCompiler
from tests.specdec.shared_tokenizers import tokenizer_of


def grammar_compiler(directory: Path) -> GrammarCompiler:
    """Return the compiler of a model, as a draft worker has it: without processes and time limit.

    The three processes for trials cost 0.9 s of CPU time for each compiler.
    """
    model = ModelConfig.from_directory(directory)
    return GrammarCompiler(
        tokenizer_of(directory),
        model.vocab_size,
        model.eos_token_ids,
        tries_first=False,
    )
