"""Prompts that the target writes itself, for training without a prompts file.

An aligned model that is given its chat template up to the place where the user's text begins
continues with what a user would write (Xu et al. 2024, Magpie, arXiv 2406.08464, section 2). So the
prompts come from the distribution that the model was aligned on. Prefixes, the first words of the
user's text, steer them towards subjects that the distribution has little of, such as code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specdec.text.tokenizer import Tokenizer
from specdec.types.errors import InvalidValueError
from specdec.types.request import Conversation
from specdec.types.sampling.sampling_params import SamplingParams

MAX_PROMPT_TOKENS = 192
MIN_WORDS = 3
_TEMPERATURE = 1.0  # as in the paper
_MARK = "user text"


@dataclass(frozen=True)
class UserTurn:
    """The chat template around the user's text of a first turn.

    token_ids: all that precedes the text. end_token_id: the token that follows it.
    """

    token_ids: tuple[int, ...]
    end_token_id: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> UserTurn:
        """Read the turn off the template.

        Raises InvalidValueError for a template that does not close the turn by a special token, as
        the end of the text would then be unknown, and for a model without a template.
        """
        turn = {"role": "user", "content": _MARK}
        rendered = tokenizer.render(Conversation((turn,), add_generation_prompt=False)).text
        before, found, after = rendered.rpartition(_MARK)
        following = tokenizer.encode(after, add_special_tokens=False)
        if not (found and following and following[0] in tokenizer.special_token_ids):
            limit = "one that closes the user's turn by a special token, or pass a prompts file"
            raise InvalidValueError("chat template", rendered, limit)
        return cls(tuple(tokenizer.encode(before, add_special_tokens=False)), following[0])

    def before(self, prefix: str, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the token ids after which the target continues the first words of a prompt."""
        return (*self.token_ids, *tokenizer.encode(prefix, add_special_tokens=False))

    def text_of(self, prompt: Sequence[int], tokenizer: Tokenizer) -> str:
        """Return the user's text in the token ids of a rendered conversation of one turn."""
        begin = len(self.token_ids)
        end = prompt.index(self.end_token_id, begin)
        return tokenizer.decode(prompt[begin:end]).strip()

    def sampling_params(self, seed: int) -> SamplingParams:
        """Return the parameters with which the target writes a prompt."""
        return SamplingParams(
            temperature=_TEMPERATURE,
            max_tokens=MAX_PROMPT_TOKENS,
            stop_token_ids=(self.end_token_id,),
            seed=seed,
        )


class UsablePrompts:
    """Filter of self-written prompts: those that ended, of a few words, and each text once."""

    def __init__(self, used: Iterable[str] = ()) -> None:
        """Begin with the texts that earlier runs used."""
        self._seen = set(used)

    def accept(self, text: str, *, has_ended: bool) -> str | None:
        """Return the text to use as a prompt; None to drop it.

        has_ended: whether the target ended the turn, before the limit of tokens.
        """
        prompt = text.strip()
        if not has_ended or len(prompt.split()) < MIN_WORDS or prompt in self._seen:
            return None
        self._seen.add(prompt)
        return prompt
