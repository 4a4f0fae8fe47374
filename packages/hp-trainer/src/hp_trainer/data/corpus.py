"""A corpus: all tokens in one memory-mapped file, built once and published in one step."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from hp_trainer._files import write_atomically
from hp_trainer.data.text_files import read_text_bytes
from hp_trainer.data.tokenizer import ByteTokenizer
from hp_trainer.exceptions import DataError

_FORMAT = 1
_DESCRIPTION = "corpus.json"


@dataclass(frozen=True, kw_only=True)
class CorpusInfo:
    """Description of a corpus.

    Attributes:
        tokens: how many, separators included.
        documents: files that were text.
        sha256: of all tokens; the same text gives the same one on every machine.
        origin: where the text came from.
        file: name of the token file beside the description.
        dtype: numpy name of the tokens' dtype.
        vocab_size: tokens are below it.
        format: version of this layout.
    """

    tokens: int
    documents: int
    sha256: str
    origin: str
    file: str
    dtype: str = "uint8"
    vocab_size: int = ByteTokenizer.vocab_size
    format: int = _FORMAT


def build_corpus(folder: Path, files: Iterable[Path], *, origin: str, max_tokens: int | None = None) -> CorpusInfo:
    """Write the text of `files` into `folder` as one corpus.

    The tokens get a name of their own and the description is renamed into place last, so a reader sees a
    whole corpus or none, and several builders at once do no harm: they write the same tokens.

    Args:
        folder: made when it is not there.
        files: read in this order; those that are not text are left out.
        origin: told in the description.
        max_tokens: stop after so many.

    Raises:
        DataError: no file holds text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"tokens.incomplete-{secrets.token_hex(4)}"
    digest, tokens, documents = hashlib.sha256(), 0, 0
    try:
        with temporary.open("wb") as out:
            for document in _documents(files, max_tokens):
                out.write(document)
                digest.update(document)
                tokens += len(document)
                documents += 1
            out.flush()
            os.fsync(out.fileno())
        if not tokens:
            raise DataError(f"{origin} holds no text: no file is non-empty UTF-8 without zero bytes")
        file = f"tokens-{digest.hexdigest()[:16]}.bin"
        temporary.replace(folder / file)
    finally:
        temporary.unlink(missing_ok=True)
    info = CorpusInfo(tokens=tokens, documents=documents, sha256=digest.hexdigest(), origin=origin, file=file)
    write_atomically(folder / _DESCRIPTION, json.dumps(asdict(info), indent=2) + "\n")
    return info


def read_corpus_info(folder: Path) -> CorpusInfo | None:
    """Return the description of the corpus in `folder`; None when there is no whole one.

    Raises:
        DataError: the description is damaged or of another format, or the token file has another size.
    """
    path = folder / _DESCRIPTION
    if not path.is_file():
        return None
    info = _parse_info(path.read_text(encoding="utf-8"))
    if info is None:
        raise DataError(f"{path} is damaged or of another version; delete {folder} to build it again")
    tokens = folder / info.file
    expected = info.tokens * np.dtype(info.dtype).itemsize
    got = tokens.stat().st_size if tokens.is_file() else 0
    if got != expected:
        raise DataError(f"{tokens} should have {expected} bytes and has {got}; delete {folder} to build it again")
    return info


def verify_corpus(folder: Path) -> None:
    """Read all tokens of a corpus and compare them with the digest in its description.

    Raises:
        DataError: there is no whole corpus in `folder`, or its tokens have changed.
    """
    info = read_corpus_info(folder)
    if info is None:
        raise DataError(f"{folder} holds no corpus")
    with (folder / info.file).open("rb") as tokens:
        found = hashlib.file_digest(tokens, "sha256").hexdigest()
    if found != info.sha256:
        raise DataError(
            f"{folder / info.file} is damaged: its tokens are not those that the run was trained on; bring the file "
            "back, or begin a new run"
        )


def _parse_info(text: str) -> CorpusInfo | None:
    try:
        info = CorpusInfo(**json.loads(text))
        sound = info.format == _FORMAT and Path(info.file).name == info.file and info.tokens > 0
    except (ValueError, TypeError):
        return None
    return info if sound else None


class Corpus:
    """The tokens of a built corpus, mapped into memory: uint8 of shape `[info.tokens]`.

    Raises:
        DataError: `folder` holds no whole corpus.
    """

    def __init__(self, folder: Path) -> None:
        info = read_corpus_info(folder)
        if info is None:
            raise DataError(f"{folder} holds no corpus")
        self.info = info
        self.tokens: np.ndarray = np.memmap(folder / info.file, dtype=info.dtype, mode="r")


def _documents(files: Iterable[Path], max_tokens: int | None) -> Iterator[bytes]:
    """Yield the bytes of each text with its separator, cut off after `max_tokens`."""
    left = max_tokens
    for path in files:
        data = read_text_bytes(path)
        if data is None:
            continue
        document = data + bytes([ByteTokenizer.separator])
        document = document if left is None else document[:left]
        if not document:
            return
        yield document
        left = None if left is None else left - len(document)
