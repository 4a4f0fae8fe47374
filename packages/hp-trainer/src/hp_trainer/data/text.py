"""The dataset `text`: text files, or the text in records of JSON lines, Parquet and Arrow files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import Field

from hp_trainer.config import FilePath, Sections, section
from hp_trainer.data.corpus import Document
from hp_trainer.data.dataset import Tokenizer
from hp_trainer.data.documents import DocumentsConfig, DocumentsSource, FilesConfig, Packing, Source
from hp_trainer.data.formats import Record, standard_library
from hp_trainer.exceptions import DataError


@section
class TextFilesConfig(FilesConfig):
    """Files of one source of text."""

    path: FilePath = Field(description="file, folder, or a pattern such as train-*.parquet")
    field: str = Field("text", description="field or column with the text, in files with records")
    weight: float | None = Field(None, gt=0, description="relative frequency of samples of this source")


@section
class TextDataConfig(DocumentsConfig):
    """Settings of the dataset `text`."""

    path: FilePath | None = Field(
        None,
        description="file, folder, or a pattern such as train-*.parquet; null: Python's standard library on "
        "this machine",
    )
    field: str = Field("text", description="field or column with the text, in files with records")
    sources: Sections[TextFilesConfig] = Field((), description="several sources, instead of path")
    eval: Sections[TextFilesConfig] = Field(
        (), description="sources for evaluation; empty: eval_fraction of the training sources"
    )
    packing: Packing = Field(
        "concatenate",
        description="concatenate: windows of all documents in sequence; documents: the same, with documents separated; "
        "whole: as many complete documents per row as fit; none: one document per row",
    )


class TextSource(DocumentsSource):
    """The dataset `text`: every token of every document is predicted."""

    def __init__(self, options: TextDataConfig) -> None:
        library = Source(options, standard_library(), options.suffixes or (".py",), "path")
        super().__init__(options, default=library)

    @property
    def packing(self) -> Packing:
        packing: Packing = self.options.packing
        return packing

    def fields(self, source: Source) -> tuple[str, ...] | None:
        """Return the name of the field with the text."""
        return (source.files.field,)

    def facts(self, source: Source) -> Mapping[str, Any]:
        """Return the settings that determine the tokens, see `DocumentsSource.facts`."""
        return {"kind": "text", "field": source.files.field}

    def documents(self, records: Sequence[Record], source: Source) -> Iterator[Document]:
        """Yield the tokens of each text that is not blank."""
        tokenizer, texts, segments = self.tokenizer(), [], []
        for record in records:
            text = record.text(source.files.field)
            # A blank segment within a long text belongs to it; only blank texts are skipped.
            if text.strip() or not (record.begins and record.ends):
                # With bytes as tokens the separator could not be told from a zero byte of the text.
                if tokenizer.vocab_size == 256 and tokenizer.separator is not None and chr(tokenizer.separator) in text:
                    raise DataError(
                        f"{record.where} contains a zero byte, which is the separator of documents when bytes are the "
                        "tokens"
                    )
                texts.append(text)
                segments.append(record)
        before, after = (len(tokens) for tokens in tokenizer.around)
        # Only the first and the last segment of a long text have the tokens around a document.
        for tokens, segment in zip(_encoded(tokenizer, texts, segments), segments, strict=True):
            begin, end = 0 if segment.begins else before, len(tokens) - (0 if segment.ends else after)
            yield Document(np.asarray(tokens[begin:end]), ends=segment.ends)


def _encoded(tokenizer: Tokenizer, texts: list[str], records: Sequence[Record]) -> list[np.ndarray]:
    """Return the tokens of each text.

    Raises:
        DataError: the tokenizer fails on a text; the message has its location.
    """
    try:
        return tokenizer.encode_documents(texts)
    except DataError:
        # One by one, to find the text.
        for text, record in zip(texts, records, strict=True):
            try:
                tokenizer.encode_documents([text])
            except DataError as error:
                raise DataError(f"{record.where}: {error}") from error
        raise
