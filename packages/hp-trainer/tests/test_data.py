"""Text becomes samples with a global index; which rank reads which never changes what is read."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from hp_trainer.config import dump_config, parse_config
from hp_trainer.data import (
    IGNORED,
    BatchReader,
    ByteTokenizer,
    Corpus,
    Dataset,
    DatasetSource,
    Document,
    Rows,
    SampleOrder,
    Samples,
    TextDataConfig,
    TextSource,
    TokenSamples,
    build_corpus,
    find_text_files,
    formats,
    open_reader,
    read_corpus_info,
    standard_library,
)
from hp_trainer.data.corpus import read_notes, write_notes
from hp_trainer.exceptions import ConfigError, DataError, MachineError
from hp_trainer.registries import Registries


def test_tokens_are_the_bytes_of_the_text() -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode("aé\n")
    assert tokens.tolist() == [0x61, 0xC3, 0xA9, 0x0A]
    assert tokenizer.decode(tokens) == "aé\n"
    assert tokenizer.decode([0x61, 0xC3]) == "a\ufffd"


@pytest.mark.parametrize("length", [5, 64, 1000])
def test_a_long_text_is_prepared_in_pieces_as_one_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.setattr(formats, "SEGMENT_BYTES", length)
    long = "lines, some without end: äöü \U0001f600" * 20 + "\nand\n\n\nempty ones\n"
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(long)
    (tmp_path / "texts" / "b.txt").write_text("four")
    (tmp_path / "texts" / "c.txt").write_bytes(b"\x80" * 2000)
    records = list(open_reader(tmp_path / "texts").records())
    assert max(len(record.value) for record in records) <= 2 * length
    source = TextSource(TextDataConfig(path=str(tmp_path / "texts")))
    (tmp_path / "run" / "data").mkdir(parents=True)
    source.prepare(tmp_path / "run" / "data")
    (note,) = read_notes(tmp_path / "run" / "data")["training"]
    corpus = note.open(tmp_path / "run" / "data")
    assert corpus.tokens.tobytes() == f"{long}\0four\0".encode()
    assert corpus.ends.tolist() == [len(long.encode()) + 1, len(long.encode()) + 6]


def test_a_long_text_that_is_damaged_further_on_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "SEGMENT_BYTES", 10)
    for damage, message in ((b"\xff", "bytes that are not UTF-8"), (b"\0", "a zero byte")):
        (tmp_path / "a.txt").write_bytes(b"text\n" * 5 + damage + b"\n")
        with pytest.raises(DataError, match=f"a.txt starts as text, but there (is|are) {message}.* from byte 20"):
            list(open_reader(tmp_path / "a.txt").records())


def test_long_files_that_are_no_text_or_may_not_be_read_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, *how: str) -> IO:
        if path.name == "b.txt":
            raise PermissionError(path)
        return open(path, *how)

    (tmp_path / "a.txt").write_bytes(b"\x80" * 2000)
    (tmp_path / "b.txt").write_bytes(b"some text\n" * 5)
    (tmp_path / "c.txt").write_bytes(b"this is read\n")
    monkeypatch.setattr(formats, "SEGMENT_BYTES", 10)
    monkeypatch.setattr(Path, "open", refused)
    assert b"".join(record.value for record in open_reader(tmp_path).records()) == b"this is read\n"


@pytest.mark.parametrize("length", [7, 8, 9, 10, 50])
@pytest.mark.parametrize("end", ["\r\n", "\r", "\u2028", ""])
def test_chunks_split_no_character_and_no_end_of_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, end: str
) -> None:
    monkeypatch.setattr(formats, "SEGMENT_BYTES", length)
    full = f"äöü\U0001f600{end}x{end}{end}".encode() * 9
    (tmp_path / "a.txt").write_bytes(full)
    records = list(open_reader(tmp_path / "a.txt").records())
    assert b"".join(record.value for record in records) == full
    assert [record.begins for record in records] == [True] + [False] * (len(records) - 1)
    assert [record.ends for record in records] == [False] * (len(records) - 1) + [True]
    assert all(record.value.decode() and not record.value.endswith(b"\r") for record in records[:-1]) or end == "\r"


def test_what_a_killed_builder_left_is_deleted_in_the_end(tmp_path: Path) -> None:
    old, young = tmp_path / "tokens.incomplete-0a", tmp_path / "tokens.incomplete-0b"
    for file in (old, young):
        file.write_bytes(b"some")
    os.utime(old, (0, 0))
    build_corpus(tmp_path, [Document(np.arange(4))], origin="here")
    assert [file.name for file in tmp_path.glob("*.incomplete-*")] == [young.name]


def test_the_parts_of_a_builder_that_lives_stay_also_those_that_it_seldom_writes(tmp_path: Path) -> None:
    """Of a few long documents no end is written for hours."""

    def documents() -> Iterator[Document]:
        yield Document(np.arange(4))
        (ends,) = tmp_path.glob("ends.incomplete-*")
        os.utime(ends, (0, 0))
        build_corpus(tmp_path, [Document(np.arange(4)), Document(np.arange(4))], origin="the other builder")
        yield Document(np.arange(4))

    build_corpus(tmp_path, documents(), origin="here")
    assert Corpus(tmp_path).ends.tolist() == [4, 8]
    assert list(tmp_path.glob("*.incomplete-*")) == []


def test_a_document_in_pieces_ends_where_the_tokens_do(tmp_path: Path) -> None:
    pieces = [Document(np.arange(4), ends=False), Document(np.arange(4))]
    info = build_corpus(tmp_path, pieces, origin="here", max_tokens=4)
    assert (info.tokens, info.documents) == (4, 1)
    assert Corpus(tmp_path).ends.tolist() == [4]


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


def documents(path: Path, suffixes: tuple[str, ...] = ()) -> Iterator[Document]:
    for record in open_reader(path, "text", suffixes).records():
        (tokens,) = ByteTokenizer().encode_documents([record.text("text")])
        yield Document(tokens)


def corpus_text(folder: Path, path: Path, suffixes: tuple[str, ...] = (), **more: int) -> bytes:
    build_corpus(folder, documents(path, suffixes), origin="test", **more)
    return Corpus(folder).tokens.tobytes()


def test_a_folder_gives_its_text_files_in_the_order_of_their_names(texts: Path, tmp_path: Path) -> None:
    assert corpus_text(tmp_path / "all", texts) == b"bb\n\0" + "é\n\0".encode() + b"zzz\n\0"
    assert corpus_text(tmp_path / "py", texts, (".py",)) == b"bb\n\0zzz\n\0"


def test_a_single_file_is_taken_whatever_its_ending(texts: Path, tmp_path: Path) -> None:
    assert corpus_text(tmp_path / "one", texts / "a" / "notes.txt", (".py",)) == "é\n\0".encode()


def test_a_corpus_may_be_truncated(texts: Path, tmp_path: Path) -> None:
    assert corpus_text(tmp_path / "truncated", texts, (".py",), max_tokens=6) == b"bb\n\0zz"


def test_a_corpus_says_what_it_holds(texts: Path, tmp_path: Path) -> None:
    built = build_corpus(tmp_path / "c", documents(texts), origin="here")
    assert read_corpus_info(tmp_path / "c") == built
    assert (built.tokens, built.documents, built.origin, built.vocab_size) == (13, 3, "here", 256)
    again = build_corpus(tmp_path / "d", documents(texts), origin="there")
    assert again.sha256 == built.sha256


def test_what_is_no_regular_file_is_left_out(texts: Path) -> None:
    os.mkfifo(texts / "a" / "pipe.py")  # to read it would wait for a writer
    (texts / "missing.py").symlink_to(texts / "nothing")
    assert [path.name for path in find_text_files(texts, (".py",))] == [
        "b.py",
        "empty.py",
        "latin.py",
        "binary.py",
        "z.py",
    ]


def opened(source: DatasetSource, folder: Path, sequence_length: int) -> Dataset:
    """The dataset as a run in `folder` has it."""
    data = folder / "run" / "data"
    data.mkdir(parents=True, exist_ok=True)
    source.prepare(data)
    return source.open(data, sequence_length)


def test_no_text_and_no_path_are_errors_that_leave_nothing(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="here contains no text"):
        build_corpus(tmp_path / "c", documents(texts / "latin.py"), origin="here")
    assert list((tmp_path / "c").iterdir()) == []
    with pytest.raises(DataError, match="does not exist"):
        list(find_text_files(tmp_path / "none"))


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"tokens": 1'])
def test_a_damaged_description_is_told(texts: Path, tmp_path: Path, content: str) -> None:
    build_corpus(tmp_path / "c", documents(texts), origin="here")
    (tmp_path / "c" / "corpus.json").write_text(content)
    with pytest.raises(DataError, match=r"corpus\.json is damaged or of another version; delete .* to build it"):
        Corpus(tmp_path / "c")


def test_a_truncated_corpus_is_told(texts: Path, tmp_path: Path) -> None:
    info = build_corpus(tmp_path / "c", documents(texts), origin="here")
    (tmp_path / "c" / info.files["tokens"].name).write_bytes(b"bb")
    with pytest.raises(DataError, match="expected 13 bytes, got 2"):
        Corpus(tmp_path / "c")


def test_a_description_cannot_point_outside_its_folder(texts: Path, tmp_path: Path) -> None:
    build_corpus(tmp_path / "c", documents(texts), origin="here")
    path = tmp_path / "c" / "corpus.json"
    described = json.loads(path.read_text())
    described["files"]["tokens"]["name"] = "../../secret"
    path.write_text(json.dumps(described))
    with pytest.raises(DataError, match="is damaged"):
        Corpus(tmp_path / "c")


@pytest.mark.parametrize(
    "changed",
    [{"dtype": "object"}, {"dtype": "x"}, {"dtype": "uint16"}, {"tokens": 12}, {"tokens": 2**70}, {"documents": 1}],
    ids=str,
)
def test_dtype_and_lengths_of_a_description_are_those_of_its_files(texts: Path, tmp_path: Path, changed) -> None:
    build_corpus(tmp_path / "c", documents(texts), origin="here")
    path = tmp_path / "c" / "corpus.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(DataError, match="is damaged"):
        Corpus(tmp_path / "c")


def test_builders_that_race_leave_one_whole_corpus(texts: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from hp_trainer.data import TextDataConfig, TextSource\n"
        "TextSource(TextDataConfig(path=sys.argv[1])).prepare(Path(sys.argv[2]))"
    )
    runs = [tmp_path / f"run{n}" / "data" for n in range(4)]
    for run in runs:
        run.mkdir(parents=True)
    racers = [subprocess.Popen([sys.executable, "-c", code, str(texts), str(run)]) for run in runs]
    assert [racer.wait(timeout=300) for racer in racers] == [0] * 4
    (corpus,) = (tmp_path / ".data").iterdir()
    assert Corpus(corpus).info.tokens == 13
    assert len(list(corpus.iterdir())) == 3


def test_the_default_text_is_the_standard_library(tmp_path: Path) -> None:
    source = TextSource(TextDataConfig(max_tokens=20_000))
    assert list(source.problems()) == []
    dataset = opened(source, tmp_path, 64)
    assert (standard_library() / "abc.py").is_file()
    assert len(dataset.train) == 296  # (19,000 - 1) // 64
    assert len(dataset.evaluation) == 15
    assert "import" in dataset.tokenizer.decode(dataset.train.read(np.arange(296)).ids.ravel())


def test_a_path_that_is_missing_or_holds_no_text_is_found_before_anything_starts(texts: Path) -> None:
    (problem,) = TextSource(TextDataConfig(path=str(texts / "none" / "x"))).problems()
    assert str(problem) == (
        "path: does not exist\n"
        "    expected: a text file, or a folder with text files\n"
        f"    got: {texts / 'none' / 'x'}\n"
        f"    try: a path that exists ({texts} does)"
    )
    (problem,) = TextSource(TextDataConfig(path=str(texts), suffixes=(".md",))).problems()
    assert str(problem) == (
        "path: contains no text\n"
        "    expected: at least one non-empty UTF-8 file ending in .md without zero bytes\n"
        f"    got: {texts}"
    )


def test_text_too_short_for_a_sample_is_told_with_the_setting(texts: Path, tmp_path: Path) -> None:
    source = TextSource(TextDataConfig(path=str(texts)))
    with pytest.raises(DataError, match=r"13 tokens for training; one sample takes 65 \(training.sequence_length"):
        opened(source, tmp_path, 64)


# Sources -----------------------------------------------------------------------------------------------------


def source_of(folder: Path, yaml: str, registered: Registries) -> TextSource:
    config = parse_config(f"training: {{steps: 1}}\n{yaml}", registered=registered, folder=folder).config
    assert parse_config(dump_config(config), registered=registered).config == config
    return TextSource(config.data.options)


def write_numbers(file: Path, count: int, letter: str) -> None:
    file.write_text("".join(json.dumps({"body": f"{letter}{n:02}"}) + "\n" for n in range(count)))


MIXED = """\
data:
  sources:
    - {path: a.jsonl, field: body, weight: 3}
    - {path: b.jsonl, field: body, weight: 1}
  eval: [{path: c.jsonl, field: body}]
  packing: none
"""


def test_several_sources_are_mixed_and_others_evaluated_with(tmp_path: Path, registered: Registries) -> None:
    for name, count in (("a", 30), ("b", 5), ("c", 4)):
        write_numbers(tmp_path / f"{name}.jsonl", count, name)
    source = source_of(tmp_path, MIXED, registered)
    assert list(source.problems()) == []
    dataset = opened(source, tmp_path, 4)
    read = dataset.train.read(dataset.train.order(0).samples(0, 40))
    first = [chr(letter) for letter in read.ids[:, 0]]
    assert (first.count("a"), first.count("b")) == (30, 10)
    evaluated = dataset.evaluation.read(np.arange(4))
    assert sorted(map(bytes, evaluated.ids.astype(np.uint8))) == [b"c00\0", b"c01\0", b"c02\0", b"c03\0"]
    assert (evaluated.targets[:, 3] == IGNORED).all()
    assert dataset.fingerprint["weights"] == [3.0, 1.0]


@pytest.mark.parametrize("packing", ["concatenate", "documents", "best_fit", "none"])
def test_what_is_kept_for_evaluation_is_not_trained_on(tmp_path: Path, registered: Registries, packing: str) -> None:
    write_numbers(tmp_path / "a.jsonl", 40, "a")
    yaml = f"data: {{path: a.jsonl, field: body, packing: {packing}, eval_fraction: 0.25}}"
    dataset = opened(source_of(tmp_path, yaml, registered), tmp_path, 4)
    seen = []
    for samples in (dataset.train, dataset.evaluation):
        rows = samples.read(np.arange(len(samples)))
        seen.append(b"".join(map(bytes, rows.ids.astype(np.uint8))))
    assert len(seen[0]) == pytest.approx(3 * len(seen[1]), abs=8)
    assert b"a28" in seen[0]
    assert b"a31" in seen[1]
    assert b"a31" not in seen[0]


def test_a_prepared_corpus_is_shared_until_a_file_changes(tmp_path: Path, registered: Registries) -> None:
    write_numbers(tmp_path / "a.jsonl", 40, "a")
    yaml = "data: {path: a.jsonl, field: body, cache: cache}"
    for run in ("one", "two"):
        opened(source_of(tmp_path, yaml, registered), tmp_path / run, 4)
        assert len(list((tmp_path / "cache").iterdir())) == 1
    write_numbers(tmp_path / "a.jsonl", 41, "a")
    opened(source_of(tmp_path, yaml, registered), tmp_path / "three", 4)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_run_whose_prepared_data_are_gone_prepares_the_same_again_or_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text " * 50)
    source = TextSource(TextDataConfig(path=str(tmp_path / "a.txt")))
    before = opened(source, tmp_path, 4).train.read(np.arange(5)).ids
    shutil.rmtree(tmp_path / ".data")
    data = tmp_path / "run" / "data"
    with pytest.raises(DataError, match="contains no corpus"):
        source.open(data, 4)
    source.verify(data)
    assert np.array_equal(source.open(data, 4).train.read(np.arange(5)).ids, before)
    shutil.rmtree(tmp_path / ".data")
    (tmp_path / "a.txt").write_text("other text " * 50)
    with pytest.raises(DataError, match=r"does not contain the data that the run in .*run was started with"):
        source.verify(data)


def test_a_run_may_be_moved_with_its_data_or_alone(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text " * 50)
    source = TextSource(TextDataConfig(path=str(tmp_path / "a.txt")))
    before = opened(source, tmp_path / "runs", 4).train.read(np.arange(5)).ids
    shutil.copytree(tmp_path / "runs" / "run", tmp_path / "alone" / "run")
    (tmp_path / "runs").rename(tmp_path / "moved")
    for folder in ("moved", "alone"):
        if folder == "alone":
            (tmp_path / "moved").rename(tmp_path / "runs")
        data = tmp_path / folder / "run" / "data"
        assert np.array_equal(source.open(data, 4).train.read(np.arange(5)).ids, before)


def test_every_broken_source_is_told_with_its_setting(tmp_path: Path, registered: Registries) -> None:
    (tmp_path / "broken.jsonl").write_text("{")
    (tmp_path / "blank.jsonl").write_text('{"text": " "}\n')
    yaml = "data: {sources: [broken.jsonl, blank.jsonl, none.txt], eval: [{path: broken.jsonl}]}"
    message = [str(problem) for problem in source_of(tmp_path, yaml, registered).problems()]
    assert message[0].startswith(f"sources[0].path: {tmp_path}/broken.jsonl:1 is not valid JSON")
    assert message[1].startswith("sources[1].path: contains no text")
    assert message[2].startswith("sources[2].path: does not exist")
    assert message[3].startswith("eval[0].path: ")


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("{sources: [{path: ''}]}", "data.sources[0].path: empty"),
        ("{sources: [{field: a}]}", "data.sources[0].path: missing"),
        ("{sources: [{path: a, feld: b}]}", "data.sources[0].feld: unknown key"),
        ("{sources: a.txt}", "data.sources: wrong type\n    expected: a list of sections"),
        ("{sources: [3]}", "data.sources[0]: wrong type\n    expected: a section, or a path"),
        ("{path: b, sources: [{path: a}]}", "data.path: given together with data.sources"),
        ("{sources: [{path: a, weight: 1}, b]}", "data.sources: only some have a weight"),
        ("{sources: [{path: a, weight: 0}]}", "data.sources[0].weight: out of range"),
        ("{sources: [{path: a, weight: .inf}]}", "data.sources[0].weight: out of range"),
        ("{cache: ''}", "data.cache: empty"),
        ("{packing: tight}", "data.packing: unknown value"),
    ],
)
def test_sources_that_make_no_sense_are_refused(registered: Registries, yaml: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_config(f"training: {{steps: 1}}\ndata: {yaml}", registered=registered)


def test_a_zero_byte_cannot_stand_in_a_document_of_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\u0000b"}\n')
    (problem,) = TextSource(TextDataConfig(path=str(tmp_path / "a.jsonl"))).problems()
    assert "a.jsonl:1 contains a zero byte" in problem.what


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "cache").write_text("a file")
    source = TextSource(TextDataConfig(path=str(tmp_path / "a.txt"), cache=str(tmp_path / "cache")))
    with pytest.raises(MachineError, match=r"prepared data cannot be written into .*cache"):
        opened(source, tmp_path, 4)


def test_prepared_data_on_a_full_disk_leave_nothing_and_say_what_to_do(tmp_path: Path, monkeypatch) -> None:
    def opened_on_a_full_disk(path: Path, mode: str = "r", **options: int) -> IO:
        if ".incomplete-" not in path.name:
            return open(path, mode, **options)
        path.touch()
        return open("/dev/full", mode, **options)

    (tmp_path / "a.txt").write_text("some text")
    source = TextSource(TextDataConfig(path=str(tmp_path / "a.txt"), cache=str(tmp_path / "cache")))
    monkeypatch.setattr(Path, "open", opened_on_a_full_disk)
    with pytest.raises(MachineError, match=r"cannot be written into .*: the disk is full .*; free some space"):
        opened(source, tmp_path, 4)
    assert list(tmp_path.rglob("*.incomplete-*")) == []


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
    dataset = opened(source, tmp_path, 7)
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


class Numbers(Samples):
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


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("{", "Invalid JSON: EOF while parsing an object at line 1 column 1"),
        ("[" * 100_000, "Invalid JSON: recursion limit exceeded"),
        ("[]", "expected a"),
        ("{}", "format: missing"),
        ('{"format": 2, "corpora": {}}', "format: expected 1, got 2"),
        ('{"format": 1, "corpora": {"training": 3}}', "corpora.training: expected a valid array, got 3"),
        (
            '{"format": 1, "corpora": {"training": [{"folder": 3, "origin": "", "digests": {}}]}}',
            "corpora.training.0.folder: expected a valid string, got 3",
        ),
        (
            '{"format": 1, "corpora": {"training": [{"folder": "", "origin": "", "digests": ["a"]}]}}',
            "corpora.training.0.digests: expected",
        ),
    ],
)
def test_damaged_records_of_prepared_data_are_refused_by_name(tmp_path: Path, damage: str, problem: str) -> None:
    write_notes(tmp_path, {})
    assert read_notes(tmp_path) == {}
    (file,) = tmp_path.iterdir()
    file.write_text(damage)
    with pytest.raises(
        DataError, match=re.escape(f"{file} is damaged: {problem}") + ".*; delete it, and `hp-train resum"
    ):
        read_notes(tmp_path)


def test_records_of_other_sources_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text " * 50)
    source = TextSource(TextDataConfig(path=str(tmp_path / "a.txt")))
    opened(source, tmp_path, 4)
    data = tmp_path / "run" / "data"
    write_notes(data, {})
    for use in (source.verify, lambda folder: source.open(folder, 4)):
        with pytest.raises(DataError, match=r"data\.json is damaged: corpora\.training: expected 1 records, .* got 0"):
            use(data)


def test_packing_is_recorded_as_by_earlier_versions(tmp_path: Path, registered: Registries) -> None:
    """Their checkpoints are read: data with another record are refused as other data."""
    write_numbers(tmp_path / "a.jsonl", 40, "a")
    recorded = {"concatenate": None, "documents": "documents", "best_fit": "whole", "none": "none"}
    for packing, name in recorded.items():
        yaml = f"data: {{path: a.jsonl, field: body, packing: {packing}}}"
        fingerprint = opened(source_of(tmp_path, yaml, registered), tmp_path / packing, 4).fingerprint
        assert fingerprint.get("packing") == name
