"""JSON of an answer that grows: each event of SGLang's streams repeats the answer so far.

Encoding all of it for each event would take time quadratic in its length. Each token is encoded
once here; an event only copies what was encoded before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

_encode = partial(json.dumps, ensure_ascii=False)


@dataclass
class EncodedAnswer:
    """The text, ids and log-probabilities of an answer so far, as JSON.

    num_chars, num_ids: of the text and the ids that are encoded.
    """

    num_chars: int = 0
    num_ids: int = 0
    _text: str = ""
    _ids: str = ""
    _lists: dict[str, str] = field(default_factory=dict)

    def extended(
        self,
        text: str,
        token_ids: Sequence[int],
        lists: Mapping[str, Sequence[Any]],
        meta: Mapping[str, Any],
        index: int | None,
    ) -> str:
        """Append the text, ids and elements of the lists in `meta_info`; return the answer.

        meta: the rest of `meta_info`; not empty. index: of the answer in a batch.
        """
        self.num_chars += len(text)
        self.num_ids += len(token_ids)
        self._text += _encode(text)[1:-1]
        self._ids = _appended(self._ids, token_ids)
        for name, values in lists.items():
            self._lists[name] = _appended(self._lists.get(name, ""), values)
        listed = "".join(f', "{name}": [{encoded}]' for name, encoded in self._lists.items())
        place = "" if index is None else f', "index": {index}'
        return (
            f'{{"text": "{self._text}", "output_ids": [{self._ids}], '
            f'"meta_info": {_encode(dict(meta))[:-1]}{listed}}}{place}}}'
        )


def _appended(encoded: str, values: Sequence[Any]) -> str:
    """Return the elements of a list with more of them, without brackets."""
    more = _encode(list(values))[1:-1]
    return f"{encoded}, {more}" if encoded and more else encoded + more
