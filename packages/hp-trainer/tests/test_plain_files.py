"""Pipes, devices and enormous files are refused without being opened: a pipe's reader would wait for ever."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from hp_trainer import _files
from hp_trainer._files import link_new, other_kind, read_plain_text
from hp_trainer.checkpoint import LocalStorage, find_latest
from hp_trainer.config import load_config
from hp_trainer.data import find_text_files, formats, open_reader
from hp_trainer.data.chat import load_template
from hp_trainer.exceptions import ConfigError, DataError, PlanError, RunFolderError
from hp_trainer.models.hugging_face.architectures import ConfigReader
from hp_trainer.planning.devices import find_device
from hp_trainer.registries import Registries
from hp_trainer.run import RunFolder


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe.yaml")
    return tmp_path / "pipe.yaml"


def test_nothing_is_created_if_there_is_nothing_to_link(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        link_new(tmp_path / "gone", tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_the_kind_of_what_is_there_is_told(tmp_path: Path, pipe: Path) -> None:
    (tmp_path / "file").write_text("é")
    (tmp_path / "link").symlink_to(pipe)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(tmp_path / "socket"))
        kinds = [other_kind(tmp_path / name) for name in ("file", "none", "", "pipe.yaml", "link", "socket")]
    assert kinds == [None, None, None, "a named pipe", "a named pipe", "a socket"]
    assert other_kind(Path("/dev/zero")) == "a device"
    assert other_kind(Path("\0")) is None
    assert read_plain_text(tmp_path / "file") == "é"


def test_a_file_that_would_fill_the_memory_is_not_read(tmp_path: Path, registered: Registries) -> None:
    with (tmp_path / "large.yaml").open("wb") as out:
        out.truncate(1 << 40)  # takes no room on the disk
    with pytest.raises(ConfigError, match=r"cannot be read.*\n.*\n +got: it has 1,099,511,627,776 bytes, more than"):
        load_config(tmp_path / "large.yaml", registered=registered)


def test_a_pipe_that_comes_after_the_first_look_is_not_read(pipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_files, "other_kind", lambda path: None)
    with pytest.raises(OSError, match="it is a named pipe, not a regular file"):
        read_plain_text(pipe)


def test_a_file_that_tells_no_size_is_not_read_on() -> None:
    full = Path("/proc/self/status")
    assert full.stat().st_size == 0
    assert len(read_plain_text(full)) > 16
    with pytest.raises(OSError, match="it has 17 bytes, more than the limit of 16"):
        read_plain_text(full, most_bytes=16)


def test_a_configuration_that_is_a_pipe_or_a_device_is_refused(
    tmp_path: Path, pipe: Path, registered: Registries
) -> None:
    (tmp_path / "outer.yaml").write_text("include: pipe.yaml\n")
    for path in (pipe, tmp_path / "outer.yaml"):
        with pytest.raises(
            ConfigError, match=r"pipe.yaml.*cannot be read(.*\n)*.*it is a named pipe, not a regular file"
        ):
            load_config(path, registered=registered)
    with pytest.raises(ConfigError, match="it is a device, not a regular file"):
        load_config("/dev/zero", registered=registered)


@pytest.mark.parametrize("kind", ["auto", "text", "jsonl"])
def test_data_that_are_a_pipe_or_a_device_are_refused(pipe: Path, kind) -> None:
    for path, message in ((pipe, "a named pipe"), (Path("/dev/zero"), "a device")):
        with pytest.raises(DataError, match=f"data path {re.escape(str(path))} is {message}; expected a text file"):
            open_reader(path, kind)
    with pytest.raises(DataError, match="is a named pipe"):
        list(find_text_files(pipe))


def test_other_inputs_that_are_pipes_are_refused(tmp_path: Path, pipe: Path) -> None:
    with pytest.raises(DataError, match="it is a named pipe"):
        load_template(None, str(pipe), None)
    with pytest.raises(PlanError, match=r"device '.*pipe.yaml' is unknown; expected .* or a YAML file"):
        find_device(str(pipe))
    os.mkfifo(tmp_path / "config.json")
    (problem,) = ConfigReader.open(tmp_path).problems
    assert "it is a named pipe" in problem.what


def test_pipes_within_runs_and_checkpoints_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.json")
    with pytest.raises(RunFolderError):
        RunFolder.open(tmp_path)
    step = tmp_path / "checkpoints" / "step-00000001"
    step.mkdir(parents=True)
    os.mkfifo(step / "index.json")
    latest = find_latest(LocalStorage(tmp_path / "checkpoints"))
    assert latest.checkpoint is None
    assert "index.json is missing" in latest.skipped[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"text": "short"}\n{"text": "' + "long " * 20 + '"}\n',
            r"data.json:2 has more than 64 bytes; expected one object per line",
        ),
        ('[{"text": "' + "long " * 20 + '"}]', r"data.json is a list of more than 64 bytes; write its objects as JSON"),
    ],
    ids=["a line", "a list"],
)
def test_json_that_would_fill_the_memory_is_not_read_on(tmp_path: Path, monkeypatch, content, message) -> None:
    monkeypatch.setattr(formats, "_LONGEST_LINE", 64)
    monkeypatch.setattr(formats, "_LONGEST_LIST", 64)
    (tmp_path / "data.json").write_text(content)
    with pytest.raises(DataError, match=message):
        list(open_reader(tmp_path / "data.json").records())
