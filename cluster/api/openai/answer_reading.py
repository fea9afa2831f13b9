"""How the text of an answer is read: reasoning, tool calls and content."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from cluster.api.openai.conversation import ToolUse
from cluster.api.openai.parsers.harmony import ASSISTANT, CHANNEL, HarmonyParser
from cluster.api.openai.parsers.json_span import EscapedStrings
from cluster.api.openai.parsers.pieces import (
    AnswerParser,
    CallArguments,
    CallStart,
    Piece,
    PlainParser,
    Reasoning,
)
from cluster.api.openai.parsers.reasoning import SYNTAXES, ReasoningParser, ReasoningSyntax
from cluster.api.openai.parsers.tool_families import call_marks_of
from cluster.api.openai.parsers.tool_format import ToolFormat
from cluster.api.openai.parsers.unique_calls import UniqueCalls
from cluster.api.openai.schemas.chat_schema import ChatRequest
from cluster.replica.preprocessor import TokenTexts
from specdec.types.responses import EngineOutput, FinishReason
from specdec.types.sampling.sampling_params import SamplingParams

HARMONY = "gpt_oss"
"""The parser that reads both, reasoning and calls."""


@dataclass(frozen=True)
class AnswerReading:
    """The parsers of a request's answers.

    tools: None without tools. reasoning: the parser of reasoning; None where there is none to
    separate. includes_reasoning: whether the client gets it. shows_special_tokens: whether marks
    are special tokens, which the text needs. prefix: the beginning of the answer in the prompt,
    which the text of the model continues; see `ChatTemplate.answer_start`. is_constrained: whether
    a grammar constrains all of the text, or all that follows the reasoning.
    """

    tools: ToolUse | None
    reasoning: str | None
    includes_reasoning: bool = True
    shows_special_tokens: bool = False
    prefix: str = ""
    is_constrained: bool = False

    @property
    def is_plain(self) -> bool:
        """Return whether the text is content as it is."""
        return self.tools is None and self.reasoning is None

    @property
    def syntax(self) -> ReasoningSyntax | None:
        """The marks of the reasoning; None where there is none, or in another form."""
        syntax = SYNTAXES.get(self.reasoning or "")
        return syntax.after(self.prefix) if syntax and self.prefix.strip() else syntax

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks that show in the prompt how the answer begins."""
        if self.reasoning == HARMONY:
            return (ASSISTANT,)
        return self.syntax.marks if self.syntax else ()

    def parser(self) -> AnswerParser:
        """Make the parser of one answer."""
        if self.reasoning == HARMONY:
            return copy(self._harmony)
        if self.tools is None:
            return self._after_reasoning(PlainParser)
        return self._after_reasoning(self.tools.parser, call_marks_of(self.tools.form))

    def forced_parser(self) -> tuple[AnswerParser, UniqueCalls]:
        """Make the parser of one answer of forced calls, and the part of it that parses these."""
        assert self.tools is not None, "calls without tools"
        calls = self.tools.unique_parser()
        return self._after_reasoning(lambda: calls), calls

    def _after_reasoning(
        self, make_answer: Callable[[], AnswerParser], call_marks: Sequence[str] = ()
    ) -> AnswerParser:
        """Make a parser of the answer, after that of the reasoning if there may be any.

        call_marks: before calls that end the reasoning without its mark; a grammar demands it.
        """
        if self.syntax is None:
            return make_answer()
        marks = () if self.is_constrained else call_marks
        return ReasoningParser(self.syntax, make_answer, marks)

    def constrained(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with any text before a constrained one, where it may be reasoning.

        With a prefix that shows how the answer begins.
        """
        form, syntax = params.structured_output, self.syntax
        if not self.is_constrained or form is None or syntax is None:
            return params
        marks = syntax.before_constrained
        return replace(params, structured_output=replace(form, reasoning=marks))

    @cached_property
    def _harmony(self) -> HarmonyParser:
        """The parser of all choices at their beginning, which has read the prefix."""
        tools = self.tools.callable if self.tools else ()
        return HarmonyParser(tools, self.prefix.removeprefix(ASSISTANT))

    def wanted(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Drop reasoning that is not wanted, and calls after the first where there may be one.

        Calls get their ids.
        """
        is_single = self.tools is not None and not self.tools.is_parallel
        for each in pieces:
            if isinstance(each, Reasoning) and not self.includes_reasoning:
                continue
            if is_single and isinstance(each, CallStart | CallArguments) and each.index > 0:
                continue
            if isinstance(each, CallStart):
                assert self.tools is not None, "a call without tools"
                each = self.tools.identified(each)
            yield each


class AnswerReader:
    """Reader of one answer: its pieces, and the number of tokens of its reasoning.

    num_reasoning_tokens: those up to the end of the reasoning so far, with its marks.
    """

    def __init__(self, reading: AnswerReading, *, escapes: bool = True) -> None:
        """Make a reader of an answer that is parsed as `reading` describes.

        escapes: whether to escape the strings of arguments where the model did not.
        """
        self._reading = reading
        self._parser = parser = reading.parser()
        self._separator = parser if isinstance(parser, ReasoningParser | HarmonyParser) else None
        self._arguments, self._escapes = EscapedStrings(), escapes  # of the last call
        self._num_chars = self._num_tokens = 0
        self.num_reasoning_tokens = 0

    @property
    def num_calls(self) -> int:
        """Calls that were parsed so far."""
        return self._parser.num_calls

    @property
    def has_whole_calls(self) -> bool:
        """Return whether there are calls, and the braces of the last one's arguments are closed."""
        return self._arguments.is_complete

    def resume(self, received: TokenTexts) -> None:
        """Parse what the client has of the answer."""
        pieces = self._feed(received.text, received.lengths, len(received.lengths))
        for _ in self._wanted(pieces):
            pass

    def read(self, output: EngineOutput) -> list[Piece]:
        """Return the pieces that are complete with an output, without those that are not wanted."""
        pieces = self._feed(output.text, output.text_lengths, len(output.token_ids))
        if output.finish_reason is not None:
            is_cut = output.finish_reason is FinishReason.LENGTH
            pieces += self._parser.finish(is_cut=is_cut)
            if self._separator is not None and self._separator.is_reasoning:
                self.num_reasoning_tokens = self._num_tokens
        return list(self._wanted(pieces))

    def _wanted(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Yield the pieces for the client, with the strings of arguments escaped."""
        for piece in self._reading.wanted(pieces):
            if isinstance(piece, CallStart):
                self._arguments = EscapedStrings()
            elif isinstance(piece, CallArguments) and self._escapes:
                piece = replace(piece, text=self._arguments.feed(piece.text))
                if not piece.text:  # withheld
                    continue
            yield piece

    def _feed(self, text: str, lengths: Sequence[int], num_tokens: int) -> list[Piece]:
        pieces = list(self._parser.feed(text))
        if self._separator is not None:
            self._count(self._separator, lengths, num_tokens)
        self._num_chars += len(text)
        self._num_tokens += num_tokens
        return pieces

    def _count(
        self, parser: ReasoningParser | HarmonyParser, lengths: Sequence[int], num_tokens: int
    ) -> None:
        """Count the tokens of the reasoning. lengths: characters of the latest tokens.

        A token without characters counts with the next one that has some, whether or not it came
        in the same output.
        """
        num_new = parser.num_reasoning_chars - self._num_chars
        if parser.is_reasoning:
            while lengths and num_tokens and not lengths[num_tokens - 1]:
                num_tokens -= 1
            if num_tokens:
                self.num_reasoning_tokens = self._num_tokens + num_tokens
        elif num_new > 0:  # it ends within these
            self.num_reasoning_tokens = (
                self._num_tokens + bisect_left(list(accumulate(lengths)), num_new) + 1
            )


def answer_reading(
    request: ChatRequest,
    tools: ToolUse | None,
    form: ToolFormat,
    parser: str,
    is_special: Callable[[str], bool],
) -> AnswerReading:
    """Resolve how answers are read.

    form: the model's format of calls, which for gpt-oss is that of every answer. parser: of
    reasoning, as configured. A grammar leaves no place for that of gpt-oss, in a channel before the
    one of the answer. is_special: whether a text is a special token.
    """
    is_constrained = request.is_structured or (tools is not None and tools.is_forced)
    chosen: str | None = HARMONY if HARMONY in (parser, form.name) else parser
    if chosen == "none" or (chosen == HARMONY and is_constrained):
        chosen = None
    marks = (CHANNEL,) if chosen == HARMONY else SYNTAXES[chosen].marks if chosen else ()
    shows = tools is not None and tools.shows_special_tokens
    shows = shows or any(map(is_special, marks))
    return AnswerReading(
        tools, chosen, request.include_reasoning, shows, is_constrained=is_constrained
    )
