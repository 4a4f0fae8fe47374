"""The dataset `text`: text files, JSON lines, Parquet and Arrow, as tokens of any tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hp_trainer.config import sections, setting
from hp_trainer.data.corpus import Document
from hp_trainer.data.documents import DocumentsConfig, DocumentsSource, FilesConfig, Packing, Source
from hp_trainer.data.formats import Record, standard_library
from hp_trainer.exceptions import DataError


@dataclass(frozen=True, kw_only=True)
class TextFilesConfig(FilesConfig):
    """Text of one source among several."""

    path: str = setting(help="file, folder, or a pattern such as train-*.parquet", is_path=True)
    field: str = setting("text", help="field or column that holds the text, where files have such")
    weight: float | None = setting(None, help="how often its samples come, relative to the others'", above=0)


@dataclass(frozen=True, kw_only=True)
class TextDataConfig(DocumentsConfig):
    """Text, every token of which is predicted."""

    path: str | None = setting(
        None,
        help="file, folder, or a pattern such as train-*.parquet; null: Python's standard library on this machine",
        is_path=True,
    )
    field: str = setting("text", help="field or column that holds the text, where files have such")
    sources: tuple[TextFilesConfig, ...] = sections(TextFilesConfig, help="several sources instead of path")
    eval: tuple[TextFilesConfig, ...] = sections(
        TextFilesConfig, help="sources to evaluate with; empty: eval_fraction of those to train on"
    )
    packing: Packing = setting(
        "concatenate",
        help="concatenate: rows are cut from all documents in a line; documents: likewise, each document by itself; "
        "whole: as many whole documents as fit; none: one document a row",
    )


class TextSource(DocumentsSource):
    """Documents of text, every token of which is predicted."""

    def __init__(self, options: TextDataConfig) -> None:
        library = Source(options, standard_library(), options.suffixes or (".py",), "path")
        super().__init__(options, default=library)

    @property
    def packing(self) -> Packing:
        packing: Packing = self.options.packing
        return packing

    def fields(self, source: Source) -> tuple[str, ...] | None:
        """Return the one field that holds the text."""
        return (source.files.field,)

    def facts(self, source: Source) -> Mapping[str, Any]:
        """Return the field, and which kind of dataset it is."""
        return {"kind": "text", "field": source.files.field}

    def documents(self, records: Sequence[Record], source: Source) -> Iterator[Document]:
        """Yield the tokens of each text that is not blank."""
        tokenizer, texts, pieces = self.tokenizer(), [], []
        for record in records:
            text = record.text(source.files.field)
            if text.strip() or not (record.begins and record.ends):
                _refuse_separator(text, record, tokenizer.separator if tokenizer.vocab_size == 256 else None)
                texts.append(text)
                pieces.append(record)
        before, after = (len(tokens) for tokens in tokenizer.around)
        for tokens, piece in zip(tokenizer.encode_documents(texts), pieces, strict=True):
            begin, end = 0 if piece.begins else before, len(tokens) - (0 if piece.ends else after)
            yield Document(np.asarray(tokens[begin:end]), ends=piece.ends)


def _refuse_separator(text: str, record: Record, separator: int | None) -> None:
    if separator is not None and chr(separator) in text:
        raise DataError(f"{record.where} holds a zero byte, which ends documents where bytes are the tokens")
