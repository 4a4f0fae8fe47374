"""Checkpoints in a fake of an object store: no rename, and a crash at any operation leaves a checkpoint that loads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from hp_trainer._files import writer_name
from hp_trainer.checkpoint import (
    Box,
    TensorPart,
    catalog,
    list_checkpoints,
    list_set_aside,
    open_latest,
    save_checkpoint,
    set_aside_newer,
)
from hp_trainer.checkpoint.storage import ObjectStorage, ObjectStorageConfig
from hp_trainer.config import parse_config
from hp_trainer.exceptions import CheckpointError, ConfigError
from hp_trainer.registries import Registries


class Crash(BaseException):
    """The process is killed here."""


class ObjectStore(MemoryFileSystem):
    """Objects that are complete or absent, and no rename; it crashes at a chosen operation."""

    cachable = False
    left: int | None = None

    def _change(self) -> None:
        if self.left is not None:
            if self.left == 0:
                raise Crash
            self.left -= 1

    def mv(self, *arguments: Any, **options: Any) -> None:
        raise NotImplementedError("object stores have no rename")

    rename = move = mv

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "w" in mode:
            self._change()
        return super().open(path, mode, **options)

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        super().pipe_file(path, value, **options)

    def rm_file(self, path: str) -> None:
        self._change()
        super().rm_file(path)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        # One request for each object: killed between two, some are left.
        for found in self.find(path):
            self._change()
            MemoryFileSystem.rm_file(self, found)
        if self.exists(path):
            super().rm(path, recursive=True)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    made = ObjectStore()
    made.store.clear()
    made.pseudo_dirs[:] = [""]
    monkeypatch.setattr("hp_trainer.checkpoint.storage._filesystem", lambda url: (made, "/bucket/run"))
    return made


@pytest.fixture
def storage(store: ObjectStore) -> ObjectStorage:
    return ObjectStorage("memory://bucket/run")


def save(storage: ObjectStorage, step: int, keep: int | None = None) -> str:
    data = np.full((3, 2), step, np.float32)
    part = TensorPart("w", "float32", (3, 2), [(Box.full((3, 2)), data)])
    return save_checkpoint(storage, [part], step=step, model={"name": "m"}, state={}, keep=keep)


def test_a_checkpoint_is_written_found_read_and_deleted(storage: ObjectStorage, store: ObjectStore) -> None:
    assert storage.list_folders() == []
    assert save(storage, 1) == "step-00000001"
    assert save(storage, 1) == "step-00000001-2"
    assert save(storage, 2, keep=1) == "step-00000002"
    assert storage.list_folders() == ["step-00000002"]
    checkpoint = open_latest(storage)
    assert np.array_equal(checkpoint.read("w"), np.full((3, 2), 2, np.float32))
    assert checkpoint.read("w", Box((1, 0), (1, 2))).tolist() == [[2.0, 2.0]]
    assert storage.describe("step-00000002", "index.json") == "memory://bucket/run/step-00000002/index.json"
    # The mark and the objects that it leads to; nothing of what was deleted.
    assert len(store.find("/bucket/run")) == 3


def test_a_crash_at_any_operation_leaves_a_checkpoint_that_loads(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Saves of this process would be taken for running ones.
    ended = f"{writer_name().rpartition('-')[0]}-1"
    monkeypatch.setattr(catalog, "writer_name", lambda: ended)
    ends: set[int] = set()
    for crash_at in range(100):
        store.store.clear()
        store.pseudo_dirs[:] = [""]
        store.left = None
        storage = ObjectStorage("memory://bucket/run")
        save(storage, 1)
        store.left = crash_at
        try:
            save(storage, 2, keep=1)
        except Crash:
            crashed = True
        else:
            crashed = False
        store.left = None
        latest = open_latest(storage)
        assert np.array_equal(latest.read("w"), np.full((3, 2), latest.step, np.float32)), crash_at
        ends.add(latest.step)
        save(storage, 3, keep=1)
        assert storage.list_folders() == ["step-00000003"], crash_at
        assert len(store.find("/bucket/run")) == 3, crash_at
        if not crashed:
            break
    else:
        pytest.fail("every operation crashed")
    assert crash_at >= 5
    assert ends == {1, 2}


def test_later_checkpoints_are_set_aside_by_their_marks(storage: ObjectStorage, store: ObjectStore) -> None:
    for step in (1, 2):
        save(storage, step)
    objects = len(store.find("/bucket/run"))
    (renamed,) = set_aside_newer(storage, "step-00000001")
    assert list_checkpoints(storage) == ["step-00000001"]
    assert list_set_aside(storage) == [renamed]
    assert len(store.find("/bucket/run")) == objects
    storage.rename_folder(renamed, "step-00000002")
    assert open_latest(storage).step == 2


@pytest.mark.parametrize("text", [b"{", b"[" * 100_000, b"[]", b"{}", b'{"prefix": "../x"}', b'{"prefix": 3}', b"\xff"])
def test_a_damaged_mark_is_no_checkpoint_and_the_one_before_is_found(
    storage: ObjectStorage, store: ObjectStore, text: bytes
) -> None:
    save(storage, 1)
    save(storage, 2)
    store.pipe_file("/bucket/run/step-00000002.commit.json", text)
    assert open_latest(storage).step == 1


def fail(*arguments: Any, **options: Any) -> None:
    raise RuntimeError("AccessDenied")


@pytest.mark.parametrize("operation", ["open", "ls", "pipe_file"])
def test_errors_of_the_stores_library_name_the_object(
    storage: ObjectStorage, store: ObjectStore, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    monkeypatch.setattr(store, operation, fail)
    with pytest.raises(CheckpointError, match=r"memory://bucket/run.*: RuntimeError: AccessDenied"):
        save(storage, 1)


def test_a_url_that_cannot_be_used_is_refused(registered: Registries) -> None:
    def config(url: str) -> str:
        return (
            "model: {name: tiny}\ntraining: {steps: 3}\n"
            f"checkpoint: {{storage: {{name: object_store, url: '{url}'}}}}\n"
        )

    good = parse_config(config("memory://bucket/run"), registered=registered).config
    assert isinstance(good.checkpoint.storage.options, ObjectStorageConfig)
    with pytest.raises(ConfigError, match=r"checkpoint\.storage\.url: cannot be used: Protocol not known: nowhere"):
        parse_config(config("nowhere://bucket"), registered=registered)
    check: Callable[..., Any] = ObjectStorageConfig(url="memory://x").check
    assert list(check()) == []
