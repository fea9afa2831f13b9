"""A corpus of the target's own answers, stored as token ids.

A corpus is a directory. `corpus.json` holds its `CorpusInfo`. Each `shard-NNNNN.safetensors` holds
finished samples: the token ids one after the other, and for each sample the number of its tokens
and of its prompt's tokens, its temperature, and the request that it answers; and the requests that
ended without a sample. Files appear whole, by a rename, and never change. So a sample keeps its
index while the corpus grows, a reader sees the shards that exist when it opens the directory, and a
writer that was killed loses only the samples that it had not yet added.

Nothing else is stored: features and teacher distributions are computed from the token ids while a
drafter is trained, in the precision that will be served.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self, overload

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from specdec.training.atomic_files import sole_writer, write_atomically
from specdec.types.errors import InvalidValueError, SpecdecError

_INFO, _LOCK = "corpus.json", ".writer.lock"
_FORMAT = 1
DRAW_LIMIT = 2**64
_OF_TARGET = ("target_hash", "vocab_size", "chat_template")


class CorpusError(SpecdecError):
    """The files of a corpus are missing or not valid."""


@dataclass(frozen=True)
class Sample:
    """One answer of the target, as served: the chat template is applied.

    token_ids: prompt and answer, with the token that ended it.
    num_prompt_tokens: the rest is the target's own answer.
    temperature: at which the answer was drawn.
    """

    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    temperature: float

    @property
    def prompt(self) -> tuple[int, ...]:
        """The tokens before the answer."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def answer(self) -> tuple[int, ...]:
        """The target's own tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    def draw(self, seed: int) -> int:
        """Return a number from 0 to below DRAW_LIMIT that the prompt and the seed determine."""
        prompt, salt = np.array(self.prompt, np.int32).tobytes(), seed.to_bytes(8, "little")
        key = hashlib.blake2b(prompt, digest_size=8, person=b"split", salt=salt)
        return int.from_bytes(key.digest(), "little")


@dataclass(frozen=True)
class CorpusInfo:
    """Origin of a corpus's samples. A corpus is continued with the same values only.

    target: name of the model. target_hash: its `model_fingerprint`.
    vocab_size: token ids are below it.
    chat_template: its source text.
    dtype, quantization: the precision that answered.
    plan: further settings by name, as JSON: prompts, temperatures, lengths, seed.
    """

    target: str
    target_hash: str
    vocab_size: int
    chat_template: str
    dtype: str
    quantization: str
    plan: Mapping[str, Any] = field(default_factory=dict)

    def check_same(self, other: CorpusInfo) -> None:
        """Raise InvalidValueError for the first value in which `other` differs."""
        for name in (each.name for each in fields(self) if each.name != "plan"):
            _require_equal(name, getattr(self, name), getattr(other, name))
        for name in sorted(self.plan.keys() | other.plan.keys()):
            _require_equal(name, self.plan.get(name), other.plan.get(name))


def _require_equal(name: str, existing: object, given: object) -> None:
    if existing != given:
        limit = f"{repr(existing)[:80]}, as in the existing corpus; use another directory"
        raise InvalidValueError(name, given, limit)


@dataclass(frozen=True)
class Shard:
    """The samples of one file, as arrays.

    token_ids: int32 [num_tokens]. ends: int64 [num_samples], where each sample's tokens end.
    num_prompt_tokens: int32 [num_samples]. temperatures: float32 [num_samples].
    requests: int64 [num_samples], the requests that they answer. The turns of a conversation are
        one request, and follow each other.
    dropped: int64 [num_dropped], requests that ended without a sample.
    """

    token_ids: npt.NDArray[np.int32]
    ends: npt.NDArray[np.int64]
    num_prompt_tokens: npt.NDArray[np.int32]
    temperatures: npt.NDArray[np.float32]
    requests: npt.NDArray[np.int64]
    dropped: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    @classmethod
    def of(
        cls, samples: Sequence[Sample], requests: Sequence[int], dropped: Sequence[int] = ()
    ) -> Self:
        """Pack samples, the requests that they answer, and requests without a sample."""
        lengths = [len(each.token_ids) for each in samples]
        return cls(
            np.fromiter((t for each in samples for t in each.token_ids), np.int32, sum(lengths)),
            np.cumsum(lengths, dtype=np.int64),
            np.array([each.num_prompt_tokens for each in samples], np.int32),
            np.array([each.temperature for each in samples], np.float32),
            np.array(requests, np.int64),
            np.array(dropped, np.int64),
        )

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file. Raises CorpusError."""
        try:
            shard = cls(**load_file(path))
        except (OSError, SafetensorError, TypeError) as error:
            raise CorpusError(f"{path} is not a shard of a corpus: {error}") from error
        shard._check(path)
        return shard

    def to_bytes(self) -> bytes:
        """Return the content of its file."""
        return save(vars(self))

    def __len__(self) -> int:
        return len(self.ends)

    def sample(self, index: int) -> Sample:
        """Return the sample at a place from 0 to len() - 1."""
        begin = int(self.ends[index - 1]) if index else 0
        token_ids = self.token_ids[begin : int(self.ends[index])]
        # Through text, so that a temperature of 0.7 is 0.7 again and not 0.699999988.
        temperature = float(str(self.temperatures[index]))
        return Sample(tuple(token_ids.tolist()), int(self.num_prompt_tokens[index]), temperature)

    def first_turn(self, index: int) -> Sample:
        """Return the first sample of the conversation of `sample(index)`."""
        while index and self.requests[index - 1] == self.requests[index]:
            index -= 1
        return self.sample(index)

    def _check(self, path: Path) -> None:
        lengths = np.diff(self.ends, prepend=0)
        rows = {len(self.ends), *map(len, (self.num_prompt_tokens, self.temperatures))}
        whole = len(rows) == 1 and len(self.requests) == len(self.ends)
        if not whole or int(lengths.sum()) != len(self.token_ids):
            raise CorpusError(f"{path} is not a shard of a corpus: its arrays do not match")
        if (self.num_prompt_tokens < 1).any() or (self.num_prompt_tokens >= lengths).any():
            raise CorpusError(f"{path} has a sample without a prompt or an answer")


class Corpus(Sequence[Sample]):
    """A read-only sequence of samples: those of a directory when it was opened, or some of them."""

    def __init__(
        self, info: CorpusInfo, shards: Sequence[Shard], places: npt.NDArray[np.int64]
    ) -> None:
        """places: int64 [num_samples, 2], shard and index in it of each sample."""
        self.info = info
        self._shards = shards
        self._places = places

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Open the samples that a directory holds now. Raises CorpusError."""
        info = read_info(directory)
        shards = [Shard.read(path) for path in shard_paths(directory)]
        places = [(place, index) for place, each in enumerate(shards) for index in range(len(each))]
        return cls(info, shards, np.array(places, np.int64).reshape(-1, 2))

    @classmethod
    def join(cls, corpora: Sequence[Corpus]) -> Corpus:
        """Return the samples of one corpus or several, one corpus after the other.

        The plan of several is a list of theirs, with their precisions. Raises InvalidValueError
        where they are answers of different targets.
        """
        first, *others = corpora
        if not others:
            return first
        for name in _OF_TARGET:
            for each in others:
                _require_equal(name, getattr(first.info, name), getattr(each.info, name))
        shards, places = list[Shard](), []
        for each in corpora:
            places.append(each._places + np.array([len(shards), 0]))
            shards += each._shards
        plans = [
            {"dtype": each.info.dtype, "quantization": each.info.quantization, **each.info.plan}
            for each in corpora
        ]
        return cls(replace(first.info, plan={"corpora": plans}), shards, np.concatenate(places))

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> Corpus: ...

    def __getitem__(self, index: int | slice) -> Sample | Corpus:
        if isinstance(index, slice):
            return self._part(self._places[index])
        shard, row = self._places[index]
        return self._shards[int(shard)].sample(int(row))

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of all prompts and answers."""
        return sum(len(each.token_ids) for each in self)

    @cached_property
    def num_answer_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(each.answer) for each in self)

    @property
    def temperatures(self) -> tuple[float, ...]:
        """The temperatures that occur, ascending."""
        return tuple(sorted({each.temperature for each in self}))

    def split(self, held_out: float, seed: int) -> tuple[Corpus, Corpus]:
        """Return the samples to train on, and about a share `held_out` of them to evaluate on.

        The side of a sample depends on the first turn of its conversation and the seed alone. So
        all answers to a prompt and all turns of a conversation are on one side, and no sample
        changes sides while the corpus grows. At least one prompt is held out unless the share is 0.
        Raises InvalidValueError where no sample is left to train on.
        """
        if not 0 <= held_out < 1:
            raise InvalidValueError("held_out", held_out, "from 0 to below 1")
        firsts = (self._shards[shard].first_turn(row) for shard, row in self._places.tolist())
        draws = np.array([each.draw(seed) / DRAW_LIMIT for each in firsts])  # [num_samples]
        least = draws.min(initial=1.0)
        is_held_out = (draws < held_out) | ((draws == least) & (held_out > 0))
        if is_held_out.all():
            limit = "of at least two different prompts, so that one is left to train on"
            raise InvalidValueError("corpus", f"{len(self)} samples", limit)
        return self._part(self._places[~is_held_out]), self._part(self._places[is_held_out])

    def _part(self, places: npt.NDArray[np.int64]) -> Corpus:
        return Corpus(self.info, self._shards, places)


class CorpusWriter:
    """Appends shards to a corpus, which it creates if necessary. One writer at a time.

    requests: those with a stored sample, or known to have none, of this writer and of earlier ones.
    """

    def __init__(self, directory: Path, info: CorpusInfo) -> None:
        """Open a directory for `info`.

        Raises InvalidValueError where it holds a corpus of other settings, DirectoryInUseError
        where another process writes to it.
        """
        self._directory = directory
        with ExitStack() as held:
            held.enter_context(sole_writer(directory / _LOCK, "writes to the corpus"))
            self._open(info)
            self._held = held.pop_all()

    def _open(self, info: CorpusInfo) -> None:
        if (self._directory / _INFO).exists():
            read_info(self._directory).check_same(info)
        else:
            content = {"format": _FORMAT, **asdict(info)}
            text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
            write_atomically(self._directory / _INFO, text.encode())
        paths = shard_paths(self._directory)
        shards = map(Shard.read, paths)
        self.requests = {
            request
            for each in shards
            for request in (*each.requests.tolist(), *each.dropped.tolist())
        }
        self._next = 1 + max((int(path.stem.rpartition("-")[2]) for path in paths), default=-1)

    def add(
        self, samples: Sequence[Sample], requests: Sequence[int], dropped: Sequence[int] = ()
    ) -> None:
        """Store samples as one shard, durably; `requests` are those that they answer.

        dropped: requests that ended without a sample, so that no later writer runs them again.
        """
        if not (samples or dropped):
            return
        path = self._directory / f"shard-{self._next:05}.safetensors"
        write_atomically(path, Shard.of(samples, requests, dropped).to_bytes())
        self._next += 1
        self.requests.update(requests, dropped)

    def prompts(self, is_wanted: Callable[[int], bool]) -> Iterator[tuple[int, ...]]:
        """Yield the token ids of the prompts of all stored samples of some requests."""
        for shard in map(Shard.read, shard_paths(self._directory)):
            for index, request in enumerate(shard.requests.tolist()):
                if is_wanted(request):
                    yield shard.sample(index).prompt

    def close(self) -> None:
        """Let another writer open the corpus."""
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def shard_paths(directory: Path) -> list[Path]:
    """Return the files with samples, in the order of the samples."""
    return sorted(directory.glob("shard-*.safetensors"))


def read_info(directory: Path) -> CorpusInfo:
    """Return what determines the samples of a corpus. Raises CorpusError."""
    path = directory / _INFO
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
        found = content.pop("format")
        if found != _FORMAT:
            raise CorpusError(f"{path} has format {found!r}; supported is {_FORMAT}")
        return CorpusInfo(**content)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorpusError(f"{directory} is not a corpus: {error}") from error
