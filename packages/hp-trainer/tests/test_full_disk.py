"""Files that cannot be written to the end, as on a full disk: the error names the file, and nothing is left of it."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hp_trainer import _files
from hp_trainer._coordination import Alone, report
from hp_trainer.data import train_tokenizer
from hp_trainer.exceptions import DataError, ExportError, describe_machine_error
from hp_trainer.metrics import JsonLinesTracker, draw_loss_curve
from hp_trainer.models import DecoderConfig
from hp_trainer.models.hugging_face.export import export_weights
from hp_trainer.models.hugging_face.tensor_map import build_tensor_map
from hp_trainer.records import StepRecord
from hp_trainer.run.export import convert_weights


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """A context in which no file may grow beyond `size` bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def export(folder: Path) -> None:
    options = DecoderConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    tensors = build_tensor_map(options, "llama")
    export_weights(folder, tensors, lambda name, box: np.zeros(box.shape, np.float32), {}, Alone(), dtype="float32")


class Foreign:
    """A checkpoint of another format."""

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {"w": ("float32", (4096,))}

    def read(self, name: str) -> np.ndarray:
        return np.zeros(4096, np.float32)


def draw(folder: Path) -> None:
    draw_loss_curve([{"event": "step", "step": step, "loss": 1.0 / step} for step in (1, 2)], folder / "file")


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("file", lambda folder: _files.write_atomically(folder / "file", "x" * 9000)),
        ("file", lambda folder: _files.write_new(folder / "file", "x" * 9000)),
        ("file", lambda folder: _files.copy_file(Path(__file__), folder / "file")),
        ("file", draw),
        ("tokenizer.json", lambda folder: train_tokenizer(Path(__file__), folder / "tokenizer.json", vocab_size=260)),
        ("model.safetensors", export),
        ("model.safetensors", lambda folder: convert_weights(Foreign(), folder, folder, "")),
    ],
    ids=["replaced", "new", "copied", "picture", "tokenizer", "export", "import"],
)
def test_what_cannot_be_written_is_named_and_leaves_nothing(tmp_path: Path, name: str, write) -> None:
    error: BaseException
    with largest_file(2000), pytest.raises((OSError, ExportError, DataError)) as caught:
        write(tmp_path)
    error = caught.value
    message = describe_machine_error(error) or str(error)
    assert f"{tmp_path / name}: the file would be larger than this process may write (File too large)" in message
    assert list(tmp_path.iterdir()) == []
    write(tmp_path)
    assert name in {path.name for path in tmp_path.iterdir()}


def test_metrics_that_cannot_be_written_are_named_at_the_end_too(tmp_path: Path) -> None:
    tracker = JsonLinesTracker(tmp_path / "metrics.jsonl")
    # As `start` does; the buffer of a line that was not written is written again when the file is closed.
    tracker._file = tracker.path.open("a", encoding="utf-8", buffering=1)
    record = StepRecord(step=1, learning_rate=1e-3, tokens=1, samples=1, metrics={"x" * 3000: 1.0})
    with largest_file(2000):
        for fails in (lambda: tracker.step(record), tracker.finish):
            with pytest.raises(OSError, match="File too large") as caught:
                fails()
            assert caught.value.filename == str(tracker.path)


def test_a_line_that_cannot_be_printed_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Full, closed in this process, and closed before the process was started.
    with open("/dev/full", "w") as full, open(tmp_path / "closed", "w") as closed:
        closed.close()
        for stream in (full, closed, None):
            monkeypatch.setattr("sys.stderr", stream)
            report("a line")
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()
    report("another")
    assert capsys.readouterr() == ("", "hp-train: another\n")
