"""Base of datasets of documents: settings, weighted sources, preparation and rows; and the dataset `text`."""

from __future__ import annotations

import glob
import itertools
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from hp_trainer.config import FilePath, Sections, section
from hp_trainer.data.corpus import (
    Corpus,
    CorpusInfo,
    CorpusNote,
    Document,
    PreparingProgress,
    build_corpus,
    cache_folder,
    prepared,
    read_notes,
    verify_corpus,
    write_notes,
)
from hp_trainer.data.dataset import Dataset, DatasetSource, Samples, Tokenizer
from hp_trainer.data.formats import SEGMENT_BYTES, Format, Reader, Record, open_reader, standard_library
from hp_trainer.data.samples import DocumentWindows, MixedSamples, PackedSamples, TokenSamples
from hp_trainer.data.tokenizer import load_tokenizer
from hp_trainer.exceptions import DataError, Problem

Packing = Literal["concatenate", "documents", "best_fit", "none"]

_BATCH = 256
_USES = ("training", "evaluation")


@section
class FilesConfig:
    """Settings of the files of one source."""

    path: FilePath | None = Field(None, description="file, folder, or a pattern such as train-*.parquet")
    format: Format = Field("auto", description="format of the files; auto: chosen by file ending")
    suffixes: tuple[str, ...] = Field((), description="file endings to read in a folder, such as .py; empty: all")
    split: str | None = Field(None, description="split of a saved DatasetDict; null: train")
    max_tokens: int | None = Field(
        None, ge=2, le=2**63 - 1, description="stop reading after this number of tokens; null: read all"
    )

    def check(self) -> Iterator[Problem]:
        for suffix in self.suffixes:
            if not suffix.startswith("."):
                what = "not a file ending"
                yield Problem(path="suffixes", what=what, expected="'.txt'", got=repr(suffix), hint=f"'.{suffix}'")


@section
class DocumentsConfig(FilesConfig):
    """Settings shared by datasets of documents. The settings of files are those of a single source, see `sources`."""

    tokenizer: FilePath | None = Field(None, description="tokenizer.json, or a directory with one; null: bytes")
    end_token: str | None = Field(None, description="token after each document; null: taken from the tokenizer's files")
    eval_fraction: float = Field(
        0.05, ge=0, le=0.9, description="fraction of the tokens, at the end, used for evaluation"
    )
    cache: FilePath | None = Field(
        None, description="folder of prepared data that runs share; null: .data next to the run folder"
    )

    def check(self) -> Iterator[Problem]:
        yield from super().check()
        yield from self._source_problems()

    def _source_problems(self) -> Iterator[Problem]:
        """Yield contradictions within `sources`, and between them and the settings of a single source."""
        sources: Sequence[Any] = getattr(self, "sources", ())
        if sources and self.path is not None:
            what = "given together with data.sources"
            yield Problem(path="path", what=what, expected="one of the two", hint="path=null")
        # Weights are compared with each other, so all sources need one or none.
        weights = [source.weight for source in sources]
        if any(weight is None for weight in weights) and any(weight is not None for weight in weights):
            yield Problem(
                path="sources",
                what="only some have a weight",
                expected="a weight for each source, or for none (then sources are weighted by size)",
            )


@dataclass(frozen=True)
class Source:
    """A source of a dataset: settings of its files, their path and endings, and the setting `at` that names it."""

    files: Any
    path: Path
    suffixes: tuple[str, ...]
    at: str

    def reader(self) -> Reader:
        """Return the reader of the source's files."""
        return open_reader(self.path, self.files.format, self.suffixes, self.files.split)


class DocumentsSource(DatasetSource):
    """Base of datasets of documents. A subclass defines how records are converted to documents.

    Args:
        options: a `DocumentsConfig` with the fields `sources` and `eval`.
        default: source to use when the options name none. None makes a source mandatory.
    """

    def __init__(self, options: Any, default: Source | None = None) -> None:
        self.options = options
        given = list(self._given("sources", options.sources))
        if not given and options.path is not None:
            given = [Source(options, Path(options.path).expanduser(), options.suffixes, "path")]
        self.sources = given or ([default] if default is not None else [])
        self.eval_sources = list(self._given("eval", options.eval))

    @abstractmethod
    def fields(self, source: Source) -> tuple[str, ...] | None:
        """Return the names of the fields to read from records. None reads all."""

    @abstractmethod
    def documents(self, records: Sequence[Record], source: Source) -> Iterator[Document]:
        """Yield the documents of a batch of records, in order. A record may have no document.

        Raises:
            DataError: a record has the wrong content; the message has its location.
        """

    @abstractmethod
    def facts(self, source: Source) -> Mapping[str, Any]:
        """Return the settings that determine the tokens of a source beside files and tokenizer, as JSON values.

        They are part of the key of the cache.
        """

    @property
    @abstractmethod
    def packing(self) -> Packing:
        """The arrangement of documents in rows: the setting `packing`."""

    def problems(self) -> Iterator[Problem]:
        if not self.sources:
            yield Problem(path="path", what="missing", expected="a file or folder, or data.sources")
        try:
            self.tokenizer()
        except DataError as error:
            yield Problem(path="tokenizer", what=str(error))
            return
        for source in (*self.sources, *self.eval_sources):
            yield from self._source_problems(source)

    def prepare(self, folder: Path) -> None:
        # A resumed run keeps its corpora, even if the source files have changed since.
        if read_notes(folder) is not None:
            return
        notes = {
            use: [CorpusNote.of(self._prepared(source, folder), folder) for source in sources]
            for use, sources in zip(_USES, (self.sources, self.eval_sources), strict=True)
        }
        write_notes(folder, notes)

    def verify(self, folder: Path, part: float = 1.0) -> None:
        for notes, sources in zip(self._notes(folder), (self.sources, self.eval_sources), strict=True):
            for note, source in zip(notes, sources, strict=True):
                # The cache may have been deleted. `note.open` then compares digests: changed sources are refused.
                if not note.path(folder).exists():
                    self._build(source, note.path(folder))
                note.open(folder)
                verify_corpus(note.path(folder), part)

    def open(self, folder: Path, sequence_length: int) -> Dataset:
        corpora, held_out = ([note.open(folder) for note in notes] for notes in self._notes(folder))
        train_ends = [self._train_end(corpus) for corpus in corpora]
        train = [
            self._samples(corpus, 0, end, sequence_length) for corpus, end in zip(corpora, train_ends, strict=True)
        ]
        for corpus, end, samples in zip(corpora, train_ends, train, strict=True):
            if not len(samples):
                raise DataError(_too_short(corpus.info, end, sequence_length))
        evaluation = [self._samples(corpus, 0, corpus.info.tokens, sequence_length) for corpus in held_out] or [
            self._samples(corpus, end, corpus.info.tokens, sequence_length)
            for corpus, end in zip(corpora, train_ends, strict=True)
        ]
        fingerprint = self._fingerprint(corpora, train_ends, sequence_length)
        # `MixedSamples` allows no empty source; of only empty ones the first is used.
        some = [one for one in evaluation if len(one)] or evaluation[:1]
        held = some[0] if len(some) == 1 else MixedSamples(some)
        # A single source may be the options themselves, which have no weight.
        weights = [source.files.weight for source in self.sources] if len(train) > 1 else []
        mixed = MixedSamples(train, None if None in weights else weights) if weights else train[0]
        return Dataset(mixed, held, self.tokenizer(), fingerprint)

    def _notes(self, folder: Path) -> list[list[CorpusNote]]:
        """Return the records of the run's corpora, one for each source: for training, and for evaluation."""
        notes, file = read_notes(folder), folder / "data.json"
        if notes is None:
            raise DataError(f"{file} is missing: it records the prepared data of the run")
        found = [notes.get(use, []) for use in _USES]
        for use, own, sources in zip(_USES, found, (self.sources, self.eval_sources), strict=True):
            if len(own) != len(sources):
                raise DataError(
                    f"{file} is damaged: corpora.{use}: expected {len(sources)} records, one for each source, got "
                    f"{len(own)}; delete it, and `hp-train resume` rebuilds it from a checkpoint"
                )
        return found

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer.

        Raises:
            DataError: it is missing or damaged.
        """
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.options.tokenizer, self.options.end_token)

    def _given(self, setting: str, sources: Sequence[Any]) -> Iterator[Source]:
        for number, source in enumerate(sources):
            yield Source(source, Path(source.path).expanduser(), source.suffixes, f"{setting}[{number}].path")

    def _source_problems(self, source: Source) -> Iterator[Problem]:
        if not source.path.exists() and not glob.has_magic(str(source.path)):
            yield Problem(
                path=source.at,
                what="does not exist",
                expected="a text file, or a folder with text files",
                got=str(source.path),
                hint=_nearest_existing(source.path),
            )
            return
        try:
            reader = source.reader()
            fields = self.fields(source)
            # Before ranks start, where an error is cheap.
            reader.check(fields)
            # One document is enough, and reading stops there.
            found = any(True for _ in itertools.islice(self._documents(reader, source, batch=1), 1))
        except DataError as error:
            yield Problem(path=source.at, what=str(error))
            return
        if not found:
            wanted = f" ending in {' or '.join(source.suffixes)}" if source.suffixes else ""
            yield Problem(
                path=source.at,
                what="contains no text",
                expected=f"at least one non-empty UTF-8 file{wanted} without zero bytes",
                got=str(source.path),
            )

    def _prepared(self, source: Source, folder: Path) -> Path:
        facts = {
            # Sizes and modification times identify contents: hashing terabytes at every start would take too long.
            "files": [
                (str(file.absolute()), (status := file.stat()).st_size, status.st_mtime_ns)
                for file in source.reader().files
            ],
            "max tokens": source.files.max_tokens,
            "tokenizer": self.tokenizer().fingerprint,
            **self.facts(source),
        }
        cache = cache_folder(folder, self.options.cache)
        return prepared(cache, facts, lambda folder: self._build(source, folder))

    def _build(self, source: Source, folder: Path) -> CorpusInfo:
        reader = source.reader()
        progress = PreparingProgress(f"preparing {source.path}", reader.total_bytes)
        return build_corpus(
            folder,
            self._documents(reader, source, progress=progress),
            origin=str(source.path),
            vocab_size=self.tokenizer().vocab_size,
            max_tokens=source.files.max_tokens,
        )

    def _documents(
        self, reader: Reader, source: Source, batch: int = _BATCH, progress: PreparingProgress | None = None
    ) -> Iterator[Document]:
        for some in _batches(reader.records(self.fields(source)), batch):
            yield from self.documents(some, source)
            if progress is not None:
                progress.advance(sum(record.size for record in some))

    def _train_end(self, corpus: Corpus) -> int:
        """Return the token where training ends and evaluation starts, rounded to a document unless concatenated."""
        tokens = corpus.info.tokens
        # With sources for evaluation, all tokens are for training.
        end = tokens - (0 if self.options.eval else int(tokens * self.options.eval_fraction))
        if self.packing == "concatenate" or end == tokens:
            return end
        # The last document that ends at or before the split.
        last = int(np.searchsorted(corpus.ends, end, side="right")) - 1
        return int(corpus.ends[max(0, last)])

    def _samples(self, corpus: Corpus, begin: int, end: int, length: int) -> Samples:
        tokens = corpus.tokens[begin:end]
        if self.packing == "concatenate":
            return TokenSamples(tokens, length)
        # The documents that end within (begin, end].
        first, last = np.searchsorted(corpus.ends, (begin, end), side="right")
        ends = corpus.ends[first:last] - begin
        if self.packing == "documents":
            return DocumentWindows(tokens, ends, length)
        return PackedSamples(
            tokens,
            # Starts: 0 and all ends but the last. `ends[:1] * 0` is empty where there are no documents.
            np.concatenate([ends[:1] * 0, ends[:-1]]),
            ends,
            length,
            pad=self.tokenizer().separator or 0,
            predicted=None if corpus.predicted is None else corpus.predicted[begin:end],
            together=self.packing == "best_fit",
            # A conversation is truncated: the rest of an answer would lack its question.
            keep_rest=corpus.predicted is None,
        )

    def _fingerprint(self, corpora: Sequence[Corpus], train_ends: Sequence[int], length: int) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "text": _alone([corpus.info.sha256 for corpus in corpora]),
            "training tokens": _alone(train_ends),
            "sequence length": length,
        }
        if self.packing != "concatenate":
            # Checkpoints of earlier versions record best_fit under its former name.
            facts["packing"] = "whole" if self.packing == "best_fit" else self.packing
            # Document ends change rows only where packing looks at them.
            facts["documents"] = _alone([corpus.info.files["ends"].sha256 for corpus in corpora])
        if any(corpus.predicted is not None for corpus in corpora):
            facts["answers"] = _alone([corpus.info.files["taken"].sha256 for corpus in corpora])
        if len(corpora) > 1:
            facts["weights"] = [source.files.weight for source in self.sources]
        return facts


def _batches(records: Iterator[Record], count: int) -> Iterator[list[Record]]:
    """Yield batches of at most `count` records, fewer if they are long: their tokens are in memory at once."""
    some: list[Record] = []
    size = 0
    for record in records:
        some.append(record)
        size += record.size
        if len(some) == count or size >= SEGMENT_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


def _alone(values: Sequence[Any]) -> Any:
    """Return the only value, or the list of several values."""
    return values[0] if len(values) == 1 else list(values)


def _too_short(info: CorpusInfo, tokens: int, length: int) -> str:
    if "taken" in info.files:
        return f"no conversation of {info.origin} has an answer within training.sequence_length = {length} tokens"
    return (
        f"the text of {info.origin} has {tokens} tokens for training; one sample takes {length + 1} "
        "(training.sequence_length + 1): use more text or shorter samples"
    )


def _nearest_existing(path: Path) -> str:
    """Return a hint with the deepest folder of the path that exists."""
    for parent in path.absolute().parents:
        if parent.is_dir():
            return f"a path that exists ({parent} does)"
    return ""


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
        "best_fit: complete documents, as many per row as fit; none: one document per row",
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
        return (source.files.field,)

    def facts(self, source: Source) -> Mapping[str, Any]:
        return {"kind": "text", "field": source.files.field}

    def documents(self, records: Sequence[Record], source: Source) -> Iterator[Document]:
        """Yield the tokens of each text that is not blank."""
        tokenizer, texts, segments = self.tokenizer(), [], []
        for record in records:
            text = record.text(source.files.field)
            # A blank segment within a long text belongs to it; only blank texts are skipped.
            if text.strip() or not (record.begins and record.ends):
                # With bytes as tokens the separator could not be distinguished from a zero byte of the text.
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
    """Return the tokens of each text."""
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
