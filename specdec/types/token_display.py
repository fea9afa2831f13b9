"""The text of each token of an output, and HTML for notebooks that marks the drafted ones.

Jupyter calls `_repr_html_` of the value of a cell. The HTML inherits the colours of the page, light
or dark: backgrounds are translucent, and drafted tokens are underlined, too. All texts are escaped,
and classes keep MathJax from typesetting them.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from specdec.types.reports.stats import SpeculationStats

MAX_OUTPUTS = 20
"""Outputs of a batch that are shown; a line states how many more there are."""

MAX_TOKENS = 2_000
"""Tokens of a choice that are shown."""

MAX_PROMPT_CHARS = 500

_STYLE = """<style>
.specdec { line-height: 1.6; margin: .4em 0 1em; max-width: 60em; }
.specdec .prompt, .specdec .figures { opacity: .8; font-size: .9em; overflow-wrap: anywhere; }
.specdec .text { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: plaintext; }
.specdec .prompt { white-space: pre-wrap; }
.specdec mark { color: inherit; background: rgba(40, 130, 230, .22);
  border-bottom: 2px solid rgb(40, 130, 230); border-radius: 2px; margin-right: 1px; }
</style>"""


def token_texts(text: str, lengths: Sequence[int]) -> list[str]:
    """Divide a text by its tokens. lengths: `text_lengths`, of the same output as the text."""
    ends = list(accumulate(lengths))
    assert ends[-1:] in ([], [len(text)]), "lengths of another text"
    return [text[end - length : end] for end, length in zip(ends, lengths, strict=True)]


@dataclass(frozen=True)
class ShownChoice:
    """One choice. is_drafted, text_lengths: for each token, as in `EngineOutput`.

    Both are empty in the answers of services that do not send them. finish_reason: None while the
    choice runs.
    """

    text: str
    is_drafted: Sequence[bool]
    text_lengths: Sequence[int]
    finish_reason: str | None

    @property
    def has_token_texts(self) -> bool:
        """Return whether the text can be divided by its tokens."""
        has_all = len(self.text_lengths) == len(self.is_drafted)
        return has_all and sum(self.text_lengths) == len(self.text)


@dataclass(frozen=True)
class ShownOutput:
    """Choices of one prompt, with the statistics of the request. prompt: None if not known."""

    prompt: str | None
    choices: Sequence[ShownChoice]
    speculation: SpeculationStats


def outputs_html(outputs: Sequence[ShownOutput]) -> str:
    """Return the HTML of a batch of outputs."""
    parts = [_STYLE, *map(_output, outputs[:MAX_OUTPUTS])]
    if hidden := len(outputs) - MAX_OUTPUTS:
        parts += [f"<div class='specdec'>{hidden} more outputs</div>"] if hidden > 0 else []
    return "\n".join(parts)


def _output(output: ShownOutput) -> str:
    lines: list[str] = []
    if output.prompt is not None:
        cut = output.prompt[:MAX_PROMPT_CHARS]
        more = " ..." if len(output.prompt) > len(cut) else ""
        lines.append(_line("prompt", html.escape(cut) + more))
    for choice in output.choices:
        lines.append(_line("text", "".join(_tokens(choice))))
        lines.append(_line("figures", _figures(choice)))
    lines.append(_line("figures", _statistics(output.speculation)))
    return "<div class='specdec tex2jax_ignore mathjax_ignore'>" + "".join(lines) + "</div>"


def _line(kind: str, content: str) -> str:
    return f"<div class='{kind}' dir='auto'>{content}</div>"


def _tokens(choice: ShownChoice) -> Iterator[str]:
    """Yield each token's text; tokens without text, such as parts of characters, are left out."""
    if not choice.has_token_texts:
        yield html.escape(choice.text)
        return
    texts = token_texts(choice.text, choice.text_lengths)
    for text, is_drafted in zip(texts[:MAX_TOKENS], choice.is_drafted, strict=False):
        if text and is_drafted:
            yield f"<mark title='drafted'>{html.escape(text)}</mark>"
        else:
            yield html.escape(text)
    if len(texts) > MAX_TOKENS:
        yield f" ... {len(texts) - MAX_TOKENS} more tokens"


def _figures(choice: ShownChoice) -> str:
    reason = html.escape(choice.finish_reason or "running")
    if choice.text and not choice.is_drafted:
        return reason
    num_tokens, num_drafted = len(choice.is_drafted), sum(choice.is_drafted)
    return f"{num_tokens} tokens, <mark>{num_drafted} drafted</mark>; {reason}"


def _statistics(counts: SpeculationStats) -> str:
    if counts.num_drafts == 0:
        return "nothing was drafted"
    return (
        f"{counts.num_accepted_tokens} of {counts.num_draft_tokens} draft tokens accepted "
        f"({counts.acceptance_rate:.0%}), {counts.mean_acceptance_length:.2f} tokens a draft"
    )
