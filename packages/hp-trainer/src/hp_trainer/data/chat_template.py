"""Chat templates: conversations as text, and which characters of it are answers.

A tokenizer's directory brings a template in Jinja's language. It is data from elsewhere: it runs in Jinja's immutable
sandbox, as in transformers, where it can neither reach Python's objects nor change what it is given.
"""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from hp_trainer._files import read_plain_text
from hp_trainer.exceptions import DataError

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MarkedText:
    """Text of which some is to be predicted.

    Attributes:
        answers: the characters `[begin, end)` of each answer, in order.
        ends: whether the text says by itself where it ends; else the tokenizer's end of a document follows.
    """

    text: str
    answers: tuple[tuple[int, int], ...]
    ends: bool = True


class ChatTemplate(ABC):
    """Makes texts of conversations."""

    @abstractmethod
    def mark(self, messages: Sequence[Message], tools: Any = None) -> list[MarkedText]:
        """Return a conversation as one text, or as one per answer where the template writes earlier turns otherwise.

        Args:
            messages: each with a `role` and a `content`; answers are those of the role `assistant`.
            tools: told to the template.

        Raises:
            DataError: the template refuses the conversation, or hides where its answers begin.
        """


@dataclass(frozen=True)
class TurnTemplate(ChatTemplate):
    """A template of ours: every turn is a head, its content and a tail.

    Attributes:
        begin: of the whole text.
        head: of a turn, with `{role}`.
        tail: of a turn, predicted where the turn is an answer.
        ends: the last tail ends the text.
    """

    begin: str
    head: str
    tail: str
    ends: bool = True

    def mark(self, messages: Sequence[Message], tools: Any = None) -> list[MarkedText]:
        """See `ChatTemplate.mark`."""
        text, answers = self.begin, []
        for message in messages:
            text += self.head.format(role=message["role"], Role=str(message["role"]).capitalize())
            begin = len(text)
            text += _content(message) + self.tail
            if message["role"] == "assistant":
                answers.append((begin, len(text)))
        return [MarkedText(text, tuple(answers), self.ends)]


TEMPLATES: dict[str, ChatTemplate] = {
    "chatml": TurnTemplate("", "<|im_start|>{role}\n", "<|im_end|>\n"),
    "llama3": TurnTemplate("<|begin_of_text|>", "<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>"),
    "plain": TurnTemplate("", "{Role}: ", "\n", ends=False),
}


class JinjaTemplate(ChatTemplate):
    """A template in Jinja's language.

    Args:
        source: the template.
        special_tokens: names that it may use, such as `bos_token`.

    Raises:
        DataError: jinja2 is not installed, or the template is no Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        # Set around what a `{% generation %}` block of the template writes, and taken out again.
        self._mark = f"\x02{secrets.token_hex(8)}\x03"
        self._marks_itself = False
        try:
            import jinja2
        except ImportError as error:
            raise DataError(
                f"chat templates need jinja2, which cannot be imported here ({error}); install hp-trainer[data]"
            ) from error
        try:
            self._template = _environment(self._mark).from_string(source)
            self._marks_itself = "generation" in source and "endgeneration" in source
        except jinja2.TemplateError as error:
            raise DataError(f"the chat template is broken: {error}") from error

    def mark(self, messages: Sequence[Message], tools: Any = None) -> list[MarkedText]:
        """See `ChatTemplate.mark`."""
        whole = self._render(messages, tools)
        if self._marks_itself:
            return [_without_marks(whole, self._mark)]
        turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        spans = [self._answer(messages[: n + 1], tools) for n in turns]
        if all(whole.startswith(text) for text, _ in spans):
            return [MarkedText(whole, tuple((begin, len(text)) for text, begin in spans))]
        # Earlier answers stand otherwise when later ones follow (Qwen3 drops their thoughts): each as it was given.
        return [MarkedText(text, ((begin, len(text)),)) for text, begin in spans]

    def _answer(self, messages: Sequence[Message], tools: Any) -> tuple[str, int]:
        """Return a conversation up to an answer, and where the answer begins."""
        text = self._render(messages, tools)
        before = self._render(messages[:-1], tools, add_generation_prompt=True)
        if not text.startswith(before):
            raise DataError(
                "the chat template does not go on from its own generation prompt, so that nothing tells where answers "
                "begin; put them between {% generation %} and {% endgeneration %} in it"
            )
        return text, len(before)

    def _render(self, messages: Sequence[Message], tools: Any, add_generation_prompt: bool = False) -> str:
        try:
            text: str = self._template.render(
                messages=[dict(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
            return text
        # A template is another's program: whatever fails in it is its fault or the conversation's.
        except Exception as error:
            raise DataError(f"the chat template cannot write the conversation: {error}") from error


def load_template(name: str | None, file: str | None, tokenizer: Any) -> ChatTemplate | None:
    """Return the template of a name, of a file, or of the tokenizer's directory; None where that has none.

    Raises:
        DataError: the file cannot be read, or the template is broken.
    """
    if name is not None:
        return TEMPLATES[name]
    special_tokens = getattr(tokenizer, "special_tokens", {})
    if file is not None:
        try:
            return JinjaTemplate(read_plain_text(Path(file)), special_tokens)
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"the chat template {file} cannot be read: {error}") from error
    source = getattr(tokenizer, "chat_template", None)
    return None if source is None else JinjaTemplate(source, special_tokens)


def _content(message: Message) -> str:
    """Return the text of a message, whose content is text or a list of parts."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(str(part["text"]) for part in content if part.get("type") == "text")


def _environment(mark: str) -> Any:
    """Return Jinja's immutable sandbox with what transformers gives to templates."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag `{% generation %}`, around what an assistant wrote."""

        tags = {"generation"}  # noqa: RUF012, the interface of an extension

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{mark}{caller()}{mark}"

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda wanted: datetime.now().strftime(wanted)
    return environment


def _without_marks(text: str, mark: str) -> MarkedText:
    """Return a text without its marks, which stand around each answer."""
    parts = text.split(mark)
    answers, at = [], 0
    for number, part in enumerate(parts):
        if number % 2:
            answers.append((at, at + len(part)))
        at += len(part)
    return MarkedText("".join(parts), tuple(answers))
