"""Datasets of documents: sources with weights, a tokenizer, and rows that are cut or packed from them."""

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

from hp_trainer.config import setting
from hp_trainer.data.cache import CorpusNote, cache_folder, prepared, read_notes, write_notes
from hp_trainer.data.corpus import Corpus, CorpusInfo, Document, build_corpus, verify_corpus
from hp_trainer.data.dataset import Dataset, DatasetSource, Samples, Tokenizer
from hp_trainer.data.formats import PIECE_BYTES, Format, Reader, Record, open_reader
from hp_trainer.data.mixture import MixedSamples
from hp_trainer.data.progress import PreparingProgress
from hp_trainer.data.samples import DocumentWindows, PackedSamples, TokenSamples
from hp_trainer.data.tokenizer import load_tokenizer
from hp_trainer.exceptions import DataError, Problem

Packing = Literal["concatenate", "documents", "whole", "none"]

_BATCH = 256
_USES = ("training", "evaluation")


@dataclass(frozen=True, kw_only=True)
class FilesConfig:
    """Files of one source."""

    path: str | None = setting(None, help="file, folder, or a pattern such as train-*.parquet", is_path=True)
    format: Format = setting("auto", help="format of the files; auto: by their endings")
    suffixes: tuple[str, ...] = setting((), help="file endings wanted in a folder, such as .py; empty: all")
    split: str | None = setting(None, help="split of a saved dictionary of datasets; null: train")
    max_tokens: int | None = setting(
        None, help="stop reading after so many tokens; null: read all", minimum=2, maximum=2**63 - 1
    )

    def check(self) -> Iterator[Problem]:
        if self.path == "":
            yield Problem(path="path", what="empty", expected="a file or folder, or null", hint="null")
        for suffix in self.suffixes:
            if not suffix.startswith("."):
                yield Problem(
                    path="suffixes",
                    what="not a file ending",
                    expected="'.txt'",
                    got=repr(suffix),
                    hint=f"'.{suffix}'",
                )


@dataclass(frozen=True, kw_only=True)
class DocumentsConfig(FilesConfig):
    """Settings that datasets of documents share; those of a single source stand for `sources` of one entry."""

    tokenizer: str | None = setting(
        None, help="tokenizer.json, or a directory that holds one; null: bytes", is_path=True
    )
    end_token: str | None = setting(None, help="token after each document; null: what the tokenizer's files say")
    eval_fraction: float = setting(
        0.05, help="share of the tokens, at the end, kept for evaluation", minimum=0, maximum=0.9
    )
    cache: str | None = setting(
        None, help="folder of prepared data that runs share; null: .data beside the run folder", is_path=True
    )

    def check(self) -> Iterator[Problem]:
        yield from super().check()
        if self.cache == "":
            yield Problem(path="cache", what="empty", expected="a folder, or null", hint="null")
        if self.tokenizer == "":
            yield Problem(path="tokenizer", what="empty", expected="a file or folder, or null", hint="null")
        yield from self._source_problems()

    def _source_problems(self) -> Iterator[Problem]:
        """Yield how `sources` contradict themselves or the settings of a single source."""
        sources: Sequence[Any] = getattr(self, "sources", ())
        if sources and self.path is not None:
            yield Problem(path="path", what="given beside data.sources", expected="one of the two", hint="path=null")
        weights = [source.weight for source in sources]
        if any(weight is None for weight in weights) and any(weight is not None for weight in weights):
            yield Problem(
                path="sources",
                what="some have a weight and some have none",
                expected="a weight for each, or for none: as often as there are samples of it",
            )


@dataclass(frozen=True)
class Source:
    """One source of a dataset.

    Attributes:
        files: its settings.
        path: where its files are.
        suffixes: endings wanted.
        at: the setting that names it, for problems.
    """

    files: Any
    path: Path
    suffixes: tuple[str, ...]
    at: str

    def reader(self) -> Reader:
        """Return the reader of its files.

        Raises:
            DataError: see `open_reader`.
        """
        return open_reader(self.path, self.files.format, self.suffixes, self.files.split)


class DocumentsSource(DatasetSource):
    """Base of datasets of documents; a subclass says how a record becomes one.

    Args:
        options: a `DocumentsConfig` with `sources` and `eval`.
        default: the source where the options name none; None: they must.
    """

    def __init__(self, options: Any, default: Source | None = None) -> None:
        self.options = options
        given = list(self._given("sources", options.sources))
        if not given and options.path is not None:
            given = [Source(options, Path(options.path).expanduser(), options.suffixes, "path")]
        self.sources = given or ([default] if default is not None else [])
        self.eval_sources = list(self._given("eval", options.eval))

    # What a subclass decides ---------------------------------------------------------------------------------

    @abstractmethod
    def fields(self, source: Source) -> tuple[str, ...] | None:
        """Return the fields of a record that are needed, any of them; None: all."""

    @abstractmethod
    def documents(self, records: Sequence[Record], source: Source) -> Iterator[Document]:
        """Yield the documents of some records, in their order; a record may have none.

        Raises:
            DataError: a record holds something else; names its place.
        """

    @abstractmethod
    def facts(self, source: Source) -> Mapping[str, Any]:
        """Return what else decides the tokens of a source, as JSON values."""

    @property
    @abstractmethod
    def packing(self) -> Packing:
        """The way in which documents become rows."""

    # The interface of a dataset ------------------------------------------------------------------------------

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
        if read_notes(folder) is not None:
            return
        notes = {
            use: [CorpusNote.of(self._prepared(source, folder), folder) for source in sources]
            for use, sources in zip(_USES, (self.sources, self.eval_sources), strict=True)
        }
        write_notes(folder, notes)

    def verify(self, folder: Path, part: float = 1.0) -> None:
        """Compare the tokens with their digests, and prepare again what is gone; see `DatasetSource.verify`."""
        notes = read_notes(folder)
        if notes is None:
            raise DataError(f"{folder} does not say which data its run reads")
        for use, sources in zip(_USES, (self.sources, self.eval_sources), strict=True):
            for note, source in zip(notes[use], sources, strict=True):
                if not note.path(folder).exists():
                    self._build(source, note.path(folder))
                note.open(folder)
                verify_corpus(note.path(folder), part)

    def open(self, folder: Path, sequence_length: int) -> Dataset:
        """Return the rows of the prepared corpora.

        Raises:
            DataError: a corpus is missing or damaged, or too short for one training sample.
        """
        notes = read_notes(folder)
        if notes is None:
            raise DataError(f"{folder} does not say which data its run reads")
        corpora, held_out = ([note.open(folder) for note in notes[use]] for use in _USES)
        cuts = [self._cut(corpus) for corpus in corpora]
        train = [self._samples(corpus, 0, cut, sequence_length) for corpus, cut in zip(corpora, cuts, strict=True)]
        for corpus, cut, samples in zip(corpora, cuts, train, strict=True):
            if not len(samples):
                raise DataError(_too_short(corpus.info, cut, sequence_length))
        evaluation = [self._samples(corpus, 0, corpus.info.tokens, sequence_length) for corpus in held_out] or [
            self._samples(corpus, cut, corpus.info.tokens, sequence_length)
            for corpus, cut in zip(corpora, cuts, strict=True)
        ]
        fingerprint = self._fingerprint(corpora, cuts, sequence_length)
        return Dataset(self._mixed(train), _together(evaluation), self.tokenizer(), fingerprint)

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer.

        Raises:
            DataError: it is missing or damaged.
        """
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.options.tokenizer, self.options.end_token)

    # Preparing -----------------------------------------------------------------------------------------------

    def _given(self, setting: str, sources: Sequence[Any]) -> Iterator[Source]:
        for number, source in enumerate(sources):
            yield Source(source, Path(source.path).expanduser(), source.suffixes, f"{setting}[{number}].path")

    def _source_problems(self, source: Source) -> Iterator[Problem]:
        if not source.path.exists() and not glob.has_magic(str(source.path)):
            yield Problem(
                path=source.at,
                what="does not exist",
                expected="a text file, or a folder that holds some",
                got=str(source.path),
                hint=_nearest_existing(source.path),
            )
            return
        try:
            reader = source.reader()
            fields = self.fields(source)
            reader.check(fields)
            found = any(True for _ in itertools.islice(self._documents(reader, source, batch=1), 1))
        except DataError as error:
            yield Problem(path=source.at, what=str(error))
            return
        if not found:
            wanted = f" ending in {' or '.join(source.suffixes)}" if source.suffixes else ""
            yield Problem(
                path=source.at,
                what="holds no text",
                expected=f"at least one non-empty UTF-8 file{wanted} without zero bytes",
                got=str(source.path),
            )

    def _prepared(self, source: Source, folder: Path) -> Path:
        facts = {
            "files": [(str(file.absolute()), *_stamp(file)) for file in source.reader().files],
            "max tokens": source.files.max_tokens,
            "tokenizer": self.tokenizer().fingerprint,
            **self.facts(source),
        }
        cache = cache_folder(folder, self.options.cache)
        return prepared(cache, facts, lambda folder: self._build(source, folder))

    def _build(self, source: Source, folder: Path) -> CorpusInfo:
        reader = source.reader()
        with PreparingProgress(str(source.path), reader.total_bytes) as progress:
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

    # Rows ----------------------------------------------------------------------------------------------------

    def _cut(self, corpus: Corpus) -> int:
        """Return the token at which training ends and evaluation begins; between documents where they stay whole."""
        tokens = corpus.info.tokens
        cut = tokens - (0 if self.options.eval else int(tokens * self.options.eval_fraction))
        if self.packing == "concatenate" or cut == tokens:
            return cut
        last = int(np.searchsorted(corpus.ends, cut, side="right")) - 1
        return int(corpus.ends[max(0, last)])

    def _samples(self, corpus: Corpus, begin: int, end: int, length: int) -> Samples:
        tokens = corpus.tokens[begin:end]
        if self.packing == "concatenate":
            return TokenSamples(tokens, length)
        first, last = np.searchsorted(corpus.ends, (begin, end), side="right")
        ends = corpus.ends[first:last] - begin
        if self.packing == "documents":
            return DocumentWindows(tokens, ends, length)
        return PackedSamples(
            tokens,
            np.concatenate([ends[:1] * 0, ends[:-1]]),
            ends,
            length,
            pad=self.tokenizer().separator or 0,
            taken=None if corpus.taken is None else corpus.taken[begin:end],
            together=self.packing == "whole",
            keep_rest=corpus.taken is None,
        )

    def _mixed(self, samples: Sequence[Samples]) -> Samples:
        if len(samples) == 1:
            return samples[0]
        weights = [source.files.weight for source in self.sources]
        return MixedSamples(samples, None if None in weights else weights)

    def _fingerprint(self, corpora: Sequence[Corpus], cuts: Sequence[int], length: int) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "text": _alone([corpus.info.sha256 for corpus in corpora]),
            "training tokens": _alone(cuts),
            "sequence length": length,
        }
        if self.packing != "concatenate":
            facts["packing"] = self.packing
            facts["documents"] = _alone([corpus.info.files["ends"].sha256 for corpus in corpora])
        if any(corpus.taken is not None for corpus in corpora):
            facts["answers"] = _alone([corpus.info.files["taken"].sha256 for corpus in corpora])
        if len(corpora) > 1:
            facts["weights"] = [source.files.weight for source in self.sources]
        return facts


def _batches(records: Iterator[Record], count: int) -> Iterator[list[Record]]:
    """Yield up to `count` records at a time, fewer where they are long: their tokens are in memory together."""
    some: list[Record] = []
    size = 0
    for record in records:
        some.append(record)
        size += record.size
        if len(some) == count or size >= PIECE_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


def _together(samples: Sequence[Samples]) -> Samples:
    """Return all samples of some sources, those without any left out."""
    some = [one for one in samples if len(one)] or samples[:1]
    return some[0] if len(some) == 1 else MixedSamples(some)


def _alone(values: Sequence[Any]) -> Any:
    return values[0] if len(values) == 1 else list(values)


def _too_short(info: CorpusInfo, tokens: int, length: int) -> str:
    if "taken" in info.files:
        return f"no conversation of {info.origin} has an answer within training.sequence_length = {length} tokens"
    return (
        f"the text of {info.origin} has {tokens} tokens for training; one sample takes {length + 1} "
        "(training.sequence_length + 1): use more text or shorter samples"
    )


def _stamp(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def _nearest_existing(path: Path) -> str:
    """Return the part of the path that exists, which shows where it goes wrong."""
    for parent in path.absolute().parents:
        if parent.is_dir():
            return f"a path that exists ({parent} does)"
    return ""
