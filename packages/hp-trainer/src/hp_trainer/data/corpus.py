"""A corpus: all tokens of a source in memory-mapped files, built once and published in one step."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from hp_trainer._files import write_atomically
from hp_trainer.data.verification import BLOCK_BYTES, BlockDigests, blocks_of, verify_blocks
from hp_trainer.exceptions import DataError, MachineError
from hp_trainer.failures import describe_machine_error

_FORMAT = 3
_DESCRIPTION = "corpus.json"
_INCOMPLETE = ".incomplete-"
_ABANDONED_SECONDS = 3600
_DTYPES = {"tokens": None, "ends": "int64", "taken": "bool"}


@dataclass(frozen=True, slots=True)
class Document:
    """Tokens of one document, its end included, or of a piece of one.

    Attributes:
        tokens: integers `[tokens]`.
        taken: bool `[tokens]`: whether a loss is taken for predicting the token; None: for all.
        ends: whether the document ends with them; the next tokens go on with it otherwise.
    """

    tokens: np.ndarray
    taken: np.ndarray | None = None
    ends: bool = True

    def first(self, count: int | None) -> Document:
        """Return the document cut off after `count` tokens (None: whole)."""
        ends = self.ends or (count is not None and count <= len(self.tokens))
        return Document(self.tokens[:count], None if self.taken is None else self.taken[:count], ends)


@dataclass(frozen=True, kw_only=True)
class CorpusFile:
    """One file of a corpus, beside its description: name, size and digests.

    Attributes:
        sha256: of the whole file.
        blocks: SHA-256 of each `BLOCK_BYTES`, so that it can be verified in parallel, or in part.
    """

    name: str
    bytes: int
    sha256: str
    blocks: Sequence[str]

    @property
    def is_whole(self) -> bool:
        """Return whether there is a digest for every byte."""
        return len(self.blocks) == -(-self.bytes // BLOCK_BYTES)


@dataclass(frozen=True, kw_only=True)
class CorpusInfo:
    """Description of a corpus.

    Attributes:
        tokens: how many, ends of documents included.
        documents: how many.
        origin: where the text came from.
        dtype: numpy name of the tokens' dtype.
        vocab_size: tokens are below it.
        files: by content: `tokens`; `ends`, the place after each document's last token (int64); and, where not every
            token is to be predicted, `taken` (one byte per token).
        format: version of this layout.
    """

    tokens: int
    documents: int
    origin: str
    dtype: str
    vocab_size: int
    files: Mapping[str, CorpusFile]
    format: int = _FORMAT

    @property
    def sha256(self) -> str:
        """Digest of all tokens; the same text gives the same one on every machine."""
        return self.files["tokens"].sha256


def build_corpus(
    folder: Path,
    documents: Iterable[Document],
    *,
    origin: str,
    vocab_size: int = 256,
    max_tokens: int | None = None,
) -> CorpusInfo:
    """Write documents into `folder` as one corpus.

    The files get names of their own and the description is renamed into place last, so a reader sees a whole corpus or
    none, and several builders at once do no harm: they write the same tokens.

    Args:
        folder: made when it is not there.
        documents: in this order; all of them say which tokens are taken, or none does.
        origin: told in the description.
        vocab_size: tokens are below it; decides how many bytes one takes.
        max_tokens: stop after so many.

    Raises:
        DataError: there is no document.
        MachineError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _delete_abandoned(folder)
        with _Writer(folder, np.min_scalar_type(max(255, vocab_size - 1)).name) as writer:
            for document in documents:
                left = None if max_tokens is None else max_tokens - writer.tokens
                if left is not None and left <= 0:
                    break
                writer.add(document.first(left))
            if not writer.tokens:
                raise DataError(f"{origin} holds no text: no file is non-empty UTF-8 without zero bytes")
            files = writer.publish()
        info = CorpusInfo(
            tokens=writer.tokens,
            documents=writer.documents,
            origin=origin,
            dtype=writer.dtype,
            vocab_size=vocab_size,
            files=files,
        )
        write_atomically(folder / _DESCRIPTION, json.dumps(asdict(info), indent=2) + "\n")
    except OSError as error:
        reason = describe_machine_error(error) or error
        raise MachineError(f"prepared data cannot be written into {folder}: {reason}") from error
    return info


def _delete_abandoned(folder: Path) -> None:
    """Delete what builders have left that were killed; one that lives has written tokens within the last hour."""
    builders: dict[str, list[Path]] = {}
    for part in folder.glob(f"*{_INCOMPLETE}*"):
        builders.setdefault(part.name.partition(_INCOMPLETE)[2], []).append(part)
    for parts in builders.values():
        with contextlib.suppress(FileNotFoundError):
            # The newest of a builder's parts: of few long documents it writes no end for hours.
            if time.time() - max(part.stat().st_mtime for part in parts) > _ABANDONED_SECONDS:
                for part in parts:
                    part.unlink()


class _Writer:
    """Files of a corpus that is being written; they are gone when it is not published."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.folder, self.dtype = folder, dtype
        self.tokens = self.documents = 0
        self._parts: dict[str, _Part] = {}
        self._builder = secrets.token_hex(4)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def add(self, document: Document) -> None:
        """Append a document, or a piece of one."""
        self.tokens += len(document.tokens)
        self._part("tokens").write(document.tokens.astype(self.dtype, copy=False))
        if document.ends:
            self.documents += 1
            self._part("ends").write(np.array([self.tokens], np.int64))
        if document.taken is not None:
            self._part("taken").write(document.taken.astype(np.bool_, copy=False))

    def publish(self) -> dict[str, CorpusFile]:
        """Bring every file under the name that stays."""
        return {name: part.publish(self.folder, name) for name, part in self._parts.items()}

    def _part(self, name: str) -> _Part:
        if name not in self._parts:
            self._parts[name] = part = _Part(self.folder / f"{name}{_INCOMPLETE}{self._builder}")
            self._stack.callback(part.discard)
        return self._parts[name]


class _Part:
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
        # On disk before it has its name: after a power cut a name stands for whole contents.
        os.fsync(self._file.fileno())
        digest = self._digest.hexdigest()
        blocks = self._blocks.finish()
        # Named by its contents: builders that run at once replace a file by an equal one.
        file = CorpusFile(name=f"{name}-{digest[:16]}.bin", bytes=self._bytes, sha256=digest, blocks=blocks)
        self._path.replace(folder / file.name)
        return file

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            # A full disk refuses what is still in the buffer.
            self._file.close()
        self._path.unlink(missing_ok=True)


def read_corpus_info(folder: Path) -> CorpusInfo | None:
    """Return the description of the corpus in `folder`; None when there is no whole one.

    Raises:
        DataError: the description is damaged or of another format, or a file has another size.
    """
    path = folder / _DESCRIPTION
    if not path.is_file():
        return None
    info = _parse_info(path.read_text(encoding="utf-8"))
    if info is None:
        raise DataError(f"{path} is damaged or of another version; delete {folder} to build it again")
    for file in info.files.values():
        there = folder / file.name
        got = there.stat().st_size if there.is_file() else 0
        if got != file.bytes:
            raise DataError(f"{there} should have {file.bytes} bytes and has {got}; delete {folder} to build it again")
    return info


def verify_corpus(folder: Path, part: float = 1.0) -> None:
    """Read the files of a corpus, in parallel and with progress, and compare them with the digests in its description.

    Args:
        part: of their blocks, drawn anew each time.

    Raises:
        DataError: there is no whole corpus in `folder`, or a file has changed.
    """
    info = read_corpus_info(folder)
    if info is None:
        raise DataError(f"{folder} holds no corpus")
    blocks = [block for file in info.files.values() for block in blocks_of(folder / file.name, file.bytes, file.blocks)]
    verify_blocks(str(folder), blocks, part)


def _parse_info(text: str) -> CorpusInfo | None:
    try:
        values: dict[str, Any] = json.loads(text)
        files = {
            name: CorpusFile(**file | {"blocks": tuple(file["blocks"])}) for name, file in values.pop("files").items()
        }
        info = CorpusInfo(files=files, **values)
        sound = info.format == _FORMAT and info.tokens > 0 and {"tokens", "ends"} <= files.keys() <= _DTYPES.keys()
        sound = sound and all(Path(file.name).name == file.name and file.is_whole for file in files.values())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return info if sound else None


class Corpus:
    """A built corpus, mapped into memory.

    Attributes:
        info: its description.
        tokens: of all documents, `[info.tokens]`.
        ends: place after each document's last token, int64 `[info.documents]`.
        taken: whether a loss is taken for predicting each token, bool `[info.tokens]`; None: for all.

    Raises:
        DataError: `folder` holds no whole corpus.
    """

    def __init__(self, folder: Path) -> None:
        info = read_corpus_info(folder)
        if info is None:
            raise DataError(f"{folder} holds no corpus")
        self.info = info
        mapped = {
            name: np.memmap(folder / file.name, dtype=_DTYPES[name] or info.dtype, mode="r")
            for name, file in info.files.items()
        }
        self.tokens: np.ndarray = mapped["tokens"]
        self.ends: np.ndarray = mapped["ends"]
        self.taken: np.ndarray | None = mapped.get("taken")
