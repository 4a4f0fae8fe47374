"""Tokenizers from files: what they encode, what they say of special tokens, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors, trainers

from hp_trainer import cli
from hp_trainer.data import (
    ByteTokenizer,
    FileTokenizer,
    TextDataConfig,
    TextSource,
    formats,
    load_tokenizer,
    train_tokenizer,
)
from hp_trainer.data.corpus import read_notes
from hp_trainer.exceptions import DataError

TEXT = "the cat sat on the mat, the cat naïvely ate 中文 cake\n" * 20


def write_tokenizer(
    folder: Path, special: tuple[str, ...] = ("<s>", "</s>"), begins: bool = True, **settings: Any
) -> Path:
    """A byte-level BPE tokenizer as Hugging Face directories hold them."""
    folder.mkdir(parents=True, exist_ok=True)
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=300, special_tokens=[*special], initial_alphabet=alphabet)
    )
    if begins:
        made.post_processor = processors.TemplateProcessing(single=f"{special[0]} $A", special_tokens=[(special[0], 0)])
    made.save(str(folder / "tokenizer.json"))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_documents_begin_and_end_as_the_directory_says(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, eos_token={"content": "</s>"}, bos_token="<s>")
    tokenizer = FileTokenizer(folder)
    (document,) = tokenizer.encode_documents(["the cat"])
    assert (document[0], document[-1]) == (0, 1)
    assert (tokenizer.begin, tokenizer.separator, tokenizer.vocab_size) == (0, 1, 289)
    assert tokenizer.decode(document) == "the cat"
    assert tokenizer.encode("the cat").tolist() == document[:-1].tolist()
    assert tokenizer.special_tokens == {"eos_token": "</s>", "bos_token": "<s>"}


def test_a_file_alone_has_the_usual_end_or_is_told_it(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path / "a", ("<|endoftext|>", "<x>"), begins=False) / "tokenizer.json"
    tokenizer = FileTokenizer(file)
    assert (tokenizer.separator, tokenizer.begin) == (0, 0)
    named = FileTokenizer(file, "<x>")
    assert named.separator == 1
    assert named.fingerprint != tokenizer.fingerprint
    assert named.encode("").tolist() == []
    unknown = write_tokenizer(tmp_path / "b", ("<y>",), begins=False)
    with pytest.raises(DataError, match="names no end token; set it with data"):
        FileTokenizer(unknown)
    with pytest.raises(DataError, match=r"has no token '<z>', which data.end_token names"):
        FileTokenizer(unknown, "<z>")


def test_damaged_files_of_a_directory_are_named(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "a", ("<x>",), begins=False, eos_token="<y>")
    with pytest.raises(DataError, match=r"no token '<y>', which is its directory's eos_token; set data\.end_token"):
        FileTokenizer(folder)
    assert FileTokenizer(folder, "<x>").chat_template is None
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"chat_template\.jinja is damaged"):
        FileTokenizer(folder, "<x>")
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text('{"chat_template": ["a", {"name": "default", "template": "b"}]}')
    assert FileTokenizer(folder, "<x>").chat_template == "b"


def test_chunks_of_a_long_text_have_the_tokens_of_the_full_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer", eos_token="</s>", bos_token="<s>")
    (tmp_path / "long.txt").write_text(TEXT)
    monkeypatch.setattr(formats, "SEGMENT_BYTES", 200)
    assert len(list(formats.open_reader(tmp_path / "long.txt").records())) > 3
    source = TextSource(TextDataConfig(path=str(tmp_path / "long.txt"), tokenizer=str(folder)))
    (tmp_path / "run" / "data").mkdir(parents=True)
    source.prepare(tmp_path / "run" / "data")
    (note,) = read_notes(tmp_path / "run" / "data")["training"]
    corpus = note.open(tmp_path / "run" / "data")
    (full,) = FileTokenizer(folder).encode_documents([TEXT])
    np.testing.assert_array_equal(corpus.tokens, full)
    assert corpus.ends.tolist() == [len(full)]


@pytest.mark.parametrize("text", ["naïvely 中文 cat", "", "</s> the cat<s>"])
def test_spans_say_which_characters_a_token_stands_for(tmp_path: Path, text: str) -> None:
    for tokenizer in (FileTokenizer(write_tokenizer(tmp_path)), ByteTokenizer()):
        tokens, spans = tokenizer.encode_with_spans(text)
        assert spans.shape == (len(tokens), 2)
        covered = np.zeros(len(text), bool)
        for begin, end in spans:
            covered[begin:end] = True
        assert covered.all()
        assert all(np.diff(spans[:, 0]) >= 0)


def test_bytes_are_the_default() -> None:
    assert isinstance(load_tokenizer(None), ByteTokenizer)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "the tokenizer .*tokenizer.json does not exist; expected a tokenizer.json or a directory with one"),
        ("{", "tokenizer.json is damaged or not a tokenizer: "),
        ('{"model": {"type": "BPE"}}', "tokenizer.json is damaged or not a tokenizer: "),
    ],
)
def test_a_missing_or_damaged_file_is_reported(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=message):
        load_tokenizer(str(tmp_path))


def test_a_pattern_of_exponential_time_is_told_with_its_file_and_the_row(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, eos_token="</s>")
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    made.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")
    made.save(str(tmp_path / "tokenizer.json"))
    texts = ["hello", "a" * 40 + "!", "hello"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    source = TextSource(TextDataConfig(path=str(tmp_path / "a.jsonl"), tokenizer=str(tmp_path)))
    told = r"a\.jsonl:2: .*tokenizer\.json cannot encode a text: a pattern in it takes exponential time \(.*retry-limit"
    with pytest.raises(DataError, match=told):
        source.prepare(tmp_path)
    with pytest.raises(DataError, match="takes exponential time"):
        source.tokenizer().encode(texts[1])


def test_damaged_settings_of_a_directory_are_told(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, eos_token="</s>")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json is damaged"):
        FileTokenizer(tmp_path)


# Training one ------------------------------------------------------------------------------------------------


def test_a_tokenizer_is_trained_by_a_command_and_used_by_a_run(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "text.jsonl").write_text(json.dumps({"body": TEXT}) + "\n")
    file = tmp_path / "made" / "tokenizer.json"
    words = ["tokenizer", str(tmp_path / "text.jsonl"), "--vocab-size=270", f"--to={file}", "--field", "body"]
    assert cli.main(words) == 0
    assert f"{file}: 270 tokens; use it with data.tokenizer={file} and model.vocab_size=270" in capsys.readouterr().out
    tokenizer = FileTokenizer(file)
    assert len(tokenizer.encode("the cat")) < 7
    assert tokenizer.decode(tokenizer.encode("naïvely ☃")) == "naïvely ☃"
    again = tmp_path / "again.json"
    train_tokenizer(tmp_path / "text.jsonl", again, vocab_size=270, field="body")
    assert again.read_text() == file.read_text(), "the same text gives the same tokenizer"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.txt", "--vocab-size=300"], "none.txt does not exist"),
        (["blank.txt", "--vocab-size=300"], "contains no text to train a tokenizer on"),
        (["text.txt", "--vocab-size=200"], "needs at least 257 tokens, got 200"),
        (["text.txt", "--vocab-size=300", "--to=text.txt/a.json"], "cannot be written to text.txt/a.json"),
        (["text.txt"], "Missing option '--vocab-size'."),
        (["text.txt", "--vocab-size=300", "--data.path=a"], "accepts no settings, got --data.path"),
    ],
)
def test_a_tokenizer_that_cannot_be_trained_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    Path("blank.txt").write_text(" ")
    assert cli.main(["tokenizer", *words]) == 2
    assert message in capsys.readouterr().err
