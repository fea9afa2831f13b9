"""Text to token ids and back, for the tokenizer that a model directory holds."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.text.chat_template import ChatTemplate
from specdec.types.chat import Conversation
from specdec.types.errors import InvalidValueError, UnsupportedModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
from specdec.types.chat import CHAT_ROLES, ChatMessage


def _alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones are themselves, others follow 255 in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


_ALPHABET = _alphabet()


def bytes_of_token(token: str) -> bytes:
    """What a token stands for; one with other characters, as added ones may be, for itself."""
    if not _ALPHABET.keys() >= set(token):
        return token.encode()
    return bytes(_ALPHABET[char] for char in token)


MAX_RENDERED_CHARS = 1_000_000
"""Of a whole conversation; encoding as much takes a second."""

_GENERAL_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Names, new and old, of the class in transformers that takes a tokenizer.json as it is."""

_loading = threading.Lock()
"""transformers imports its parts where they are first used, which is for one thread at a time."""


class Tokenizer:
    """A fast tokenizer read from local files; code that comes with it is never run.

    Safe to share between threads. Truncation and padding that the files ask for are not applied:
    a prompt is encoded whole, and who receives it judges its length.
    """

    def __init__(self, directory: Path) -> None:
        """Reads the files in `directory`; UnsupportedModelError if they make no fast tokenizer."""
        from tokenizers.decoders import ByteLevel

        self._transformers = _load(directory)
        self._backend: Backend = self._transformers.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.chat_template = ChatTemplate(self._transformers)
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        self._vocab_size = max(vocabulary.values()) + 1
        added = self._backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, t in added.items() if t.special)
        assigned = {token_id for text, token_id in vocabulary.items() if text}
        self._blank_ids = frozenset(range(self._vocab_size)) - assigned
        self._is_byte_level = isinstance(self._backend.decoder, ByteLevel)
        self._token_bytes: dict[int, bytes] = {}  # as they are asked for

    @property
    def transformers(self) -> Any:
        """The same tokenizer as transformers knows it, for who wants what only that has."""
        return self._transformers

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id. A model's own vocabulary may be padded beyond it."""
        return self._vocab_size

    @property
    def vocabulary(self) -> dict[str, int]:
        """Every token as the vocabulary spells it, with its id."""
        return dict(self._backend.get_vocab(with_added_tokens=True))

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that steer the model and are no text, such as the end of a turn."""
        return self._special_ids

    @property
    def blank_token_ids(self) -> frozenset[int]:
        """Ids below vocab_size that stand for no text at all: unassigned ones."""
        return self._blank_ids

    @property
    def end_token_id(self) -> int | None:
        """The token that ends a text, where the files name one."""
        token_id: int | None = self._transformers.eos_token_id
        return token_id

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it; None for one that it has not."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def to_json(self) -> str:
        """The whole tokenizer as a tokenizer.json has it, added tokens included."""
        return self._backend.to_str()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of `text`; special tokens written out in it count as such.

        add_special_tokens: what the model wants around every text, such as a beginning token.
        Raises InvalidValueError if `text` holds half a surrogate pair.
        """
        _require_unicode("text", text)
        [encoded] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoded.ids  # of a batch, as that lets other threads run meanwhile

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Returns the prompt that asks for the answer to `messages`, by the model's own template.

        A template may add to the messages; SmolLM2's puts a system message before a first user
        message. Raises InvalidValueError for a message that is malformed or that the template
        refuses, and where the model has no template.
        """
        _check_messages(messages)
        turns = tuple({"role": each.role, "content": each.content} for each in messages)
        return self.encode_conversation(Conversation(turns))

    def encode_conversation(self, conversation: Conversation) -> list[int]:
        """The same for a conversation with tools, or with more to tell the template.

        Raises what `render` raises.
        """
        return self.encode(self.render(conversation), add_special_tokens=False)

    def render(self, conversation: Conversation) -> str:
        """The text that the chat template makes of a conversation, special tokens included.

        Roles are the template's affair. Raises InvalidValueError, also for a text that gets longer
        than MAX_RENDERED_CHARS: tools, arguments and variables count as messages do.
        """
        text = self.chat_template.render(conversation)
        if len(text) > MAX_RENDERED_CHARS:
            limit = f"at most {MAX_RENDERED_CHARS} characters, as the chat template writes them"
            raise InvalidValueError("messages length", len(text), limit)
        return text

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of `token_ids`; bytes that are no UTF-8 become U+FFFD.

        Ids outside the vocabulary stand for nothing, as a padded model may generate them.
        """
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    @property
    def is_byte_level(self) -> bool:
        """Whether a decoded text is `token_bytes` of each token, one after the other, as UTF-8."""
        return self._is_byte_level

    def token_bytes(self, token_id: int) -> bytes:
        """Of a byte-level tokenizer: what a token stands for; an unassigned id is nothing."""
        found = self._token_bytes.get(token_id)
        if found is None:
            [token] = self.token_strings((token_id,))
            found = self._token_bytes[token_id] = bytes_of_token(token)
        return found

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary spells it; an id that is not assigned has an empty one."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidValueError, naming the place, if an id is not in 0 to vocab_size - 1."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            limit = f"a token id from 0 to {vocab_size - 1}"
            raise InvalidValueError(f"{field}[{index}]", token_id, limit)


def _load(directory: Path) -> Any:
    try:
        with _loading:
            tokenizer = _class_for(directory).from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # whatever the files make transformers raise
        reason = " ".join(str(error).split())
        raise UnsupportedModelError(
            f"no tokenizer can be read from {directory}: {reason}"
        ) from error
    if not tokenizer.is_fast:
        raise UnsupportedModelError(f"the tokenizer in {directory} has no tokenizer.json")
    return tokenizer


def _class_for(directory: Path) -> Any:
    """What transformers makes the tokenizer of `directory` by.

    AutoTokenizer finds that out, and imports torch, which costs seconds and some 200 MB. Where the
    files name the class that fits any tokenizer.json there is nothing to find out.
    """
    config = directory / "tokenizer_config.json"
    settings = json.loads(config.read_bytes()) if config.is_file() else {}
    if settings.get("tokenizer_class") in _GENERAL_CLASSES:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


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
        limit = f"text; at character {error.start} it has half of a surrogate pair"
        raise InvalidValueError(field, text, limit) from error
