"""Text becomes samples with a global index; which rank reads which never changes what is read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hp_trainer.data import (
    IGNORED,
    BatchReader,
    ByteTokenizer,
    Corpus,
    Rows,
    SampleOrder,
    TextDataConfig,
    TextSource,
    TokenSamples,
    build_corpus,
    find_text_files,
    read_corpus_info,
    standard_library,
)
from hp_trainer.exceptions import DataError


def test_tokens_are_the_bytes_of_the_text() -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode("aé\n")
    assert tokens.tolist() == [0x61, 0xC3, 0xA9, 0x0A]
    assert tokenizer.decode(tokens) == "aé\n"
    assert tokenizer.decode([0x61, 0xC3]) == "a\ufffd"


# Files -------------------------------------------------------------------------------------------------------


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    for name, content in {
        "b.py": b"bb\n",
        "a/z.py": b"zzz\n",
        "a/notes.txt": "é\n".encode(),
        "a/binary.py": b"x\0y",
        "latin.py": "é".encode("latin-1"),
        "empty.py": b" \n",
        ".hidden.py": b"h",
        ".git/c.py": b"c",
        "__pycache__/c.py": b"c",
        "site-packages/d.py": b"d",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def corpus_text(folder: Path, path: Path, suffixes: tuple[str, ...] = (), **more: int) -> bytes:
    build_corpus(folder, find_text_files(path, suffixes), origin="test", **more)
    return Corpus(folder).tokens.tobytes()


def test_a_folder_gives_its_text_files_in_the_order_of_their_names(texts: Path, tmp_path: Path) -> None:
    assert corpus_text(tmp_path / "all", texts) == b"bb\n\0" + "é\n\0".encode() + b"zzz\n\0"
    assert corpus_text(tmp_path / "py", texts, (".py",)) == b"bb\n\0zzz\n\0"


def test_a_single_file_is_taken_whatever_its_ending(texts: Path, tmp_path: Path) -> None:
    assert corpus_text(tmp_path / "one", texts / "a" / "notes.txt", (".py",)) == "é\n\0".encode()


def test_a_corpus_may_be_cut_off(texts: Path, tmp_path: Path) -> None:
    assert corpus_text(tmp_path / "cut", texts, (".py",), max_tokens=6) == b"bb\n\0zz"


def test_a_corpus_says_what_it_holds(texts: Path, tmp_path: Path) -> None:
    built = build_corpus(tmp_path / "c", find_text_files(texts), origin="here")
    assert read_corpus_info(tmp_path / "c") == built
    assert (built.tokens, built.documents, built.origin, built.vocab_size) == (13, 3, "here", 256)
    again = build_corpus(tmp_path / "d", find_text_files(texts), origin="there")
    assert again.sha256 == built.sha256


def test_what_is_no_regular_file_is_left_out(texts: Path) -> None:
    os.mkfifo(texts / "a" / "pipe.py")  # to read it would wait for a writer
    (texts / "gone.py").symlink_to(texts / "nothing")
    assert [path.name for path in find_text_files(texts, (".py",))] == [
        "b.py",
        "empty.py",
        "latin.py",
        "binary.py",
        "z.py",
    ]


def test_no_text_and_no_path_are_errors_that_leave_nothing(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="here holds no text"):
        build_corpus(tmp_path / "c", [texts / "latin.py"], origin="here")
    assert list((tmp_path / "c").iterdir()) == []
    with pytest.raises(DataError, match="does not exist"):
        list(find_text_files(tmp_path / "none"))


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"tokens": 1'])
def test_a_damaged_description_is_told(texts: Path, tmp_path: Path, content: str) -> None:
    build_corpus(tmp_path / "c", find_text_files(texts), origin="here")
    (tmp_path / "c" / "corpus.json").write_text(content)
    with pytest.raises(DataError, match=r"corpus\.json is damaged or of another version; delete .* to build it"):
        Corpus(tmp_path / "c")


def test_a_truncated_corpus_is_told(texts: Path, tmp_path: Path) -> None:
    info = build_corpus(tmp_path / "c", find_text_files(texts), origin="here")
    (tmp_path / "c" / info.file).write_bytes(b"bb")
    with pytest.raises(DataError, match="should have 13 bytes and has 2"):
        Corpus(tmp_path / "c")


def test_a_description_cannot_point_outside_its_folder(texts: Path, tmp_path: Path) -> None:
    build_corpus(tmp_path / "c", find_text_files(texts), origin="here")
    path = tmp_path / "c" / "corpus.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"file": "../../secret"}))
    with pytest.raises(DataError, match="is damaged"):
        Corpus(tmp_path / "c")


def test_builders_that_race_leave_one_whole_corpus(texts: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from hp_trainer.data import TextDataConfig, TextSource\n"
        "TextSource(TextDataConfig(path=sys.argv[1])).prepare(Path(sys.argv[2]))"
    )
    target = tmp_path / "c"
    racers = [subprocess.Popen([sys.executable, "-c", code, str(texts), str(target)]) for _ in range(4)]
    assert [racer.wait(timeout=60) for racer in racers] == [0] * 4
    assert Corpus(target).info.tokens == 13
    assert len(list(target.iterdir())) == 2


def test_the_default_text_is_the_standard_library(tmp_path: Path) -> None:
    source = TextSource(TextDataConfig(max_tokens=20_000))
    assert list(source.problems()) == []
    source.prepare(tmp_path)
    dataset = source.open(tmp_path, sequence_length=64)
    assert (standard_library() / "abc.py").is_file()
    assert len(dataset.train) == 296  # (19,000 - 1) // 64
    assert len(dataset.evaluation) == 15
    assert "import" in dataset.tokenizer.decode(dataset.train.read(np.arange(296)).ids.ravel())


def test_a_path_that_is_missing_or_holds_no_text_is_found_before_anything_starts(texts: Path) -> None:
    (problem,) = TextSource(TextDataConfig(path=str(texts / "none" / "x"))).problems()
    assert str(problem) == (
        "path: does not exist\n"
        "    expected: a text file, or a folder that holds some\n"
        f"    got: {texts / 'none' / 'x'}\n"
        f"    try: a path that exists ({texts} does)"
    )
    (problem,) = TextSource(TextDataConfig(path=str(texts), suffixes=(".md",))).problems()
    assert str(problem) == (
        "path: holds no text\n"
        "    expected: at least one non-empty UTF-8 file ending in .md without zero bytes\n"
        f"    got: {texts}"
    )


def test_text_too_short_for_a_sample_is_told_with_the_setting(texts: Path, tmp_path: Path) -> None:
    source = TextSource(TextDataConfig(path=str(texts)))
    source.prepare(tmp_path / "c")
    with pytest.raises(DataError, match=r"13 tokens for training; one sample takes 65 \(training.sequence_length"):
        source.open(tmp_path / "c", sequence_length=64)


# Samples -----------------------------------------------------------------------------------------------------


def test_samples_are_windows_whose_targets_are_the_next_tokens() -> None:
    samples = TokenSamples(np.arange(10, dtype=np.uint8), sequence_length=3)
    assert len(samples) == 3
    assert samples.read(np.array([2, 0])).ids.tolist() == [[6, 7, 8], [0, 1, 2]]
    assert samples.read(np.array([2, 0])).targets.tolist() == [[7, 8, 9], [1, 2, 3]]
    assert samples.num_targets(np.array([2, 0])) == 6
    assert len(TokenSamples(np.arange(3, dtype=np.uint8), 3)) == 0


def test_training_and_evaluation_share_no_token(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("".join(chr(33 + i % 90) for i in range(199)))
    source = TextSource(TextDataConfig(path=str(tmp_path / "t.txt"), eval_fraction=0.25))
    source.prepare(tmp_path / "c")
    dataset = source.open(tmp_path / "c", sequence_length=7)
    assert (len(dataset.train), len(dataset.evaluation)) == (21, 7)  # of 150 and of 50 tokens


@pytest.mark.parametrize("num_samples", [1, 2, 3, 4, 5, 16, 17, 1000, 4097])
def test_an_epoch_holds_every_sample_once(num_samples: int) -> None:
    order = SampleOrder(num_samples, seed=3)
    for epoch in range(3):
        found = order.samples(epoch * num_samples, num_samples)
        assert sorted(found.tolist()) == list(range(num_samples))


def test_orders_differ_by_seed_and_by_epoch_and_are_not_sequential() -> None:
    first = SampleOrder(1000, seed=0).samples(0, 2000)
    other = SampleOrder(1000, seed=1).samples(0, 1000)
    assert np.mean(first[:1000] == first[1000:]) < 0.02
    assert np.mean(first[:1000] == other) < 0.02
    assert np.mean(first[:1000] == np.arange(1000)) < 0.02
    assert abs(np.corrcoef(first[:1000], np.arange(1000))[0, 1]) < 0.1


def test_the_order_is_the_same_on_every_machine() -> None:
    # These numbers are the format: other ones would break the exact resume of existing runs.
    assert SampleOrder(1000, seed=7).samples(998, 4).tolist() == [318, 274, 54, 994]


def test_any_position_is_computed_alone_and_without_memory() -> None:
    order = SampleOrder(10**12, seed=5)
    far = order.samples(7 * 10**12 + 123, 10)
    assert np.array_equal(far[4:5], order.samples(7 * 10**12 + 127, 1))
    assert len(set(far.tolist())) == 10
    assert far.min() >= 0
    assert far.max() < 10**12


class Numbers:
    """Samples that hold their own index; odd ones take no loss at their first place."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def read(self, indices: np.ndarray) -> Rows:
        rows = Rows.successors(indices[:, None] * 10 + np.arange(4))
        targets = np.where((indices[:, None] % 2 == 1) & (np.arange(3) == 0), IGNORED, rows.targets)
        return Rows(rows.ids, targets, positions=np.broadcast_to(np.arange(3), targets.shape))

    def num_targets(self, indices: np.ndarray) -> int:
        return 3 * len(indices) - int((indices % 2).sum())


def read_run(positions: range, batch: int, num_shares: int) -> list[int]:
    """The samples that all ranks read, in the order of the run."""
    readers = [
        BatchReader(Numbers(50), global_batch_size=batch, seed=1, num_shares=num_shares, share=share)
        for share in range(num_shares)
    ]
    return [int(s) for position in positions for reader in readers for s in reader.read(position).samples]


@pytest.mark.parametrize("num_shares", [2, 3, 4, 5, 8])
def test_the_ranks_together_read_what_one_rank_reads(num_shares: int) -> None:
    steps = range(0, 80, 8)
    assert read_run(steps, 8, num_shares) == read_run(steps, 8, 1)


def test_a_run_resumed_on_another_number_of_ranks_reads_each_sample_once() -> None:
    before = read_run(range(0, 24, 8), 8, 4)
    after = read_run(range(24, 48, 6), 6, 3)
    assert len(set(before + after)) == 48


def test_a_batch_holds_ids_and_targets_and_counts_those_of_all_ranks() -> None:
    readers = [BatchReader(Numbers(50), global_batch_size=5, seed=1, num_shares=2, share=n) for n in (0, 1)]
    other, batch = (reader.read(0) for reader in readers)
    assert batch.ids.shape == batch.targets.shape == (3, 3)
    counted = batch.targets != IGNORED
    assert np.array_equal(batch.targets[counted], batch.ids[counted] + 1)
    assert np.array_equal(batch.ids[:, 0] // 10, batch.samples)
    assert batch.global_tokens == other.global_tokens == 15
    assert batch.global_targets == other.global_targets == counted.sum() + (other.targets != IGNORED).sum() < 15


def test_micro_batches_are_the_batch_in_parts() -> None:
    batch = BatchReader(Numbers(50), global_batch_size=3, seed=1).read(0)
    micro = batch.micro_batches(2)
    assert [len(one.samples) for one in micro] == [2, 1]
    assert {(one.global_tokens, one.global_targets) for one in micro} == {(9, batch.global_targets)}
    for name in ("ids", "targets", "positions", "samples"):
        assert np.array_equal(np.concatenate([getattr(one, name) for one in micro]), getattr(batch, name))
    assert len(batch.micro_batches(None)) == 1
