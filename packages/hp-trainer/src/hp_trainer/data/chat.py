"""The dataset `chat`: conversations and instructions, of which the answers alone are predicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hp_trainer._files import read_plain_text
from hp_trainer.config import sections, setting
from hp_trainer.data.chat_template import TEMPLATES, ChatTemplate, MarkedText, load_template
from hp_trainer.data.corpus import Document
from hp_trainer.data.documents import DocumentsConfig, DocumentsSource, FilesConfig, Packing, Source
from hp_trainer.data.formats import Record
from hp_trainer.exceptions import DataError, Problem

# Names of the older layout `conversations: [{from: human, value: ...}]`.
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}


@dataclass(frozen=True, kw_only=True)
class ChatFieldsConfig:
    """Names of the fields of a conversation."""

    messages_field: str = setting("messages", help="field that holds a list of messages with role and content")
    prompt_field: str = setting("prompt", help="field that holds a prompt, where there are no messages")
    completion_field: str = setting("completion", help="field that holds what follows a prompt")


@dataclass(frozen=True, kw_only=True)
class ChatFilesConfig(ChatFieldsConfig, FilesConfig):
    """Conversations of one source among several."""

    path: str = setting(help="file, folder, or a pattern such as train-*.parquet", is_path=True)
    weight: float | None = setting(None, help="how often its samples come, relative to the others'", above=0)


@dataclass(frozen=True, kw_only=True)
class ChatDataConfig(ChatFieldsConfig, DocumentsConfig):
    """Conversations (`messages`) and instructions (`prompt` and `completion`), for fine-tuning."""

    sources: tuple[ChatFilesConfig, ...] = sections(ChatFilesConfig, help="several sources instead of path")
    eval: tuple[ChatFilesConfig, ...] = sections(
        ChatFilesConfig, help="sources to evaluate with; empty: eval_fraction of those to train on"
    )
    template: Literal["chatml", "llama3", "plain"] | None = setting(
        None, help="a chat template by name; null: template_file, or that of the tokenizer's directory"
    )
    template_file: str | None = setting(None, help="a chat template in Jinja's language", is_path=True)
    loss_on: Literal["answers", "everything"] = setting("answers", help="which tokens are predicted")
    packing: Literal["whole", "none"] = setting(
        "whole", help="whole: as many conversations as fit in a row; none: one a row; longer ones are cut off"
    )

    def check(self) -> Iterator[Problem]:
        yield from super().check()
        if self.path is None and not self.sources:
            yield Problem(path="path", what="missing", expected="a file or folder, or data.sources")
        if self.template is not None and self.template_file is not None:
            yield Problem(path="template", what="given beside data.template_file", expected="one of the two")


class ChatSource(DocumentsSource):
    """Documents of conversations, the answers of which are predicted."""

    options: ChatDataConfig

    @property
    def packing(self) -> Packing:
        return self.options.packing

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template; None where there is none, which prompts and completions do without."""
        return load_template(self.options.template, self.options.template_file, self.tokenizer())

    def problems(self) -> Iterator[Problem]:
        problem = self._template_problem()
        yield from super().problems() if problem is None else [problem]

    def _template_problem(self) -> Problem | None:
        """Return why there is no template, unless that is the tokenizer's fault, which is told of by itself."""
        try:
            self.tokenizer()
        except DataError:
            return None
        try:
            # Loaded for what it raises.
            _ = self.template
        except DataError as error:
            return Problem(path="template", what=str(error))
        return None

    def fields(self, source: Source) -> tuple[str, ...] | None:
        """Return the fields of messages, of prompts with completions, and of tools."""
        files = source.files
        return (files.messages_field, files.prompt_field, files.completion_field, "tools")

    def facts(self, source: Source) -> Mapping[str, Any]:
        """Return fields and template, and which kind of dataset it is."""
        file = self.options.template_file
        return {
            "kind": "chat",
            "fields": self.fields(source),
            "template": self.options.template,
            "template file": None if file is None else read_plain_text(Path(file)),
            "tokenizer's template": getattr(self.tokenizer(), "chat_template", None),
            "loss on": self.options.loss_on,
        }

    def documents(self, records: Sequence[Record], source: Source) -> Iterator[Document]:
        """Yield each conversation, or each of its answers with all that came before."""
        for record in records:
            try:
                for marked in self._marked(record, source.files):
                    yield self._document(marked)
            except DataError as error:
                known = str(error).startswith(record.where)
                raise DataError(str(error) if known else f"{record.where}: {error}") from error

    def _marked(self, record: Record, files: Any) -> list[MarkedText]:
        fields = record.value
        if isinstance(fields, bytes):
            raise DataError(f"{record.where} is mere text; conversations stand in JSON lines, Parquet or Arrow files")
        if fields.get(files.messages_field) is not None:
            return self._conversation(_messages(fields[files.messages_field]), fields.get("tools"))
        prompt, completion = (fields.get(name) for name in (files.prompt_field, files.completion_field))
        if isinstance(prompt, list):
            return self._conversation(_messages([*prompt, *(completion or [])]), fields.get("tools"))
        if prompt is None or completion is None:
            raise DataError(
                f"{record.where} has neither messages ({files.messages_field!r}) nor a prompt with its completion "
                f"({files.prompt_field!r}, {files.completion_field!r}); its fields: {', '.join(map(str, fields))}"
            )
        asked, answer = record.text(files.prompt_field), record.text(files.completion_field)
        return [MarkedText(asked + answer, ((len(asked), len(asked) + len(answer)),), ends=False)]

    def _conversation(self, messages: list[dict[str, Any]], tools: Any) -> list[MarkedText]:
        if self.template is None:
            raise DataError(
                f"the tokenizer brings no chat template; choose data.template ({', '.join(TEMPLATES)}) or "
                "data.template_file"
            )
        return self.template.mark(messages, tools)

    def _document(self, marked: MarkedText) -> Document:
        tokens, spans = self.tokenizer().encode_with_spans(marked.text)
        taken = np.zeros(len(tokens), bool)
        # A token that only begins before an answer, such as one with the space in front of it, is predicted too.
        for begin, end in marked.answers:
            taken |= (spans[:, 1] > begin) & (spans[:, 0] < end)
        if not marked.ends:
            before, after = self.tokenizer().around
            tokens = np.concatenate([before, tokens, after])
            taken = np.concatenate([np.zeros(len(before), bool), taken, np.ones(len(after), bool)])
        return Document(tokens, taken if self.options.loss_on == "answers" else np.ones(len(tokens), bool))


def _messages(value: Any) -> list[dict[str, Any]]:
    """Return messages with `role` and `content`.

    Raises:
        DataError: they are something else.
    """
    if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
        raise DataError(f"messages should be a list of objects with role and content, got {value!r:.60}")
    return [_message(one) for one in value]


def _message(given: dict[str, Any]) -> dict[str, Any]:
    # Arrow fills fields that other messages have with null.
    message = {name: value for name, value in given.items() if value is not None}
    if "from" in message and "value" in message:
        speaker = str(message["from"])
        return {"role": _ROLES.get(speaker, speaker), "content": message["value"]}
    role, content = message.get("role"), message.get("content", "" if "tool_calls" in message else None)
    if not isinstance(role, str) or not isinstance(content, (str, list)):
        raise DataError(f"a message should have a role and a content, got {given!r:.80}")
    return message | {"content": content}
