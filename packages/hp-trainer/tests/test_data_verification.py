"""Prepared data are compared with their digests by blocks: all of them, or as many as asked for."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from test_data import opened

from hp_trainer.data import BatchReader, TextDataConfig, TextSource, corpus
from hp_trainer.data.corpus import (
    Block,
    BlockDigests,
    Document,
    blocks_of,
    build_corpus,
    read_corpus_info,
    verify_blocks,
    verify_corpus,
)
from hp_trainer.exceptions import DataError


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "BLOCK_BYTES", 10)


@pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 20, 37])
@pytest.mark.parametrize("piece", [1, 7, 10, 100])
def test_digests_do_not_depend_on_the_pieces_that_are_written(size: int, piece: int) -> None:
    data = bytes(range(size))
    digests = BlockDigests()
    for start in range(0, size, piece):
        digests.update(data[start : start + piece])
    assert digests.finish() == tuple(
        hashlib.sha256(data[start : start + 10]).hexdigest() for start in range(0, size, 10)
    )


def test_a_change_of_any_byte_is_found_and_told_with_its_place(tmp_path: Path) -> None:
    build_corpus(tmp_path, [Document(np.arange(37))], origin="here")
    verify_corpus(tmp_path)
    info = read_corpus_info(tmp_path)
    assert info is not None
    path = tmp_path / info.files["tokens"].name
    sound = path.read_bytes()
    for place in range(37):
        path.write_bytes(sound[:place] + b"\xff" + sound[place + 1 :])
        start = place // 10 * 10
        with pytest.raises(
            DataError, match=rf"tokens-.*bin is damaged between bytes {start} and {min(37, start + 10)}"
        ):
            verify_corpus(tmp_path)


def test_a_part_reads_that_many_blocks_others_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    monkeypatch.setattr(Block, "is_sound", lambda block: bool(read.append(block.start)) or True)
    blocks = blocks_of(tmp_path / "x", 1000, ["0"] * 100)
    for _ in range(50):
        verify_blocks("x", blocks, 0.075)
    assert len(read) == 50 * 8
    assert len(set(read)) > 50
    read.clear()
    verify_blocks("x", blocks, 1e-9)
    assert len(read) == 1
    verify_blocks("x", [], 0.5)


def test_a_description_without_a_digest_for_every_block_is_damaged(tmp_path: Path) -> None:
    build_corpus(tmp_path, [Document(np.arange(37))], origin="here")
    description = tmp_path / "corpus.json"
    text = description.read_text()
    first = text.index('"', text.index('"blocks"') + 10)
    description.write_text(text[:first] + text[text.index(",", first) + 1 :])
    with pytest.raises(DataError, match=r"corpus.json is damaged or of another version"):
        verify_corpus(tmp_path)
    # A file that is shorter than its description says is refused before anything is read.
    description.write_text(text)
    next(tmp_path.glob("tokens-*")).write_bytes(b"12")
    with pytest.raises(DataError, match=r"expected 37 bytes, got 2"):
        verify_corpus(tmp_path)


def test_progress_is_told_of_what_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(corpus, "_SECONDS", 0.0)
    build_corpus(tmp_path, [Document(np.arange(20))], origin="here")
    verify_corpus(tmp_path)
    assert f"verifying {tmp_path}: 100%" in capsys.readouterr().err


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_data_that_are_truncated_during_a_run_are_named(tmp_path: Path, packing: str) -> None:
    (tmp_path / "a.txt").write_text("some text\n" * 2000)
    source = TextSource(TextDataConfig(path=str(tmp_path / "a.txt"), packing=packing))
    batches = BatchReader(opened(source, tmp_path, 16).train, global_batch_size=4, seed=0)
    before = batches.read(0)
    assert type(before.ids) is np.ndarray
    (file,) = tmp_path.glob(".data/*/tokens*")
    sound = file.read_bytes()
    # Every page but the first is gone: an access would end this process by SIGBUS.
    with file.open("r+b") as cut:
        cut.truncate(100)
    with pytest.raises(DataError, match=r"tokens-.*\.bin had 20001 bytes and has 100 now: it was truncated during"):
        batches.read(0)
    file.write_bytes(sound)
    np.testing.assert_array_equal(batches.read(0).ids, before.ids)
