"""The dataset `text`: the bytes of any text files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hp_trainer.config import setting
from hp_trainer.data.corpus import Corpus, build_corpus, read_corpus_info, verify_corpus
from hp_trainer.data.dataset import Dataset, DatasetSource, Rows
from hp_trainer.data.text_files import find_text_files, holds_text, standard_library
from hp_trainer.data.tokenizer import ByteTokenizer
from hp_trainer.exceptions import DataError, Problem


@dataclass(frozen=True, kw_only=True)
class TextDataConfig:
    """Text files as bytes."""

    path: str | None = setting(
        None, help="text file or folder; null: Python's standard library on this machine", is_path=True
    )
    suffixes: tuple[str, ...] = setting((), help="file endings wanted in a folder, such as .py; empty: all")
    max_tokens: int | None = setting(
        None, help="stop reading after so many bytes; null: read all", minimum=2, maximum=2**63 - 1
    )
    eval_fraction: float = setting(
        0.05, help="share of the tokens, at the end, kept for evaluation", minimum=0, maximum=0.9
    )

    def check(self) -> Iterator[Problem]:
        if self.path == "":
            yield Problem(path="path", what="empty", expected="a text file or folder, or null", hint="null")
        for suffix in self.suffixes:
            if not suffix.startswith("."):
                yield Problem(
                    path="suffixes",
                    what="not a file ending",
                    expected="'.txt'",
                    got=repr(suffix),
                    hint=f"'.{suffix}'",
                )


class TextSource(DatasetSource):
    """Text files, written once as a corpus of bytes."""

    def __init__(self, options: TextDataConfig) -> None:
        self.options = options
        self.path = standard_library() if options.path is None else Path(options.path).expanduser()
        self.suffixes = options.suffixes or ((".py",) if options.path is None else ())

    def problems(self) -> Iterator[Problem]:
        try:
            found = holds_text(self.path, self.suffixes)
        except DataError:
            yield Problem(
                path="path",
                what="does not exist",
                expected="a text file, or a folder that holds some",
                got=str(self.path),
                hint=_nearest_existing(self.path),
            )
            return
        if not found:
            wanted = f" ending in {' or '.join(self.suffixes)}" if self.suffixes else ""
            yield Problem(
                path="path",
                what="holds no text",
                expected=f"at least one non-empty UTF-8 file{wanted} without zero bytes",
                got=str(self.path),
            )

    def prepare(self, folder: Path) -> None:
        if read_corpus_info(folder) is None:
            files = find_text_files(self.path, self.suffixes)
            build_corpus(folder, files, origin=str(self.path), max_tokens=self.options.max_tokens)

    def verify(self, folder: Path) -> None:
        """Compare the tokens with the digest in their description; see `DatasetSource.verify`."""
        verify_corpus(folder)

    def open(self, folder: Path, sequence_length: int) -> Dataset:
        """Return the corpus cut into samples that overlap by one token; the last tokens are for evaluation.

        Raises:
            DataError: the corpus is missing, or too short for one training sample.
        """
        corpus = Corpus(folder)
        split = corpus.info.tokens - int(corpus.info.tokens * self.options.eval_fraction)
        train = TokenSamples(corpus.tokens[:split], sequence_length)
        if not len(train):
            raise DataError(
                f"the text of {corpus.info.origin} has {split} tokens for training; one sample takes "
                f"{sequence_length + 1} (training.sequence_length + 1): use more text or shorter samples"
            )
        evaluation = TokenSamples(corpus.tokens[split:], sequence_length)
        fingerprint = {"text": corpus.info.sha256, "training tokens": split, "sequence length": sequence_length}
        return Dataset(train, evaluation, ByteTokenizer(), fingerprint)

    def tokenizer(self) -> ByteTokenizer:
        return ByteTokenizer()


class TokenSamples:
    """Consecutive windows of a row of tokens; each window's last target is the next one's first input."""

    def __init__(self, tokens: np.ndarray, sequence_length: int) -> None:
        self._tokens = tokens
        self._length = sequence_length

    def __len__(self) -> int:
        return max(0, (len(self._tokens) - 1) // self._length)

    def read(self, indices: np.ndarray) -> Rows:
        """Return the windows of `indices` (`[n]`), each with the token after it as the last target."""
        offsets = indices[:, None] * self._length + np.arange(self._length + 1)
        return Rows.successors(np.asarray(self._tokens[offsets], dtype=np.int64))

    def num_targets(self, indices: np.ndarray) -> int:
        """Return the number of targets of these samples: every place has one."""
        return len(indices) * self._length


def _nearest_existing(path: Path) -> str:
    """Return the part of the path that exists, which shows where it goes wrong."""
    for parent in path.absolute().parents:
        if parent.is_dir():
            return f"a path that exists ({parent} does)"
    return ""
