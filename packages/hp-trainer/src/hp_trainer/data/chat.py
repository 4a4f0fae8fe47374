"""The dataset `chat`: conversations and instructions of which only the answers are predicted, and chat templates.

A template converts a conversation to text and marks the characters of its answers. Templates in tokenizer directories
are Jinja programs of unknown origin. They run in Jinja's immutable sandbox, as in transformers, and can neither reach
Python objects nor change their inputs.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from hp_trainer._files import read_plain_text
from hp_trainer.config import FilePath, Sections, section
from hp_trainer.data.corpus import Document
from hp_trainer.data.documents import DocumentsConfig, DocumentsSource, FilesConfig, Packing, Source
from hp_trainer.data.formats import Record, advise_fields
from hp_trainer.exceptions import DataError, Problem

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MarkedText:
    """Text of a conversation, the ranges of characters of its answers, and whether it has its own end token."""

    text: str
    answers: tuple[tuple[int, int], ...]
    ends: bool = True


class ChatTemplate(ABC):
    """Interface of a chat template, which converts conversations to text."""

    @abstractmethod
    def mark(self, messages: Sequence[Message], tools: Any = None) -> list[MarkedText]:
        """Convert a conversation to text, in which the messages of the role `assistant` are the answers.

        The result has one text per answer for templates that change earlier turns when later ones follow.

        Args:
            messages: messages with `role` and `content`.
            tools: descriptions of tools, passed to the template.
        """


@dataclass(frozen=True)
class TurnTemplate(ChatTemplate):
    """A template whose turns are a head with `{role}`, the content, and a tail, which may end the document."""

    begin: str
    head: str
    tail: str
    ends: bool = True

    def mark(self, messages: Sequence[Message], tools: Any = None) -> list[MarkedText]:
        text, answers = self.begin, []
        for message in messages:
            text += self.head.format(role=message["role"], Role=str(message["role"]).capitalize())
            # The tail is part of the answer: the model must learn to end its turn.
            begin = len(text)
            text += _message_text(message) + self.tail
            if message["role"] == "assistant":
                answers.append((begin, len(text)))
        return [MarkedText(text, tuple(answers), self.ends)]


TEMPLATES: dict[str, ChatTemplate] = {
    "chatml": TurnTemplate("", "<|im_start|>{role}\n", "<|im_end|>\n"),
    "llama3": TurnTemplate("<|begin_of_text|>", "<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>"),
    # Without an end token of its own, so that the tokenizer's separator is appended.
    "plain": TurnTemplate("", "{Role}: ", "\n", ends=False),
}


class JinjaTemplate(ChatTemplate):
    """A template written in Jinja."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        # A random marker around the output of `{% generation %}` blocks, removed from the text afterwards.
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
            raise DataError(f"the chat template is not valid: {error}") from error

    def mark(self, messages: Sequence[Message], tools: Any = None) -> list[MarkedText]:
        full = self._render(messages, tools)
        # The template marks answers itself, so nothing has to be inferred from prefixes.
        if self._marks_itself:
            return [_without_marks(full, self._mark)]
        turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        spans = [self._answer(messages[: n + 1], tools) for n in turns]
        # Each conversation up to an answer is a prefix of the full text, so its spans hold there too.
        if all(full.startswith(text) for text, _ in spans):
            return [MarkedText(full, tuple((begin, len(text)) for text, begin in spans))]
        # The template changes earlier answers when later ones follow (Qwen3 drops reasoning): one text per answer.
        return [MarkedText(text, ((begin, len(text)),)) for text, begin in spans]

    def _answer(self, messages: Sequence[Message], tools: Any) -> tuple[str, int]:
        """Return the text of a conversation up to its last answer, and the index where that answer starts."""
        text = self._render(messages, tools)
        # The generation prompt is the text that precedes an answer when the model is asked to write it.
        before = self._render(messages[:-1], tools, add_generation_prompt=True)
        if not text.startswith(before):
            raise DataError(
                "the start of answers cannot be determined: the text of the chat template does not start with its own "
                "generation prompt; put answers between {% generation %} and {% endgeneration %} in the template"
            )
        return text, len(before)

    def _render(self, messages: Sequence[Message], tools: Any, add_generation_prompt: bool = False) -> str:
        try:
            with _time_limit(_RENDER_SECONDS):
                text: str = self._template.render(
                    messages=[dict(message) for message in messages],
                    tools=tools,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **self._special_tokens,
                )
            return text
        # The template is a program of unknown origin, which may raise anything.
        except Exception as error:
            raise DataError(f"the chat template failed on the conversation: {error}") from error


# Real templates need milliseconds for a conversation.
_RENDER_SECONDS = 10.0


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` in the block after `seconds` of processor time. Only the main thread has a limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutError(f"it has not ended after {seconds:g} s of computing")

    # Not the time of day: this process may be stopped, or the machine be busy.
    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, signal.SIG_DFL if before is None else before)


def load_template(name: str | None, file: str | None, tokenizer: Any) -> ChatTemplate | None:
    """Load a template by name, from a file, or from the tokenizer's directory. Returns None if that has none."""
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


def _message_text(message: Message) -> str:
    """Return the text of a message. Its content is a string or a list of parts, of which those of type `text` count."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part.get("type") == "text")


def _environment(mark: str) -> Any:
    """Return Jinja's immutable sandbox with the filters and functions that transformers provides to templates."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag `{% generation %}`, which encloses an answer."""

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
    # Some templates print the date; transformers offers this function.
    environment.globals["strftime_now"] = lambda wanted: datetime.now().strftime(wanted)
    return environment


def _without_marks(text: str, mark: str) -> MarkedText:
    """Remove the markers around answers from a text."""
    segments = text.split(mark)
    answers, at = [], 0
    for number, segment in enumerate(segments):
        # Segments alternate: outside an answer, inside an answer.
        if number % 2:
            answers.append((at, at + len(segment)))
        at += len(segment)
    return MarkedText("".join(segments), tuple(answers))


# Roles in the ShareGPT format `conversations: [{from: human, value: ...}]`.
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}


@section
class ChatFieldsConfig:
    """Names of the fields of a conversation in a record."""

    messages_field: str = Field("messages", description="field with a list of messages, each with role and content")
    prompt_field: str = Field("prompt", description="field with the prompt, for records without messages")
    completion_field: str = Field("completion", description="field with the completion of the prompt")


@section
class ChatFilesConfig(ChatFieldsConfig, FilesConfig):
    """Files of one source of conversations."""

    path: FilePath = Field(description="file, folder, or a pattern such as train-*.parquet")
    weight: float | None = Field(None, gt=0, description="relative frequency of samples of this source")


@section
class ChatDataConfig(ChatFieldsConfig, DocumentsConfig):
    """Settings of the dataset `chat`: conversations, or prompts with completions, for fine-tuning."""

    sources: Sections[ChatFilesConfig] = Field((), description="several sources, instead of path")
    eval: Sections[ChatFilesConfig] = Field(
        (), description="sources for evaluation; empty: eval_fraction of the training sources"
    )
    template: Literal["chatml", "llama3", "plain"] | None = Field(
        None, description="name of a chat template; null: template_file, or the template in the tokenizer's directory"
    )
    template_file: FilePath | None = Field(None, description="file with a chat template in Jinja")
    loss_on: Literal["answers", "everything"] = Field("answers", description="tokens that are predicted")
    packing: Literal["best_fit", "none"] = Field(
        "best_fit",
        description="best_fit: complete conversations, as many per row as fit; none: one per row; "
        "longer ones are truncated",
    )

    def check(self) -> Iterator[Problem]:
        yield from super().check()
        if self.path is None and not self.sources:
            yield Problem(path="path", what="missing", expected="a file or folder, or data.sources")
        if self.template is not None and self.template_file is not None:
            yield Problem(path="template", what="given together with data.template_file", expected="one of the two")


class ChatSource(DocumentsSource):
    """The dataset `chat`: each document is a conversation of which only the answers are predicted."""

    options: ChatDataConfig

    @property
    def packing(self) -> Packing:
        return self.options.packing

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template, or None. Prompts with completions need none."""
        return load_template(self.options.template, self.options.template_file, self.tokenizer())

    def problems(self) -> Iterator[Problem]:
        problem = self._template_problem()
        yield from super().problems() if problem is None else [problem]

    def _template_problem(self) -> Problem | None:
        """Return the problem of the template, or None. Problems of the tokenizer are reported separately."""
        try:
            self.tokenizer()
        except DataError:
            return None
        try:
            _ = self.template  # loading raises
        except DataError as error:
            return Problem(path="template", what=str(error))
        return None

    def fields(self, source: Source) -> tuple[str, ...] | None:
        # Readers of columns skip all others.
        files = source.files
        return (files.messages_field, files.prompt_field, files.completion_field, "tools")

    def facts(self, source: Source) -> Mapping[str, Any]:
        file = self.options.template_file
        return {
            "kind": "chat",
            "fields": self.fields(source),
            "template": self.options.template,
            # The text, not the path: an edited template gives other tokens, and needs another corpus.
            "template file": None if file is None else read_plain_text(Path(file)),
            "tokenizer's template": getattr(self.tokenizer(), "chat_template", None),
            "loss on": self.options.loss_on,
        }

    def documents(self, records: Sequence[Record], source: Source) -> Iterator[Document]:
        """Yield one document per conversation, or per answer where the template requires it."""
        for record in records:
            try:
                for marked in self._marked(record, source.files):
                    yield self._document(marked)
            except DataError as error:
                located = str(error).startswith(record.where)
                raise DataError(str(error) if located else f"{record.where}: {error}") from error

    def _marked(self, record: Record, files: Any) -> list[MarkedText]:
        fields = record.value
        if isinstance(fields, bytes):
            raise DataError(
                f"{record.where} is plain text; expected conversations in JSON lines, Parquet or Arrow files"
            )
        if fields.get(files.messages_field) is not None:
            return self._conversation(_messages(fields[files.messages_field]), fields.get("tools"))
        prompt, completion = (fields.get(name) for name in (files.prompt_field, files.completion_field))
        # Prompts of messages, as in TRL's conversational format, are a conversation.
        if isinstance(prompt, list):
            return self._conversation(_messages([*prompt, *(completion or [])]), fields.get("tools"))
        if prompt is None or completion is None:
            raise DataError(
                f"{record.where} has neither messages ({files.messages_field!r}) nor a prompt with its completion "
                f"({files.prompt_field!r}, {files.completion_field!r}); its fields: {', '.join(map(str, fields))}"
                f"{advise_fields([*fields], 'data.messages_field, or data.prompt_field and data.completion_field')}"
            )
        # Prompt and completion are text already and need no template.
        asked, answer = record.text(files.prompt_field), record.text(files.completion_field)
        return [MarkedText(asked + answer, ((len(asked), len(asked) + len(answer)),), ends=False)]

    def _conversation(self, messages: list[dict[str, Any]], tools: Any) -> list[MarkedText]:
        if self.template is None:
            raise DataError(
                f"the tokenizer has no chat template; set data.template ({', '.join(TEMPLATES)}) or data.template_file"
            )
        return self.template.mark(messages, tools)

    def _document(self, marked: MarkedText) -> Document:
        tokens, spans = self.tokenizer().encode_with_spans(marked.text)
        predicted = np.zeros(len(tokens), bool)
        # A token that overlaps an answer counts too, such as one that starts with the space before it.
        for begin, end in marked.answers:
            predicted |= (spans[:, 1] > begin) & (spans[:, 0] < end)
        if not marked.ends:
            before, after = self.tokenizer().around
            tokens = np.concatenate([before, tokens, after])
            predicted = np.concatenate([np.zeros(len(before), bool), predicted, np.ones(len(after), bool)])
        return Document(tokens, predicted if self.options.loss_on == "answers" else np.ones(len(tokens), bool))


def _messages(value: Any) -> list[dict[str, Any]]:
    """Validate a list of messages and convert them to `role` and `content`."""
    if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
        raise DataError(f"expected a list of messages, each an object with role and content, got {value!r:.60}")
    return [_message(one) for one in value]


def _message(given: dict[str, Any]) -> dict[str, Any]:
    # Arrow fills the fields that only other messages have with null.
    message = {name: value for name, value in given.items() if value is not None}
    if "from" in message and "value" in message:
        speaker = str(message["from"])
        message = {"role": _ROLES.get(speaker, speaker), "content": message["value"]}
    role, content = message.get("role"), message.get("content", "" if "tool_calls" in message else None)
    if not isinstance(role, str) or not (isinstance(content, str) or _are_parts(content)):
        raise DataError(f"expected a message with role and content, got {given!r:.80}")
    return message | {"content": content}


def _are_parts(content: Any) -> bool:
    """Return whether the content of a message is a list of parts, those of type `text` with a text."""
    return isinstance(content, list) and all(
        isinstance(part, dict) and (part.get("type") != "text" or isinstance(part.get("text"), str)) for part in content
    )
