"""Prepared corpora: the tokens of a source in memory-mapped files, their verification, and the cache that runs share.

A corpus is stored in a folder whose name is the digest of everything that determines its tokens: the files with their
sizes and modification times, the tokenizer, and the settings. `corpus.json` describes it: dtype, number of tokens, and
for each file its size and SHA-256 digests by block, so that large files are verified in parallel or in part.
`data.json` in a run's folder records which corpora the run reads, with their digests.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import random
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from hp_trainer._coordination import report
from hp_trainer._files import mismatch, write_atomically
from hp_trainer.exceptions import DataError, MachineError, describe_machine_error

_SECONDS = 10.0


class PreparingProgress:
    """Progress of reading files: a line on standard error every 10 seconds."""

    def __init__(self, title: str, total: int) -> None:
        self._title, self._total = title, max(1, total)
        self._read, self._reported = 0, time.monotonic()

    def advance(self, size: int) -> None:
        """Report that `size` more bytes have been read."""
        self._read = min(self._total, self._read + size)
        now = time.monotonic()
        if now - self._reported >= _SECONDS:
            self._reported = now
            report(f"{self._title}: {self._read / self._total:.0%}")


BLOCK_BYTES = 32 << 20
_READ_BYTES = 1 << 20
_MOST_THREADS = 8  # enough to saturate a disk or a network file system


@dataclass(frozen=True)
class Block:
    """A range of bytes of a file, and its expected SHA-256 digest."""

    path: Path
    start: int
    bytes: int
    sha256: str

    def is_sound(self) -> bool:
        """Return True when the block has the expected digest. hashlib releases the GIL, so threads hash in parallel."""
        digest, left = hashlib.sha256(), self.bytes
        # Unbuffered: the reads below are large already.
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start)
            while left and (data := file.read(min(left, _READ_BYTES))):
                digest.update(data)
                left -= len(data)
        return digest.hexdigest() == self.sha256


class BlockDigests:
    """Computes the digests of the blocks of a file while it is written."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._block, self._filled = hashlib.sha256(), 0

    def update(self, values: bytes) -> None:
        """Append bytes."""
        # Slices of a view copy nothing.
        view = memoryview(values)
        while view:
            data = view[: BLOCK_BYTES - self._filled]
            self._block.update(data)
            self._filled += len(data)
            view = view[len(data) :]
            if self._filled == BLOCK_BYTES:
                self._done.append(self._block.hexdigest())
                self._block, self._filled = hashlib.sha256(), 0

    def finish(self) -> tuple[str, ...]:
        """Return the digests of all blocks in order. The last block may be shorter."""
        return (*self._done, self._block.hexdigest()) if self._filled else tuple(self._done)


def blocks_of(path: Path, size: int, digests: Sequence[str]) -> list[Block]:
    """Return the blocks of a file of `size` bytes."""
    starts = range(0, size, BLOCK_BYTES)
    return [
        Block(path, start, min(BLOCK_BYTES, size - start), sha256)
        for start, sha256 in zip(starts, digests, strict=True)
    ]


def verify_blocks(title: str, blocks: Sequence[Block], part: float = 1.0) -> None:
    """Compare blocks, or a random `part` of them (at least one), with their digests, in parallel."""
    # Rounded up, so that any part above 0 reads at least one block.
    chosen = list(blocks) if part >= 1 else random.sample(blocks, math.ceil(part * len(blocks)))
    num_threads = max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)), len(chosen)))
    progress = PreparingProgress(f"verifying {title}", sum(block.bytes for block in chosen))
    with ThreadPoolExecutor(num_threads, "verify") as pool:
        # `map` returns results in order, so the error names the first damaged block.
        for block, sound in zip(chosen, pool.map(Block.is_sound, chosen), strict=True):
            if not sound:
                pool.shutdown(cancel_futures=True)
                raise DataError(
                    f"{block.path} is damaged between bytes {block.start} and {block.start + block.bytes}: its tokens "
                    f"are not those that the run was trained on; delete {block.path.parent}, and the next start "
                    "prepares the same data again from their source"
                )
            progress.advance(block.bytes)


_FORMAT = 3
_DESCRIPTION = "corpus.json"
_INCOMPLETE = ".incomplete-"
_ABANDONED_SECONDS = 3600
# Dtypes of the files by content; that of the tokens depends on the vocabulary. "taken" is `Corpus.predicted`.
_DTYPES = {"tokens": None, "ends": "int64", "taken": "bool"}


@dataclass(frozen=True, slots=True)
class Document:
    """Tokens of a document with its end token, or of a segment of a long document.

    Attributes:
        tokens: integers `[tokens]`.
        predicted: bool `[tokens]`, True where predicting the token counts in the loss. None means all.
        ends: True when the document ends here, False when the next segment continues it.
    """

    tokens: np.ndarray
    predicted: np.ndarray | None = None
    ends: bool = True

    def first(self, count: int | None) -> Document:
        """Return the document truncated to `count` tokens. None does not truncate."""
        ends = self.ends or (count is not None and count <= len(self.tokens))
        return Document(self.tokens[:count], None if self.predicted is None else self.predicted[:count], ends)


@dataclass(frozen=True, kw_only=True)
class CorpusFile:
    """Description of a file of a corpus, with the SHA-256 of each block of `BLOCK_BYTES`."""

    name: str
    bytes: int
    sha256: str
    blocks: tuple[str, ...]

    @property
    def is_covered(self) -> bool:
        """True when the block digests cover every byte."""
        return len(self.blocks) == -(-self.bytes // BLOCK_BYTES)


@dataclass(frozen=True, kw_only=True)
class CorpusInfo:
    """Description of a corpus.

    Attributes:
        tokens: number of tokens, end tokens included.
        documents: number of documents.
        origin: path of the source.
        dtype: NumPy name of the tokens' dtype.
        vocab_size: upper bound (exclusive) of the tokens.
        files: files by content: `tokens`; `ends`, the end (exclusive) of each document in int64; and, if some tokens
            are not predicted, `taken`, one byte per token, 1 where it is predicted.
        format: version of the format.
    """

    tokens: int
    documents: int
    origin: str
    dtype: Annotated[str, Field(pattern=r"^uint(8|16|32|64)$")]
    vocab_size: int
    files: Mapping[str, CorpusFile]
    format: int = _FORMAT

    @property
    def sha256(self) -> str:
        """SHA-256 of all tokens, the same on every machine."""
        return self.files["tokens"].sha256


def build_corpus(
    folder: Path,
    documents: Iterable[Document],
    *,
    origin: str,
    vocab_size: int = 256,
    max_tokens: int | None = None,
) -> CorpusInfo:
    """Write documents as a corpus into `folder`.

    The description is renamed into place after all files, so a reader sees a complete corpus or none. Several processes
    may build the same corpus at once: files are named by their contents, which are equal.

    Args:
        folder: folder of the corpus, created if missing.
        documents: documents to write in this order. Either all or none have `predicted`.
        origin: path of the source, for the description.
        vocab_size: upper bound (exclusive) of the tokens; it determines their dtype.
        max_tokens: stop after this number of tokens.

    Raises:
        DataError: there are no documents.
        MachineError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _delete_abandoned(folder)
        # The smallest unsigned dtype that holds every token; at least uint8.
        with _Writer(folder, np.min_scalar_type(max(255, vocab_size - 1)).name) as writer:
            for document in documents:
                left = None if max_tokens is None else max_tokens - writer.tokens
                if left is not None and left <= 0:
                    break
                writer.add(document.first(left))
            if not writer.tokens:
                raise DataError(f"{origin} contains no text: expected non-empty UTF-8 files without zero bytes")
            files = writer.publish()
        info = CorpusInfo(
            tokens=writer.tokens,
            documents=writer.documents,
            origin=origin,
            dtype=writer.dtype,
            vocab_size=vocab_size,
            files=files,
        )
        # Last: a folder with a description is complete.
        write_atomically(folder / _DESCRIPTION, json.dumps(asdict(info), indent=2) + "\n")
    except OSError as error:
        reason = describe_machine_error(error) or error
        raise MachineError(f"prepared data cannot be written into {folder}: {reason}") from error
    return info


def _delete_abandoned(folder: Path) -> None:
    """Delete files of killed builders. A running builder has written within the last hour."""
    builders: dict[str, list[Path]] = {}
    for file in folder.glob(f"*{_INCOMPLETE}*"):
        builders.setdefault(file.name.partition(_INCOMPLETE)[2], []).append(file)
    for files in builders.values():
        with contextlib.suppress(FileNotFoundError):
            # The newest file of a builder counts: with few long documents, `ends` is not written for hours.
            if time.time() - max(file.stat().st_mtime for file in files) > _ABANDONED_SECONDS:
                for file in files:
                    file.unlink()


class _Writer:
    """Files of a corpus in progress. Leaving the context deletes those that were not published."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.folder, self.dtype = folder, dtype
        self.tokens = self.documents = 0
        self._files: dict[str, _FileInProgress] = {}
        self._builder = secrets.token_hex(4)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def add(self, document: Document) -> None:
        """Append a document, or a segment of one."""
        self.tokens += len(document.tokens)
        self._file("tokens").write(document.tokens.astype(self.dtype, copy=False))
        # Segments of a long document add tokens; only the last one adds an end.
        if document.ends:
            self.documents += 1
            self._file("ends").write(np.array([self.tokens], np.int64))
        if document.predicted is not None:
            self._file("taken").write(document.predicted.astype(np.bool_, copy=False))

    def publish(self) -> dict[str, CorpusFile]:
        """Rename every file to its final name."""
        return {name: file.publish(self.folder, name) for name, file in self._files.items()}

    def _file(self, name: str) -> _FileInProgress:
        if name not in self._files:
            self._files[name] = file = _FileInProgress(self.folder / f"{name}{_INCOMPLETE}{self._builder}")
            # After `publish` the temporary name no longer exists, and `discard` only closes it.
            self._stack.callback(file.discard)
        return self._files[name]


class _FileInProgress:
    """A file being written, with its digests."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb", buffering=1 << 20)
        self._digest, self._blocks = hashlib.sha256(), BlockDigests()
        self._bytes = 0

    def write(self, values: np.ndarray) -> None:
        data = values.tobytes()
        self._file.write(data)
        self._digest.update(data)
        self._blocks.update(data)
        self._bytes += len(data)

    def publish(self, folder: Path, name: str) -> CorpusFile:
        self._file.flush()
        # Forced to disk before the rename: after a power failure, a final name must have its full contents.
        os.fsync(self._file.fileno())
        digest = self._digest.hexdigest()
        blocks = self._blocks.finish()
        # Named by its contents: concurrent builders replace a file by an equal one.
        file = CorpusFile(name=f"{name}-{digest[:16]}.bin", bytes=self._bytes, sha256=digest, blocks=blocks)
        self._path.replace(folder / file.name)
        return file

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            # On a full disk, flushing the buffer fails.
            self._file.close()
        self._path.unlink(missing_ok=True)


def read_corpus_info(folder: Path) -> CorpusInfo | None:
    """Return the description of the corpus in `folder`, or None if there is no complete corpus.

    Raises:
        DataError: the description is damaged or has another format, or a file has a wrong size.
    """
    path = folder / _DESCRIPTION
    if not path.is_file():
        return None
    info = _parse_info(path.read_bytes())
    if info is None:
        raise DataError(f"{path} is damaged or of another version; delete {folder} to build it again")
    for file in info.files.values():
        path = folder / file.name
        got = path.stat().st_size if path.is_file() else 0
        if got != file.bytes:
            raise DataError(f"{path}: expected {file.bytes} bytes, got {got}; delete {folder} to build it again")
    return info


def verify_corpus(folder: Path, part: float = 1.0) -> None:
    """Compare the files of a corpus, or a random `part` of their blocks, with the digests in its description."""
    info = read_corpus_info(folder)
    if info is None:
        raise DataError(f"{folder} contains no corpus")
    blocks = [block for file in info.files.values() for block in blocks_of(folder / file.name, file.bytes, file.blocks)]
    verify_blocks(str(folder), blocks, part)


_INFO = TypeAdapter(CorpusInfo)


def _parse_info(text: bytes) -> CorpusInfo | None:
    try:
        info = _INFO.validate_json(text, strict=True)
    except ValidationError:
        return None
    # A description may be forged or damaged: names must not leave the folder, and digests must cover every byte.
    sound = info.format == _FORMAT and info.tokens > 0 and {"tokens", "ends"} <= info.files.keys() <= _DTYPES.keys()
    sound = sound and all(Path(file.name).name == file.name and file.is_covered for file in info.files.values())
    lengths = {"tokens": info.tokens, "ends": info.documents, "taken": info.tokens}
    sound = sound and all(
        file.bytes == lengths[name] * np.dtype(_DTYPES[name] or info.dtype).itemsize
        for name, file in info.files.items()
    )
    return info if sound else None


class _MappedFile(np.memmap):
    """A mapped file that raises `DataError` instead of SIGBUS once it is shorter than its mapping."""

    def __getitem__(self, index: Any) -> Any:
        mapping: Any = self._mmap  # type: ignore[attr-defined]  # None: a copy of values
        if mapping is not None and mapping.size() < len(mapping):
            raise DataError(
                f"{self.filename} had {len(mapping)} bytes and has {mapping.size()} now: it was truncated during the "
                f"run; delete {Path(str(self.filename)).parent} to build it again, and resume"
            )
        return super().__getitem__(index)


class Corpus:
    """A prepared corpus, mapped into memory.

    Attributes:
        info: description of the corpus.
        tokens: tokens of all documents, `[info.tokens]`.
        ends: end (exclusive) of each document, int64 `[info.documents]`.
        predicted: True where a token is predicted, bool `[info.tokens]`. None means all.

    Raises:
        DataError: `folder` contains no complete corpus.
    """

    def __init__(self, folder: Path) -> None:
        info = read_corpus_info(folder)
        if info is None:
            raise DataError(f"{folder} contains no corpus")
        self.info = info
        mapped = {
            # Processes on one machine share the pages, and only those that are read use memory.
            name: _MappedFile(folder / file.name, dtype=_DTYPES[name] or info.dtype, mode="r")
            for name, file in info.files.items()
        }
        self.tokens: np.ndarray = mapped["tokens"]
        self.ends: np.ndarray = mapped["ends"]
        self.predicted: np.ndarray | None = mapped.get("taken")


_NOTE = "data.json"


def cache_folder(run_data: Path, wanted: str | None) -> Path:
    """Return the cache of prepared corpora: `wanted`, or by default `.data` in the parent of the run's folder."""
    return run_data.parent.parent / ".data" if wanted is None else Path(wanted)


def prepared(cache: Path, facts: Mapping[str, Any], build: Callable[[Path], CorpusInfo]) -> Path:
    """Return the folder of the corpus that `facts` (JSON values) determine, and build it if it is not in the cache."""
    # Keys are sorted, so that equal facts have one digest.
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    # 128 bits rule out accidental collisions and keep names short.
    folder = cache / digest[:32]
    if read_corpus_info(folder) is None:
        build(folder)
    return folder


@dataclass(frozen=True, kw_only=True)
class CorpusNote:
    """A corpus of a run: its relative folder, where it was prepared, so that a run may move alone, and digests."""

    folder: str
    origin: str
    digests: Mapping[str, str]

    @classmethod
    def of(cls, corpus: Path, run_data: Path) -> CorpusNote:
        """Return the record of an existing corpus."""
        digests = {name: file.sha256 for name, file in Corpus(corpus).info.files.items()}
        origin = str(corpus.resolve())
        return cls(folder=os.path.relpath(origin, run_data.resolve()), origin=origin, digests=digests)

    def path(self, run_data: Path) -> Path:
        """Return the folder of the corpus, which may not exist. The relative path is tried first."""
        relative = Path(os.path.normpath(run_data / self.folder))
        # If neither exists, errors name the relative path.
        return relative if relative.exists() or not Path(self.origin).exists() else Path(self.origin)

    def open(self, run_data: Path) -> Corpus:
        """Open the corpus."""
        corpus = Corpus(self.path(run_data))
        found = {name: file.sha256 for name, file in corpus.info.files.items()}
        if found != self.digests:
            raise DataError(
                f"{self.path(run_data)} does not contain the data that the run in {run_data.parent} was started with; "
                "restore them, or start a new run"
            )
        return corpus


@dataclass(frozen=True)
class _Notes:
    """The form of `data.json`: records by use."""

    format: Literal[1]
    corpora: dict[str, list[CorpusNote]]


def write_notes(run_data: Path, notes: Mapping[str, Sequence[CorpusNote]]) -> None:
    """Write the records of the corpora that a run reads, by use (`training`, `evaluation`)."""
    plain = {use: [asdict(one) for one in notes[use]] for use in notes}
    write_atomically(run_data / _NOTE, json.dumps({"format": 1, "corpora": plain}, indent=2) + "\n")


def read_notes(run_data: Path) -> dict[str, list[CorpusNote]] | None:
    """Read the records that `write_notes` wrote. Returns None if there is no file."""
    file = run_data / _NOTE
    if not file.is_file():
        return None
    try:
        return TypeAdapter(_Notes).validate_json(file.read_bytes(), strict=True).corpora
    except ValidationError as error:
        raise DataError(
            f"{file} is damaged: {mismatch(error)}; delete it, and `hp-train resume` rebuilds it from a checkpoint"
        ) from error
