"""Prepared corpora: a cache that runs share, and the note in a run's folder of which of them it reads."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hp_trainer._files import write_atomically
from hp_trainer.data.corpus import Corpus, CorpusInfo, read_corpus_info
from hp_trainer.exceptions import DataError

_NOTE = "data.json"


def cache_folder(run_data: Path, wanted: str | None) -> Path:
    """Return the folder of prepared corpora: `wanted`, else `.data` beside the run's folder."""
    return run_data.parent.parent / ".data" if wanted is None else Path(wanted)


def prepared(cache: Path, facts: Mapping[str, Any], build: Callable[[Path], CorpusInfo]) -> Path:
    """Return the folder of the corpus that `facts` decide, built unless it is there.

    Args:
        facts: all that decides which tokens a corpus holds, as JSON values; their digest is the folder's name.
        build: writes the corpus into a folder.

    Raises:
        DataError: it cannot be built, or what is there is damaged.
    """
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    folder = cache / digest[:32]
    if read_corpus_info(folder) is None:
        build(folder)
    return folder


@dataclass(frozen=True, kw_only=True)
class CorpusNote:
    """A corpus that a run reads.

    Attributes:
        folder: of the corpus, seen from the note, so that run and corpus may be moved together.
        origin: where it was prepared, so that the run may be moved alone.
        digests: of its files, by content.
    """

    folder: str
    origin: str
    digests: Mapping[str, str]

    @classmethod
    def of(cls, corpus: Path, run_data: Path) -> CorpusNote:
        """Return the note of a corpus that is there."""
        digests = {name: file.sha256 for name, file in Corpus(corpus).info.files.items()}
        origin = str(corpus.resolve())
        return cls(folder=os.path.relpath(origin, run_data.resolve()), origin=origin, digests=digests)

    def path(self, run_data: Path) -> Path:
        """Return the corpus's folder; it need not be there."""
        beside = Path(os.path.normpath(run_data / self.folder))
        return beside if beside.exists() or not Path(self.origin).exists() else Path(self.origin)

    def open(self, run_data: Path) -> Corpus:
        """Map the corpus.

        Raises:
            DataError: it is not there, damaged, or another one.
        """
        corpus = Corpus(self.path(run_data))
        found = {name: file.sha256 for name, file in corpus.info.files.items()}
        if found != self.digests:
            raise DataError(
                f"{self.path(run_data)} does not hold the data that the run in {run_data.parent} was begun with; "
                "bring them back, or begin a new run"
            )
        return corpus


def write_notes(run_data: Path, notes: Mapping[str, Sequence[CorpusNote]]) -> None:
    """Write down which corpora a run reads, by what for."""
    plain = {use: [asdict(one) for one in notes[use]] for use in notes}
    write_atomically(run_data / _NOTE, json.dumps({"format": 1, "corpora": plain}, indent=2) + "\n")


def read_notes(run_data: Path) -> dict[str, list[CorpusNote]] | None:
    """Return what `write_notes` wrote; None where there is nothing.

    Raises:
        DataError: it is damaged.
    """
    file = run_data / _NOTE
    if not file.is_file():
        return None
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        assert values["format"] == 1
        return {use: [CorpusNote(**one) for one in notes] for use, notes in values["corpora"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError, RecursionError) as error:
        raise DataError(f"{file} is damaged; begin a new run") from error
