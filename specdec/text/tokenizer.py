"""The tokenizer of a model directory: text to token ids and back."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.text.byte_level import bytes_of_token
from specdec.text.chat_template import ChatTemplate, template_of_processor
from specdec.text.quoted_tokens import RenderedChat
from specdec.text.tiktoken_model import TIKTOKEN_MODEL, with_tokenizer_json
from specdec.types.errors import InvalidValueError, UnsupportedModelError, reason_of
from specdec.types.request import CHAT_ROLES, ChatMessage, Conversation

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


MAX_RENDERED_CHARS = 1_000_000
"""Limit of a rendered conversation; encoding this many characters takes a second."""

_VOCABULARIES = ("*.model", "vocab.*", "*.tiktoken", "tekken.json")
"""Files of older and other formats, from which a tokenizer may be made."""

_loading = threading.Lock()
"""Held while loading: the lazy imports of transformers are not thread-safe."""


class WholeTexts(dict[int, str | None]):
    """Text of each token of a byte-level tokenizer, decoded when it is first read.

    None for a token whose bytes are not whole characters.
    """

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of

    def __missing__(self, token_id: int) -> str | None:
        try:
            text = self._bytes_of(token_id).decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


class Tokenizer:
    """A fast tokenizer loaded from local files; code of a model repository is never run.

    Thread-safe, and can be pickled. Truncation and padding that the files configure are disabled: a
    prompt is encoded whole, and its length is checked later.

    transformers: the tokenizer of transformers, for features that only it has.
    vocab_size: the highest token id plus 1; a model's own vocabulary may be padded beyond it.
    special_token_ids: control tokens, such as the end of a turn.
    blank_token_ids: unassigned ids below vocab_size.
    end_token_id: the end-of-sequence token, if the files define one.
    is_byte_level: whether decoded text is the concatenated `token_bytes`, as UTF-8.
    """

    def __init__(self, directory: Path, chat_template: str | None = None) -> None:
        """Load the tokenizer; raises UnsupportedModelError if there is no fast tokenizer.

        chat_template: source of a template that replaces the model's.
        """
        loaded = _load(directory)
        if chat_template is not None:
            loaded.chat_template = chat_template
        self._wrap(loaded)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without caches. Reading it does not import torch, as loading some files does."""
        return _wrapped, (self.transformers,)

    def _wrap(self, loaded: Any) -> None:
        from tokenizers.decoders import ByteLevel

        self.transformers = loaded
        self._backend: Backend = loaded.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.chat_template = ChatTemplate(self.transformers)
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        added = self._backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, t in added.items() if t.special)
        assigned = {token_id for text, token_id in vocabulary.items() if text}
        self.blank_token_ids = frozenset(range(self.vocab_size)) - assigned
        self.is_byte_level = isinstance(self._backend.decoder, ByteLevel)
        self.end_token_id: int | None = self.transformers.eos_token_id
        self._token_bytes: dict[int, bytes] = {}  # filled on demand
        self.whole_texts = WholeTexts(self.token_bytes)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Token ids by the string of each token."""
        return dict(self._backend.get_vocab(with_added_tokens=True))

    @property
    def decoder(self) -> Any:
        """The decoder, in the format of tokenizer.json."""
        decoder = self._backend.decoder
        return None if decoder is None else json.loads(decoder.__getstate__())

    @property
    def added_strings(self) -> frozenset[str]:
        """Strings of the tokens that were added to the model's vocabulary."""
        return frozenset(each.content for each in self._backend.get_added_tokens_decoder().values())

    @cached_property
    def hidden_token_ids(self) -> frozenset[int]:
        """Ids of the special tokens, and of those without text."""
        return self.special_token_ids | self.blank_token_ids

    @cached_property
    def special_token_strings(self) -> Mapping[int, str]:
        """Strings of the special tokens, by id."""
        token_ids = sorted(self.special_token_ids)
        strings = zip(token_ids, self.token_strings(token_ids), strict=True)
        return {token_id: string for token_id, string in strings if string}

    def token_id(self, token: str) -> int | None:
        """Return the id of a token string; None if the vocabulary lacks it."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def to_json(self) -> str:
        """Return the tokenizer in the format of tokenizer.json, including added tokens."""
        return self._backend.to_str()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; special tokens written in the text are recognized.

        add_special_tokens: whether to add the tokens that the model expects, such as a
        beginning-of-sequence token. Raises InvalidValueError for a lone surrogate in `text`.
        """
        _require_unicode("text", text)
        # The batch call releases the GIL.
        [encoded] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoded.ids

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the prompt of `messages`, rendered with the model's chat template.

        A template may add messages; SmolLM2's adds a system message before a first user message.
        Raises InvalidValueError for a malformed message, for messages that the template rejects,
        and if the model has no template.
        """
        _check_messages(messages)
        turns = tuple({"role": each.role, "content": each.content} for each in messages)
        return self.encode_conversation(Conversation(turns))

    def encode_conversation(self, conversation: Conversation) -> list[int]:
        """Return the prompt of a conversation with tools or template variables; see `render`."""
        return self.encode_rendered(self.render(conversation))

    def encode_rendered(self, chat: RenderedChat) -> list[int]:
        """Return the prompt of a rendered conversation. Raises InvalidValueError as `encode`."""
        if not chat.quoted_at:
            return self.encode(chat.text, add_special_tokens=False)
        _require_unicode("text", chat.text)
        return chat.encode(self._backend)

    def render(self, conversation: Conversation) -> RenderedChat:
        """Render a conversation with the chat template, including special tokens.

        The template validates the roles. Raises InvalidValueError if it fails, or if the text is
        longer than MAX_RENDERED_CHARS, including tools, arguments and variables.
        """
        chat = self.chat_template.render(conversation)
        if len(chat.text) > MAX_RENDERED_CHARS:
            limit = f"at most {MAX_RENDERED_CHARS} characters, as the chat template writes them"
            raise InvalidValueError("messages length", len(chat.text), limit)
        return chat

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; invalid UTF-8 becomes U+FFFD.

        Ids outside the vocabulary, which a padded model may generate, are empty.
        """
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def decode_long(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text as `decode` does, but release the GIL while it is made."""
        [text] = self._backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return text

    def text_of_token(self, token_id: int) -> str:
        """Return the text of a token within a text, where SentencePiece keeps its first space."""
        alone = self.decode((token_id,), skip_special_tokens=False)
        if self.is_byte_level:
            return alone
        return self.decode((token_id, token_id), skip_special_tokens=False)[len(alone) :]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token of a byte-level tokenizer; empty for an unassigned id."""
        found = self._token_bytes.get(token_id)
        if found is None:
            token = self._backend.id_to_token(token_id) or ""
            found = self._token_bytes[token_id] = bytes_of_token(token)
        return found

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Return the string of each token; empty for an unassigned id."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidValueError, with the index, if an id is not in 0 to vocab_size - 1."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            limit = f"a token id from 0 to {vocab_size - 1}"
            raise InvalidValueError(f"{field}[{index}]", token_id, limit)


def _wrapped(loaded: Any) -> Tokenizer:
    """Return a tokenizer that has been pickled."""
    tokenizer = Tokenizer.__new__(Tokenizer)
    tokenizer._wrap(loaded)
    return tokenizer


def check_tokenizer(directory: Path) -> None:
    """Raise UnsupportedModelError for files that hold no tokenizer.

    Reads tokenizer.json alone where there is one: `Tokenizer` imports transformers, which takes
    seconds.
    """
    from tokenizers import Tokenizer as Backend

    path = directory / "tokenizer.json"
    if not path.is_file():
        _load(directory)
        return
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises no other type
        raise UnsupportedModelError(f"{path} holds no tokenizer: {reason_of(error)}") from error
    if not _has_vocabulary(backend):
        raise UnsupportedModelError(f"{path} holds no tokenizer: its vocabulary is empty")


def _has_vocabulary(backend: Backend) -> bool:
    """Return whether there are tokens beside the added ones.

    Without the files that they read, classes of transformers make tokenizers of the added tokens
    alone, some with one piece for spaces.
    """
    added = {each.content for each in backend.get_added_tokens_decoder().values()}
    return len(backend.get_vocab(with_added_tokens=False).keys() - added) > 1


def _load(directory: Path) -> Any:
    try:
        with _loading, with_tokenizer_json(directory) as readable:
            tokenizer = _class_for(readable).from_pretrained(
                readable, local_files_only=True, trust_remote_code=False
            )
            if (readable / "tokenizer.json").is_file():
                _complete(tokenizer, readable)
            tokenizer.chat_template = tokenizer.chat_template or template_of_processor(directory)
    except Exception as error:  # transformers raises any exception for invalid files
        patterns = ("tokenizer.json", *_VOCABULARIES)
        if not any(path for each in patterns for path in directory.glob(each)):
            raise _without_tokenizer(directory, "a vocabulary") from error
        reason = _missing_package(directory) or reason_of(error)
        raise UnsupportedModelError(
            f"cannot load a tokenizer from {directory}: {reason}"
        ) from error
    if not tokenizer.is_fast:
        raise UnsupportedModelError(f"the tokenizer in {directory} has no tokenizer.json")
    if not _has_vocabulary(tokenizer.backend_tokenizer):
        kind = type(tokenizer)
        names = ", ".join(sorted({*kind.vocab_files_names.values()} - {"tokenizer.json"}))
        reads = f"{kind.__name__} reads{names and f' ({names})'}"
        raise _without_tokenizer(directory, f"a vocabulary that {reads}")
    return tokenizer


def _without_tokenizer(directory: Path, vocabulary: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{directory} has no tokenizer: neither tokenizer.json nor {vocabulary}; copy the "
        "tokenizer's files beside the weights"
    )


def _class_for(directory: Path) -> Any:
    """Return the class of transformers that loads the tokenizer of `directory`.

    AutoTokenizer is for other files than tokenizer.json: the classes that it selects replace the
    normalizer, pre-tokenizer and decoder there by their own, and it imports torch, which costs
    seconds and about 200 MB.
    """
    if (directory / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _complete(tokenizer: Any, directory: Path) -> None:
    """Set what transformers' classes add to a tokenizer.json.

    Its beginning and end, where only config.json names them, by id (null in tokenizer_config.json
    means none); and whether the text gets a space before it, which tokenizer_config.json may
    change. The tokens of a byte-level pre-tokenizer have its decoder: some files of Mistral have
    that of SentencePiece.
    """
    from tokenizers import decoders
    from tokenizers.pre_tokenizers import ByteLevel

    settings, config = (
        json.loads(path.read_bytes()) if path.is_file() else {}
        for path in (directory / "tokenizer_config.json", directory / "config.json")
    )
    backend = tokenizer.backend_tokenizer
    for name in ("bos_token", "eos_token"):
        found = config.get(f"{name}_id")
        token_id = found[0] if isinstance(found, list) and found else found
        is_free = name not in settings and getattr(tokenizer, name) is None
        if is_free and type(token_id) is int and token_id >= 0:
            setattr(tokenizer, name, backend.id_to_token(token_id))
    prefix, pre_tokenizer = settings.get("add_prefix_space"), backend.pre_tokenizer
    if isinstance(prefix, bool) and isinstance(pre_tokenizer, ByteLevel):
        pre_tokenizer.add_prefix_space = prefix
        backend.pre_tokenizer = pre_tokenizer
    if _is_byte_level(pre_tokenizer) and not _is_byte_level(backend.decoder):
        backend.decoder = decoders.ByteLevel()


def _is_byte_level(part: Any) -> bool:
    """Return whether a pre-tokenizer or decoder, or a part of it, is byte-level."""
    return part is not None and b'"type":"ByteLevel"' in part.__getstate__()


def _missing_package(directory: Path) -> str | None:
    """Return why a SentencePiece model cannot be read, if a package for it is not installed."""
    if (directory / "tokenizer.json").is_file() or find_spec("sentencepiece") is not None:
        return None
    models = sorted(path.name for path in directory.glob("*.model"))
    if not models or models == [TIKTOKEN_MODEL]:
        return None
    return (
        f"{', '.join(models)} is a SentencePiece model: install the package sentencepiece, or save "
        "the tokenizer as tokenizer.json"
    )


def _check_messages(messages: Sequence[ChatMessage]) -> None:
    if not messages:
        raise InvalidValueError("messages", messages, "at least one message")
    for index, message in enumerate(messages):
        if message.role not in CHAT_ROLES:
            limit = f"one of {', '.join(CHAT_ROLES)}"
            raise InvalidValueError(f"messages[{index}].role", message.role, limit)
        _require_unicode(f"messages[{index}].content", message.content)


def _require_unicode(field: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        limit = f"text; at character {error.start} it has a lone surrogate"
        raise InvalidValueError(field, text, limit) from error
