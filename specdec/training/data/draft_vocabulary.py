"""The reduced vocabulary of a draft head: the tokens that the target writes most often.

A head with a smaller vocabulary reads a smaller LM head for each draft token. It can never draft
the tokens that are left out, so their share of the target's answers bounds its acceptance.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specdec.models.config.model_config import ModelConfig
from specdec.text.tokenizer import Tokenizer
from specdec.training.data.corpus import Sample
from specdec.types.errors import InvalidValueError


@dataclass(frozen=True, eq=False)
class ReducedVocabulary:
    """The draft vocabulary of a target.

    token_ids: int64 [size], the target's id of each draft token, ascending.
    """

    token_ids: npt.NDArray[np.int64]

    @classmethod
    def of_counts(
        cls, counts: npt.NDArray[np.int64], size: int, always: Iterable[int]
    ) -> ReducedVocabulary:
        """Choose `size` tokens: those of `always`, then the most frequent, then the lowest ids.

        counts: int64 [vocab_size], see `token_counts`. always: special and end tokens, which every
        answer needs. Raises InvalidValueError as `check_size` does.
        """
        kept = np.unique(np.fromiter(always, np.int64))
        check_size(size, len(kept), len(counts))
        order = np.lexsort((np.arange(len(counts)), -counts))
        others = order[~np.isin(order, kept)][: size - len(kept)]
        return cls(np.sort(np.concatenate([kept, others])))

    def renewed(self, counts: npt.NDArray[np.int64], always: Iterable[int]) -> ReducedVocabulary:
        """Return one of the same size, with counted tokens in place of those that count least.

        Tokens of `always` that this one has stay. Of equal counts, own tokens stay before others,
        since their rows are trained. Then the lowest ids stay: byte-pair encodings number their
        tokens in the order of merges, from frequent to rare. counts, always: as in `of_counts`.
        """
        is_own = np.isin(np.arange(len(counts)), self.token_ids)
        kept = np.intersect1d(self.token_ids, np.fromiter(always, np.int64))
        return self.of_counts(2 * counts + is_own, len(self.token_ids), kept.tolist())

    def coverage(self, counts: npt.NDArray[np.int64]) -> float:
        """Return the share of counted tokens that can be drafted; 1 where none are counted."""
        total = int(counts.sum())
        return int(counts[self.token_ids].sum()) / total if total else 1.0


def special_tokens(directory: Path) -> set[int]:
    """Return the special and end tokens of the target in a directory."""
    model = ModelConfig.from_directory(directory)
    return {*Tokenizer(directory).special_token_ids, *model.eos_token_ids}


def check_size(size: int, num_special: int, vocab_size: int) -> None:
    """Raise InvalidValueError for a size below the special tokens or above the vocabulary."""
    least = max(num_special, 1)
    if not least <= size <= vocab_size:
        limit = f"from {least}, the special tokens, to {vocab_size}, the target's"
        raise InvalidValueError("draft_vocab_size", size, limit)


def token_counts(samples: Iterable[Sample], vocab_size: int) -> npt.NDArray[np.int64]:
    """Return how often each token occurs in the answers of samples: int64 [vocab_size].

    Prompts are not counted: a head never drafts them.
    """
    counts = np.zeros(vocab_size, np.int64)
    for sample in samples:
        counts += np.bincount(sample.answer, minlength=vocab_size)
    return counts
