"""Files of every format give the same records, and what is wrong with them is reported with its place."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from hp_trainer.data import formats, open_reader
from hp_trainer.exceptions import DataError

ROWS = [{"text": f"text {n} é", "other": n} for n in range(5)]
TEXTS = [row["text"] for row in ROWS]


def write_lines(file: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    file.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return file


def write_csv(file: Path) -> Path:
    text = io.StringIO()
    writer = csv.DictWriter(text, ["other", "text"], delimiter="\t" if ".tsv" in file.name else ",")
    writer.writeheader()
    writer.writerows(ROWS)
    data = text.getvalue().encode()
    file.write_bytes(gzip.compress(data) if file.suffix == ".gz" else data)
    return file


def write_parquet(file: Path) -> Path:
    parquet.write_table(pa.Table.from_pylist(ROWS), file, row_group_size=2)
    return file


def write_arrow(file: Path, opener: Any = pa.ipc.new_stream, rows: list[dict[str, Any]] = ROWS) -> Path:
    table = pa.Table.from_pylist(rows)
    with opener(str(file), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return file


def write_saved(folder: Path) -> Path:
    """Write a dataset of two shards as `datasets.Dataset.save_to_disk` does."""
    folder.mkdir(parents=True)
    files = [f"data-0000{n}-of-00002.arrow" for n in range(2)]
    for file, rows in zip(files, (ROWS[:3], ROWS[3:]), strict=True):
        write_arrow(folder / file, rows=rows)
    write_arrow(folder / "cache-1234.arrow")
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": file} for file in files]}))
    return folder


def write_saved_splits(folder: Path) -> Path:
    write_saved(folder / "train")
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    return folder


def write_gzip(file: Path) -> Path:
    file.write_bytes(gzip.compress(write_lines(file.with_suffix("")).read_bytes()))
    file.with_suffix("").unlink()
    return file


def write_list(file: Path) -> Path:
    file.write_text(f" {json.dumps(ROWS)}")
    return file


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.jsonl", write_lines),
        ("a.jsonl.gz", write_gzip),
        ("a.csv", write_csv),
        ("a.tsv", write_csv),
        ("a.csv.gz", write_csv),
        ("a.json", write_list),
        ("a.parquet", write_parquet),
        ("a.arrow", write_arrow),
        ("a.feather", lambda file: write_arrow(file, pa.ipc.new_file)),
        ("saved", write_saved),
        ("splits", write_saved_splits),
    ],
)
def test_a_format_is_known_by_its_files(tmp_path: Path, name: str, write: Any) -> None:
    reader = open_reader(write(tmp_path / name))
    reader.check(("text",))
    records = list(reader.records(("text",)))
    assert [record.text("text") for record in records] == TEXTS
    assert len({record.where for record in records}) == 5
    assert all(record.size > 0 for record in records)


def test_values_of_csv_are_text_as_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('id,text\n7,007\n8,\n9,"two, lines\nwith ""quotes"""\n')
    records = list(open_reader(tmp_path / "a.csv").records(("text",)))
    assert [record.value for record in records] == [
        {"text": "007"},
        {"text": ""},
        {"text": 'two, lines\nwith "quotes"'},
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"id,body\n1,x\n", r"a\.csv has no column 'text'; its columns: id, body"),
        (b"id,text\n1,x,y\n", r"a\.csv is damaged or of another format: .*Expected 2 columns, got 3"),
        (b"id,text\n1,\xff\n", r"a\.csv is damaged or of another format: .*UTF8"),
        (b"", r"a\.csv is damaged or of another format: Empty CSV file"),
    ],
)
def test_a_csv_file_that_cannot_be_read_is_named(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "a.csv").write_bytes(data)
    with pytest.raises(DataError, match=message):
        list(open_reader(tmp_path / "a.csv").records(("text",)))


def test_a_folder_is_of_the_format_of_all_its_files(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_parquet(tmp_path / f"{name}.parquet")
    (tmp_path / "README.md").write_text("about the data")
    assert [record.text("text") for record in open_reader(tmp_path).records()] == TEXTS * 2
    assert [file.name for file in open_reader(tmp_path).files] == ["a.parquet", "b.parquet"]
    (tmp_path / "notes.txt").write_text("a folder of text")
    assert [record.where for record in open_reader(tmp_path).records()] == [
        str(tmp_path / name) for name in ("README.md", "notes.txt")
    ]
    assert len(list(open_reader(tmp_path, "parquet").records())) == 10


def test_a_pattern_names_files(tmp_path: Path) -> None:
    for name in ("train-1", "train-0", "test-0"):
        write_lines(tmp_path / f"{name}.jsonl")
    reader = open_reader(tmp_path / "train-*.jsonl")
    assert [file.name for file in reader.files] == ["train-0.jsonl", "train-1.jsonl"]
    with pytest.raises(DataError, match=r"no file matches the data path .*valid-\*"):
        open_reader(tmp_path / "valid-*.jsonl")


@pytest.mark.parametrize(
    ("line", "expected_message"),
    [
        (
            b'{"text": 1, x}',
            r"a\.jsonl:2 is not valid JSON: Expecting .* at character 12; it starts with b'\{\"text\": 1, x\}",
        ),
        (b'{"text": "\xff"}', r"a\.jsonl:2 is not UTF-8: invalid start byte at byte 10"),
        (b"[" * 20_000, r"a\.jsonl:2 is not valid JSON"),
        (b'"text"', r"a\.jsonl:2: expected an object with fields, got 'text'"),
        (b'{"content": "a", "id": 1}', r"a\.jsonl:2 has no field 'text'; its fields: content, id"),
        (b'{"text": 3}', r"a\.jsonl:2: expected text in field 'text', got 3"),
        (b'{"text": "a \\ud83d b"}', r"a\.jsonl:2 has half of a surrogate pair, \\ud83d, which is no character"),
        (b'{"text": "a", "tags": ["\\uDC80"]}', r"a\.jsonl:2 has half of a surrogate pair, \\udc80"),
        (b'{"conversations": []}', r"Set data\.name=chat and data\.messages_field=conversations$"),
        (b'{"body": "a"}', r"its fields: body\. Set data\.field=body$"),
        (
            b'{"instruction": "a", "input": "b", "output": "c"}',
            r"Set data\.name=chat, data\.prompt_field=instruction and data\.completion_field=output; it leaves out",
        ),
    ],
)
def test_a_broken_line_is_reported_with_its_number(tmp_path: Path, line: bytes, expected_message: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(DataError, match=expected_message):
        [record.text("text") for record in open_reader(file).records()]


def test_a_list_may_start_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "list.json"
    file.write_text('\n[{"text": "a"},\n {"text": "b"}]', encoding="utf-8-sig")
    assert [record.text("text") for record in open_reader(file).records()] == ["a", "b"]


def test_a_pair_of_surrogates_is_a_character(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "\N{GRINNING FACE}"}) + "\n")
    assert [record.text("text") for record in open_reader(tmp_path / "a.jsonl").records()] == ["\N{GRINNING FACE}"]
    (tmp_path / "list.json").write_text('[{"text": "a"}, {"text": "\\ud83d"}]')
    with pytest.raises(DataError, match=r"list\.json\[1\] has half of a surrogate pair"):
        list(open_reader(tmp_path / "list.json").records())


def test_a_column_of_bytes_that_are_no_text_names_its_file(tmp_path: Path) -> None:
    array = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff")])
    parquet.write_table(pa.table({"text": array}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet is damaged or of another format: .*can't decode byte 0xff"):
        list(open_reader(tmp_path / "a.parquet").records(("text",)))


def test_long_rows_that_were_compressed_are_read_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": [f"{n}" * 100_000 for n in range(10)], "other": ["b"] * 10}), file)
    assert file.stat().st_size < 100_000
    monkeypatch.setattr(formats, "_BATCH_BYTES", 350_000)
    reader = open_reader(file)
    assert [batch.num_rows for batch in reader._batches(file, ["text"])] == [3, 3, 3, 1]
    assert [batch.num_rows for batch in reader._batches(file, ["other"])] == [10]
    assert [record.text("text")[0] for record in reader.records(("text",))] == list("0123456789")
    monkeypatch.setattr(formats, "_LONGEST_LINE", 50_000)
    with pytest.raises(DataError, match=r"a\.parquet unpacks to 100,\d+ bytes a row; expected at most 50,000"):
        reader.check(("text",))


@pytest.mark.parametrize(
    ("name", "write"), [("a.parquet", write_parquet), ("a.arrow", write_arrow), ("a.jsonl.gz", write_gzip)]
)
def test_a_truncated_file_is_told(tmp_path: Path, name: str, write: Any) -> None:
    file = write(tmp_path / name)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    reader = open_reader(file)
    with pytest.raises(DataError, match=rf"{name} (is damaged or of another format|cannot be read)"):
        list(reader.records(("text",)))
    if name == "a.parquet":  # whose columns stand at the end
        with pytest.raises(DataError, match="is damaged"):
            reader.check(("text",))


def test_a_wrong_column_and_a_missing_split_are_told(tmp_path: Path) -> None:
    reader = open_reader(write_parquet(tmp_path / "a.parquet"))
    with pytest.raises(DataError, match=r"a\.parquet has no column 'content'; its columns: text, other"):
        reader.check(("content",))
    saved = write_saved_splits(tmp_path / "splits")
    with pytest.raises(DataError, match="has no split 'valid'; its splits: train, test"):
        open_reader(saved, split="valid")
    (saved / "train" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"state\.json names files that do not exist: .*data-00001"):
        open_reader(saved)
    for text in ("[]", '{"_data_files": 5}', '{"_data_files": ["a"]}'):
        (saved / "train" / "state.json").write_text(text)
        with pytest.raises(DataError, match=r"state\.json is damaged"):
            open_reader(saved)
    (saved / "dataset_dict.json").write_text('{"splits": 5}')
    with pytest.raises(DataError, match=r"dataset_dict\.json is damaged: splits is not a list"):
        open_reader(saved)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"contains no file that ends in \.parquet or \.pq"):
        open_reader(tmp_path / "empty", "parquet")
