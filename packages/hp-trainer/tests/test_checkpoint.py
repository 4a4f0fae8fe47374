"""A checkpoint written by any layout is read by any layout, and damage is found before it is loaded."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from hp_trainer._files import writer_name
from hp_trainer.checkpoint import (
    Box,
    Checkpoint,
    LocalStorage,
    PendingSave,
    TensorPart,
    catalog,
    delete_leftovers,
    find_latest,
    index,
    list_checkpoints,
    open_latest,
    prune,
    save_checkpoint,
)
from hp_trainer.checkpoint.shard_file import CHECKSUM_BLOCK, Entry, cover_exactly, file_parts, read_header
from hp_trainer.exceptions import CheckpointError, describe_exit

MODEL = {"name": "tiny", "hidden_size": 8}


class ThreadGroup:
    """Ranks as threads, with the one collective that saving needs."""

    def __init__(self, rank: int, size: int, shared: dict[str, Any]) -> None:
        self.rank, self.size, self._shared = rank, size, shared

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        self._shared["slots"][self.rank] = data
        self._shared["barrier"].wait(timeout=300)
        gathered = list(self._shared["slots"])
        self._shared["barrier"].wait(timeout=300)
        return gathered


def on_ranks(size: int, do: Callable[[ThreadGroup], Any]) -> list[Any]:
    """Run `do` on every rank; an exception takes the place of its result."""
    shared = {"slots": [b""] * size, "barrier": threading.Barrier(size)}
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = do(ThreadGroup(rank, size, shared))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def row_part(name: str, data: np.ndarray, rank: int, rows: list[int], **more: Any) -> TensorPart:
    """What `rank` holds of `data` when its rows are split as `rows`."""
    begin = sum(rows[:rank])
    box = Box((begin, *(0,) * (data.ndim - 1)), (rows[rank], *data.shape[1:]))
    return TensorPart(name, str(data.dtype), data.shape, [(box, data[begin : begin + rows[rank]])], **more)


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "checkpoints")


@pytest.fixture
def data() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "weight": rng.normal(size=(7, 5)).astype(np.float32),
        "steps": np.array(42, dtype=np.int64),
        "mask": rng.integers(0, 2, size=3).astype(bool),
    }


def save_alone(storage: LocalStorage, data: dict[str, np.ndarray], step: int = 1, **more: Any) -> str:
    parts = [
        TensorPart(name, str(value.dtype), value.shape, [(Box.full(value.shape), value)])
        for name, value in data.items()
    ]
    return save_checkpoint(storage, parts, step=step, model=MODEL, state={"samples": 10 * step}, **more)


def save_rows(storage: LocalStorage, weight: np.ndarray, rows: list[int], step: int = 1) -> list[Any]:
    return on_ranks(
        len(rows),
        lambda group: save_checkpoint(
            storage, [row_part("weight", weight, group.rank, rows)], step=step, model=MODEL, state={}, group=group
        ),
    )


def test_one_rank_reads_back_what_it_wrote(storage: LocalStorage, data: dict[str, np.ndarray]) -> None:
    assert save_alone(storage, data, step=100) == "step-00000100"
    checkpoint = open_latest(storage)
    for name, value in data.items():
        read = checkpoint.read(name)
        assert (read.dtype, read.shape) == (value.dtype, value.shape)
        assert np.array_equal(read, value)
    assert (checkpoint.step, checkpoint.state, checkpoint.index.model) == (100, {"samples": 1000}, MODEL)


def test_the_files_are_plain_safetensors(storage: LocalStorage, data: dict[str, np.ndarray]) -> None:
    folder = save_alone(storage, data)
    read = load_file(storage.root / folder / "shard-00000.safetensors")
    assert set(read) == set(data)
    assert all(np.array_equal(read[name], value) for name, value in data.items())


def test_bfloat16_is_kept_as_bits(storage: LocalStorage) -> None:
    bits = np.array([[0x3F80, 0x4000], [0xFF80, 0x7FC1]], dtype=np.uint16)
    part = TensorPart("w", "bfloat16", (2, 2), [(Box.full((2, 2)), bits)])
    save_checkpoint(storage, [part], step=1, model=MODEL, state={})
    checkpoint = open_latest(storage)
    assert checkpoint.index.tensors["w"].dtype == "bfloat16"
    assert np.array_equal(checkpoint.read("w", Box((1, 0), (1, 2))), bits[1:])


@pytest.mark.parametrize("rows", [[7], [4, 3], [3, 3, 1], [0, 5, 0, 2], [7, 0]])
def test_any_layout_reads_any_uneven_row_split(storage: LocalStorage, rows: list[int]) -> None:
    weight = np.arange(35, dtype=np.float32).reshape(7, 5)
    assert set(save_rows(storage, weight, rows)) == {"step-00000001"}
    checkpoint = open_latest(storage)
    for begin in range(8):
        for count in range(8 - begin):
            box = Box((begin, 0), (count, 5))
            assert np.array_equal(checkpoint.read("weight", box), weight[begin : begin + count])
    assert np.array_equal(checkpoint.read("weight", Box((2, 1), (4, 3))), weight[2:6, 1:4])


def test_a_two_dimensional_layout_is_read_by_columns(storage: LocalStorage) -> None:
    weight = np.arange(24, dtype=np.int32).reshape(4, 6)

    def save(group: ThreadGroup) -> str:
        row, column = divmod(group.rank, 2)
        box = Box((row * 3, column * 4), ((3, 1)[row], (4, 2)[column]))
        part = TensorPart("w", "int32", (4, 6), [(box, weight[box.slices_in(Box.full((4, 6)))])])
        return save_checkpoint(storage, [part], step=1, model=MODEL, state={}, group=group)

    on_ranks(4, save)
    checkpoint = open_latest(storage)
    for column in range(6):
        assert np.array_equal(checkpoint.read("w", Box((0, column), (4, 1))), weight[:, column : column + 1])


def test_replicas_are_written_once_and_spread_over_the_ranks(storage: LocalStorage) -> None:
    values = {f"layers.{i}": np.full((2, 2), i, dtype=np.float32) for i in range(16)}

    def save(group: ThreadGroup) -> str:
        parts = [
            TensorPart(n, "float32", (2, 2), [(Box.full((2, 2)), v)], replica=group.rank, num_replicas=4)
            for n, v in values.items()
        ]
        return save_checkpoint(storage, parts, step=1, model=MODEL, state={}, group=group)

    on_ranks(4, save)
    index = open_latest(storage).index
    owners = [tensor.chunks[0].shard for tensor in index.tensors.values()]
    assert all(len(tensor.chunks) == 1 for tensor in index.tensors.values())
    assert set(owners) == {0, 1, 2, 3}


def test_the_same_box_from_two_ranks_is_indexed_once(storage: LocalStorage) -> None:
    weight = np.arange(6, dtype=np.float32).reshape(3, 2)
    part = TensorPart("w", "float32", (3, 2), [(Box.full((3, 2)), weight)])
    on_ranks(2, lambda group: save_checkpoint(storage, [part], step=1, model=MODEL, state={}, group=group))
    assert len(open_latest(storage).index.tensors["w"].chunks) == 1


def test_parts_that_do_not_cover_a_tensor_are_refused_on_every_rank(storage: LocalStorage) -> None:
    weight = np.zeros((6, 2), dtype=np.float32)
    save_alone(storage, {"weight": weight}, step=1)

    def save(group: ThreadGroup) -> str:
        part = row_part("weight", weight, group.rank, [3, 2, 1])  # the third rank is not there
        return save_checkpoint(storage, [part], step=2, model=MODEL, state={}, group=group)

    errors = on_ranks(2, save)
    assert all(isinstance(error, CheckpointError) for error in errors)
    assert "tensor 'weight' of shape (6, 2): 2 of 12 elements are in no box" in str(errors[1])
    assert storage.list_folders() == ["step-00000001"]  # the older one stays, nothing is left behind


def test_ranks_that_disagree_are_refused(storage: LocalStorage) -> None:
    def save(group: ThreadGroup) -> str:
        shape = (2 + group.rank,)
        part = TensorPart("w", "float32", shape, [(Box.full(shape), np.zeros(shape, np.float32))])
        return save_checkpoint(storage, [part], step=1, model=MODEL, state={}, group=group)

    assert "tensor 'w' is ['float32', [2]] on one rank and ['float32', [3]] on rank 1" in str(on_ranks(2, save)[0])


def test_a_rank_that_cannot_write_fails_the_save_on_all(storage: LocalStorage) -> None:
    class FullDisk(LocalStorage):
        def write_file(self, folder: str, file: str, parts: Any) -> int:
            if file == "shard-00001.safetensors":
                raise OSError(28, "No space left on device")
            return super().write_file(folder, file, parts)

    errors = save_rows(FullDisk(storage.root), np.zeros((4, 1), np.float32), [2, 2])
    assert [type(error) for error in errors] == [CheckpointError, CheckpointError]
    assert "rank 1: the disk is full (No space left on device); free some space" in str(errors[0])
    assert storage.list_folders() == []


def test_data_of_the_wrong_shape_or_dtype_is_refused(storage: LocalStorage) -> None:
    part = TensorPart("w", "float32", (2,), [(Box((0,), (2,)), np.zeros(2))])
    with pytest.raises(CheckpointError, match=r"tensor 'w' \(float32\[2\]\).* got float64\[2\]"):
        save_checkpoint(storage, [part], step=1, model=MODEL, state={})


@pytest.mark.parametrize(
    ("boxes", "reason"),
    [
        ([Box((0, 0), (2, 3))], None),
        ([Box((0, 0), (2, 1)), Box((0, 1), (2, 2))], None),
        ([Box((0, 0), (1, 3)), Box((1, 0), (1, 3)), Box((2, 0), (0, 3))], None),
        ([Box((0, 0), (1, 3))], "3 of 6 elements are in no box"),
        ([Box((0, 0), (2, 2)), Box((1, 1), (1, 2))], "overlap"),
        ([Box((0, 0), (2, 2)), Box((0, 1), (2, 1))], "overlap"),
        ([Box((1, 0), (2, 3))], "outside"),
    ],
)
def test_boxes_cover_a_tensor_exactly_or_say_why_not(boxes: list[Box], reason: str | None) -> None:
    found = cover_exactly(boxes, (2, 3))
    assert found is None if reason is None else found is not None and reason in found


def test_only_the_blocks_that_are_read_are_verified(storage: LocalStorage) -> None:
    rows = 3 * CHECKSUM_BLOCK // 4096
    weight = np.arange(rows * 1024, dtype=np.float32).reshape(rows, 1024)
    folder = save_alone(storage, {"w": weight})
    path = storage.root / folder / "shard-00000.safetensors"
    with path.open("r+b") as file:
        file.seek(-4, 2)  # in the last of three blocks
        file.write(b"\0\0\0\0")
    checkpoint = Checkpoint(storage, folder)
    assert np.array_equal(checkpoint.read("w", Box((0, 0), (1024, 1024))), weight[:1024])
    with pytest.raises(CheckpointError, match="tensor 'w'"):
        checkpoint.read("w", Box((rows - 1, 0), (1, 1024)))


# Damage ------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_steps(storage: LocalStorage) -> LocalStorage:
    """Checkpoints of steps 1 and 2, each of two ranks."""
    for step in (1, 2):
        save_rows(storage, np.full((4, 2), step, dtype=np.float32), [3, 1], step=step)
    return storage


def damage(storage: LocalStorage, file: str, how: str) -> None:
    path = storage.root / "step-00000002" / file
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(content[:-3])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "bit flipped":
        path.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    elif how == "header damaged":
        path.write_bytes(content[:9] + b"\xff" + content[10:])
    elif how == "from another save":
        path.write_bytes((storage.root / "step-00000001" / file).read_bytes())


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("missing", ["is missing", "'weight'"]),
        ("truncated", ["is damaged: expected", "'weight'"]),
        ("empty", ["got 0", "'weight'"]),
        ("bit flipped", ["tensor 'weight'", "checksum differs"]),
        ("header damaged", ["is damaged", "'weight'"]),
        ("from another save", ["belongs to another checkpoint", "'weight'"]),
    ],
)
def test_a_damaged_shard_is_named_and_the_step_before_is_taken(
    two_steps: LocalStorage, how: str, words: list[str]
) -> None:
    damage(two_steps, "shard-00001.safetensors", how)
    latest = find_latest(two_steps)
    assert latest.checkpoint is not None
    assert latest.checkpoint.step == 1
    assert len(latest.skipped) == 1
    assert "step-00000002" in latest.skipped[0]
    assert "shard-00001.safetensors" in latest.skipped[0]
    assert all(word in latest.skipped[0] for word in words)
    with pytest.raises(CheckpointError, match=r"shard-00001\.safetensors"):
        Checkpoint(two_steps, "step-00000002").read("weight")


@pytest.mark.parametrize("how", ["missing", "truncated", "empty", "bit flipped", "from another save"])
def test_a_damaged_index_is_named_and_the_step_before_is_taken(two_steps: LocalStorage, how: str) -> None:
    damage(two_steps, "index.json", how)
    latest = find_latest(two_steps)
    assert latest.checkpoint is not None
    assert latest.checkpoint.step == 1
    assert "step-00000002" in latest.skipped[0]


def test_swapped_shards_are_told_apart(storage: LocalStorage) -> None:
    save_rows(storage, np.arange(8, dtype=np.float32).reshape(4, 2), [2, 2])
    first, second = (storage.root / "step-00000001" / f"shard-0000{i}.safetensors" for i in (0, 1))
    held = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(held)
    with pytest.raises(CheckpointError, match=r"shard-00000\.safetensors (belongs to another checkpoint|is damaged)"):
        open_latest(storage)


def test_an_index_cannot_be_edited_unnoticed(two_steps: LocalStorage) -> None:
    path = two_steps.root / "step-00000002" / "index.json"
    body = json.loads(path.read_text())
    path.write_text(json.dumps(body | {"step": 3}))
    with pytest.raises(CheckpointError, match="its digest differs"):
        Checkpoint(two_steps, "step-00000002")


def test_no_sound_checkpoint_is_an_error_that_tells_what_was_tried(storage: LocalStorage) -> None:
    with pytest.raises(CheckpointError, match="has no sound checkpoint"):
        open_latest(storage)
    save_alone(storage, {"w": np.ones(2, np.float32)})
    (storage.root / "step-00000001" / "shard-00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"(?s)has no sound checkpoint.*shard-00000\.safetensors is missing"):
        open_latest(storage)


# What fits ---------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_model_is_refused(two_steps: LocalStorage) -> None:
    checkpoint = open_latest(two_steps)
    checkpoint.check_model({"hidden_size": 8, "name": "tiny"})
    with pytest.raises(CheckpointError, match="of another model: hidden_size is 8 there and 16 here"):
        checkpoint.check_model(MODEL | {"hidden_size": 16})


def test_options_that_came_after_a_checkpoint_have_their_defaults_there(two_steps: LocalStorage) -> None:
    checkpoint = open_latest(two_steps)
    defaults = {"hidden_size": 1, "bias": False, "lora": {"rank": None}}
    checkpoint.check_model(MODEL | {"bias": False, "lora": {"rank": None}}, defaults)
    with pytest.raises(CheckpointError, match="of another model: bias is False there and True here"):
        checkpoint.check_model(MODEL | {"bias": True, "lora": {"rank": None}}, defaults)
    with pytest.raises(CheckpointError, match="of another model: bias is None there and False here"):
        checkpoint.check_model(MODEL | {"bias": False})


def test_tensors_that_do_not_fit_are_all_listed(two_steps: LocalStorage) -> None:
    checkpoint = open_latest(two_steps)
    checkpoint.check_tensors({"weight": (4, 2)})
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check_tensors({"bias": (4,)})
    assert "tensor 'bias' is missing; tensor 'weight' is not expected" in str(caught.value)
    with pytest.raises(CheckpointError, match=r"'weight' has shape \(4, 2\), expected \(2, 4\)"):
        checkpoint.check_tensors({"weight": (2, 4)})


def test_a_tensor_or_box_that_is_not_there_is_refused(two_steps: LocalStorage) -> None:
    checkpoint = open_latest(two_steps)
    with pytest.raises(CheckpointError, match="has no tensor 'x'"):
        checkpoint.read("x")
    with pytest.raises(CheckpointError, match="is outside tensor 'weight'"):
        checkpoint.read("weight", Box((2, 0), (3, 2)))


# Names and retention -----------------------------------------------------------------------------------------


def test_a_step_saved_again_takes_precedence_without_overwriting(storage: LocalStorage) -> None:
    save_alone(storage, {"w": np.zeros(2, np.float32)}, step=5)
    assert save_alone(storage, {"w": np.ones(2, np.float32)}, step=5) == "step-00000005-2"
    assert list_checkpoints(storage) == ["step-00000005-2", "step-00000005"]
    assert open_latest(storage).read("w").tolist() == [1, 1]


def test_retention_keeps_the_newest_steps(storage: LocalStorage) -> None:
    for step in (1, 2, 3, 4):
        save_alone(storage, {"w": np.full(2, step, np.float32)}, step=step, keep=2)
    assert list_checkpoints(storage) == ["step-00000004", "step-00000003"]


def test_retention_never_deletes_the_last_sound_checkpoint(storage: LocalStorage) -> None:
    for step in (1, 2, 3):
        save_alone(storage, {"w": np.full(2, step, np.float32)}, step=step)
    for step in (2, 3):
        (storage.root / f"step-0000000{step}" / "shard-00000.safetensors").write_bytes(b"")
    assert prune(storage, 1) == []
    assert open_latest(storage).step == 1
    save_alone(storage, {"w": np.full(2, 4, np.float32)}, step=4, keep=1)
    assert list_checkpoints(storage) == ["step-00000004"]


def test_leftovers_of_killed_saves_are_swept_by_the_next_one(storage: LocalStorage) -> None:
    ended = writer_name().rpartition("-")[0]
    elsewhere = "step-00000003.incomplete-0a1b2c3d-17-4242-aa"
    for name in (f"step-00000003.incomplete-{ended}-1-aa", "step-00000001.deleted-bb", "other", elsewhere):
        storage.create_folder(name)
    save_alone(storage, {"w": np.ones(1, np.float32)}, step=4)
    assert sorted(storage.list_folders()) == ["other", elsewhere, "step-00000004"]
    # Whether its writer still runs is known to the job with the run's lock alone.
    delete_leftovers(storage, of_other_machines=True)
    assert sorted(storage.list_folders()) == ["other", "step-00000004"]


def test_saves_into_one_folder_at_the_same_time_are_all_published(storage: LocalStorage) -> None:
    def start(step: int, value: float) -> PendingSave:
        part = TensorPart("w", "float32", (2,), [(Box.full((2,)), np.full(2, value, np.float32))])
        return PendingSave(storage, [part], step=step, model={}, state={}, background=False)

    first, second, third = start(1, 1.0), start(1, 2.0), start(2, 3.0)
    delete_leftovers(storage, of_other_machines=True)
    assert [save.publish() for save in (third, first, second)] == ["step-00000002", "step-00000001", "step-00000001-2"]
    assert [Checkpoint(storage, name).read("w")[0] for name in list_checkpoints(storage)] == [3.0, 2.0, 1.0]


def test_retention_does_not_delete_a_best_checkpoint_that_cannot_be_read(storage: LocalStorage, monkeypatch) -> None:
    for step, loss in ((1, 0.5), (2, 0.7), (3, 0.9)):
        part = TensorPart("w", "float32", (2,), [(Box.full((2,)), np.ones(2, np.float32))])
        save_checkpoint(storage, [part], step=step, model={}, state={"evaluation_loss": loss})
    size = storage.file_size

    def failing(folder: str, file: str) -> int | None:
        if folder == "step-00000001":
            raise PermissionError(13, "Permission denied", folder)
        return size(folder, file)

    monkeypatch.setattr(storage, "file_size", failing)
    monkeypatch.setattr(catalog, "_PAUSE_SECONDS", 0.0)
    assert prune(storage, 1, keep_best=1) == []
    with pytest.raises(PermissionError):
        find_latest(storage, before="step-00000002")


def test_a_name_and_an_old_checkpoint_may_be_taken_meanwhile(storage: LocalStorage, monkeypatch) -> None:
    """Between the listing of the folder and the rename, or the deletion, another process does the same."""
    save_alone(storage, {"w": np.ones(1, np.float32)}, step=1)
    (storage.root / "step-00000002" / "inner").mkdir(parents=True)
    listed, looked = storage.list_folders, []

    def outdated() -> list[str]:
        looked.append(None)
        return [name for name in listed() if name != "step-00000002" or len(looked) > 2]

    monkeypatch.setattr(storage, "list_folders", outdated)
    assert save_alone(storage, {"w": np.ones(1, np.float32)}, step=2) == "step-00000002-2"
    monkeypatch.setattr(storage, "list_folders", lambda: [*listed(), "step-00000000"])
    assert prune(storage, 1) == ["step-00000002", "step-00000001", "step-00000000"]


def test_a_file_in_the_place_of_a_checkpoint_is_named(storage: LocalStorage) -> None:
    storage.root.mkdir(parents=True)
    (storage.root / "step-00000001").write_text("mine")
    with pytest.raises(CheckpointError, match=r"step-00000001 is taken, but not by a folder; move it away"):
        save_alone(storage, {"w": np.ones(1, np.float32)}, step=1)


# Indices that are complete and wrong: someone wrote them so --------------------------------------------------------


def forge(storage: LocalStorage, folder: str, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Change the values of an index and give it the digest that fits."""
    file = storage.root / folder / "index.json"
    body = json.loads(file.read_text())
    del body["sha256"]
    body = change(body) or body
    digest = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    file.write_text(json.dumps(body | {"sha256": digest}))
    return file


def weight_chunk(body: dict[str, Any]) -> dict[str, Any]:
    return body["tensors"]["weight"]["chunks"][0]


FORGERIES = {
    "no step": (lambda body: body.pop("step") and None, "step: missing"),
    "step as text": (lambda body: body.update(step="2"), "step: expected a valid integer, got '2'"),
    "step below 0": (lambda body: body.update(step=-1), "step: expected greater than or equal to 0, got -1"),
    "step too large": (lambda body: body.update(step=2**70), "step: expected less than 9223372036854775808"),
    "tensors as list": (lambda body: body.update(tensors=[]), "tensors: expected an object, got []"),
    "no state": (lambda body: body.pop("state") and None, "state: missing"),
    "size as text": (lambda body: body.update(shard_bytes=["9"]), "shard_bytes.0: expected a valid integer"),
    "no tensor": (lambda body: body["tensors"].update(weight=None), "tensors.weight: expected an object"),
    "dtype": (lambda body: body["tensors"]["weight"].update(dtype="f4"), "tensors.weight.dtype: dtype 'f4' cannot be"),
    "shard as path": (
        lambda body: weight_chunk(body).update(shard="../../x"),
        "chunks.0.shard: expected a valid integer",
    ),
    "shard elsewhere": (lambda body: weight_chunk(body).update(shard=7), "chunks[0].shard: expected a number below 2"),
    "short offset": (lambda body: weight_chunk(body).update(offset=[0]), "got 1 offsets, 2 sizes"),
    "no checksums": (lambda body: weight_chunk(body).update(crc32=[]), "and 1 checksums, got 2 offsets, 2 sizes and 0"),
    "key": (lambda body: weight_chunk(body).update(key=3), "chunks.0.key: expected a valid string, got 3"),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_an_index_that_is_not_of_the_format_is_named_and_the_step_before_is_taken(
    two_steps: LocalStorage, forgery: str
) -> None:
    change, message = FORGERIES[forgery]
    file = forge(two_steps, "step-00000002", change)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(two_steps, "step-00000002")
    assert str(caught.value).startswith(f"{file} is damaged: ")
    assert message in str(caught.value)
    assert open_latest(two_steps).step == 1


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b'{"sha256": "\xff"}', b"\xff\xfe\x00", b"[]", b"3", b""], ids=lambda c: repr(c[:12])
)
def test_a_file_that_is_no_index_is_named_and_the_step_before_is_taken(two_steps: LocalStorage, content: bytes) -> None:
    file = two_steps.root / "step-00000002" / "index.json"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged: it is not a valid index"):
        Checkpoint(two_steps, "step-00000002")
    assert open_latest(two_steps).step == 1


def test_a_newer_format_asks_for_an_upgrade(two_steps: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = open_latest(two_steps)
    monkeypatch.setattr(index, "FORMAT", 2)
    text = newest.index.dump()
    monkeypatch.undo()
    (two_steps.root / newest.folder / "index.json").write_text(text)
    (message,) = find_latest(two_steps).skipped
    assert message.endswith("has format 2; this version of hp-trainer reads format 1: upgrade hp-trainer")


def test_a_folder_named_after_another_step_is_passed_over(two_steps: LocalStorage) -> None:
    (two_steps.root / "step-00000002").rename(two_steps.root / "step-00000009")
    found = find_latest(two_steps)
    assert found.checkpoint is not None
    assert found.checkpoint.step == 1
    assert "is of step 2, but its folder is named after step 9; rename the folder" in found.skipped[0]


def test_a_place_shorter_than_its_array_is_damage(storage: LocalStorage) -> None:
    data = np.arange(6, dtype=np.float32)
    parts = [TensorPart(name, "float32", (6,), [(Box((0,), (6,)), data)]) for name in ("first", "second")]
    save_checkpoint(storage, parts, step=1, model=MODEL, state={})
    shard = storage.root / "step-00000001" / "shard-00000.safetensors"
    content = shard.read_bytes()
    # No row of it, so that no checksum would be compared; the header keeps its length.
    assert content.count(b'"data_offsets":[0,24]') == 1
    shard.write_bytes(content.replace(b'"data_offsets":[0,24]', b'"data_offsets":[0, 1]'))
    message = f"{shard.name}: tensor 'first' .*: expected 24 bytes, got 1"
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(storage, "step-00000001").verify()
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(storage, "step-00000001").read("first")


def test_a_header_with_an_infinite_size_is_damage() -> None:
    text = b'{"a":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,4]}}'
    file = np.frombuffer(len(text).to_bytes(8, "little") + text + bytes(4), dtype=np.uint8)
    with pytest.raises(CheckpointError, match="a shard is damaged: its header cannot be read"):
        read_header(file, "a shard", 1000)


def test_a_header_of_many_megabytes_is_refused_before_it_is_read(two_steps: LocalStorage) -> None:
    shard = two_steps.root / "step-00000002" / "shard-00000.safetensors"
    data = shard.read_bytes()
    text = b'{"a":' + b" " * 2**20 + b"0}"
    forged = len(text).to_bytes(8, "little") + text + data
    shard.write_bytes(forged)
    forge(two_steps, "step-00000002", lambda body: body["shard_bytes"].__setitem__(0, len(forged)))
    with pytest.raises(CheckpointError, match=f"{shard.name} is damaged: it states a header of {len(text)} bytes"):
        Checkpoint(two_steps, "step-00000002").verify()


def test_an_empty_box_that_no_save_writes_is_no_error(storage: LocalStorage) -> None:
    weight = np.ones((3, 2), np.float32)
    parts = [TensorPart("weight", "float32", (3, 2), [(Box.full((3, 2)), weight)])]
    save_checkpoint(storage, parts, step=1, model=MODEL, state={})
    shard = storage.root / "step-00000001" / "shard-00000.safetensors"
    metadata = read_header(np.fromfile(shard, np.uint8), "shard", 1000).metadata
    entries = [Entry("weight", "float32", weight), Entry("weight@3,0", "float32", weight[:0])]
    shard.write_bytes(b"".join(map(bytes, file_parts(entries, metadata))))
    empty = {"shard": 0, "key": "weight@3,0", "offset": [3, 0], "shape": [0, 2], "crc32": []}

    def change(body: dict[str, Any]) -> None:
        body["shard_bytes"] = [shard.stat().st_size]
        body["tensors"]["weight"]["chunks"].append(empty)

    forge(storage, "step-00000001", change)
    checkpoint = Checkpoint(storage, "step-00000001")
    checkpoint.verify()
    np.testing.assert_array_equal(checkpoint.read("weight"), weight)


@pytest.mark.parametrize("leads", ["to a checkpoint", "nowhere", "to itself"])
def test_a_linked_step_folder_neither_hides_nor_blocks_a_save(
    storage: LocalStorage, data: dict[str, np.ndarray], tmp_path: Path, leads: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    save_alone(storage, data, step=5)
    (storage.root / "step-00000005").rename(elsewhere)
    ends = {"to a checkpoint": elsewhere, "nowhere": tmp_path / "missing", "to itself": "step-00000005"}
    (storage.root / "step-00000005").symlink_to(ends[leads])
    if leads == "to a checkpoint":
        assert open_latest(storage).step == 5
    assert save_alone(storage, data, step=5) == "step-00000005-2"
    assert save_alone(storage, data, step=6, keep=1) == "step-00000006"
    assert list_checkpoints(storage) == ["step-00000006"]
    assert (elsewhere / "index.json").is_file(), "what a link leads to is not ours to delete"


# Code of others that leaves ----------------------------------------------------------------------------------


class LeavingStorage(LocalStorage):
    """A storage of someone who calls `sys.exit`."""

    def write_file(self, folder, file, parts):
        if file == "shard-00001.safetensors":
            sys.exit(0)
        return super().write_file(folder, file, parts)


def test_the_line_of_an_exit_is_found_where_sys_exit_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb replaces it."""

    def replaced(code: int = 0) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(sys, "exit", replaced)
    with pytest.raises(SystemExit) as caught:
        sys.exit(0)
    line = caught.tb.tb_lineno
    assert describe_exit(caught.value, "here").startswith(f"left with SystemExit(0) here, called at {__file__}:{line};")


@pytest.mark.parametrize("background", [False, True])
def test_a_storage_that_calls_sys_exit_fails_the_save_on_all_ranks(tmp_path: Path, background: bool) -> None:
    weight = np.arange(8, dtype=np.float32).reshape(4, 2)
    answers = on_ranks(
        2,
        lambda group: PendingSave(
            LeavingStorage(tmp_path),
            [row_part("weight", weight, group.rank, [2, 2])],
            step=1,
            model=MODEL,
            state={},
            group=group,
            background=background,
        ).publish(),
    )
    for answer in answers:
        assert isinstance(answer, CheckpointError)
        assert re.search(rf"rank 1: .*left with SystemExit\(0\) while writing.*, called at {__file__}:\d+", str(answer))
    assert find_latest(LocalStorage(tmp_path)).checkpoint is None
