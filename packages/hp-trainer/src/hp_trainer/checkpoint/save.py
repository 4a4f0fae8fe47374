"""Writing a checkpoint: every rank its shard, then the coordinator the index and the name."""

from __future__ import annotations

import contextlib
import secrets
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hp_trainer._exchange import Alone, Group, all_ranks, coordinator
from hp_trainer.checkpoint.catalog import INCOMPLETE, delete_leftovers, free_name, prune
from hp_trainer.checkpoint.dtypes import storage_dtype
from hp_trainer.checkpoint.index import INDEX_FILE, Chunk, Index, SavedTensor, shard_name
from hp_trainer.checkpoint.names import step_name
from hp_trainer.checkpoint.shard_file import Entry, checksums, file_parts
from hp_trainer.checkpoint.storage import Storage
from hp_trainer.checkpoint.tensor_box import Box, cover_exactly
from hp_trainer.early_exits import describe_exit
from hp_trainer.exceptions import CheckpointError


@dataclass(frozen=True)
class TensorPart:
    """A rank's part of a tensor.

    Attributes:
        name: dotted name, the same on every rank.
        dtype: name such as `bfloat16`.
        shape: the global shape.
        boxes: the boxes held, each with its elements (`numpy` dtype of the same name; uint16 for bfloat16).
        replica, num_replicas: of the ranks that hold the same boxes, which one this is, and how many they are.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: Sequence[tuple[Box, np.ndarray]]
    replica: int = 0
    num_replicas: int = 1

    @property
    def is_writer(self) -> bool:
        """Tell whether this rank writes for its replicas; the tensor's name decides, without communication."""
        return zlib.crc32(self.name.encode()) % self.num_replicas == self.replica


def save_checkpoint(
    storage: Storage,
    tensors: Iterable[TensorPart],
    *,
    step: int,
    model: Mapping[str, Any],
    state: Mapping[str, Any],
    group: Group | None = None,
    keep: int | None = None,
    keep_best: int = 0,
    may_write: Callable[[], None] = lambda: None,
) -> str:
    """Write a checkpoint; called by every rank of `group` (default: this one alone). Returns its folder's name.

    Args:
        storage: where to.
        tensors: what this rank holds; the names, shapes and dtypes agree over ranks.
        step: optimizer steps done.
        model: name and options of the model (JSON values), the same on every rank.
        state: the trainer's own (JSON values), the same on every rank.
        keep: then delete all but so many of the newest sound checkpoints; None: keep all.
        keep_best: keep so many more: those of the lowest `evaluation_loss` in their state.
        may_write: called by the coordinator before it begins, publishes or deletes anything; raises where another job
            has taken the run over.

    Raises:
        CheckpointError: on every rank when any failed; earlier checkpoints are untouched.
    """
    save = PendingSave(
        storage,
        tensors,
        step=step,
        model=model,
        state=state,
        group=group,
        keep=keep,
        keep_best=keep_best,
        may_write=may_write,
        background=False,
    )
    return save.publish()


class PendingSave:
    """A checkpoint under way on every rank of a group: begun when this is made, complete after `publish`.

    Arguments are those of `save_checkpoint`.

    Args:
        background: copy the tensors to host memory now and write them in a thread, which nothing that changes them
            later reaches; False: write them in `publish`.

    Raises:
        CheckpointError: on every rank when the coordinator could not begin.
    """

    def __init__(
        self,
        storage: Storage,
        tensors: Iterable[TensorPart],
        *,
        step: int,
        model: Mapping[str, Any],
        state: Mapping[str, Any],
        group: Group | None = None,
        keep: int | None = None,
        keep_best: int = 0,
        may_write: Callable[[], None] = lambda: None,
        background: bool,
    ) -> None:
        self._storage, self._tensors, self._step = storage, tensors, step
        self._model, self._state, self._keep, self._keep_best = model, state, keep, keep_best
        self._group: Group = group if group is not None else Alone()
        self._may_write = may_write
        self._save_id: str = coordinator(self._group, "beginning a checkpoint", self._begin, CheckpointError)
        self._folder = f"{step_name(step)}{INCOMPLETE}{self._save_id}"
        self._written: dict[str, Any] | None = None
        self._failure: Exception | None = None
        self._thread = self._start() if background else None

    def is_written(self) -> bool:
        """Return whether every rank has written its part, so that `publish` need not wait; called by all of them."""
        done = self._thread is None or not self._thread.is_alive()
        return all(flag == b"1" for flag in self._group.all_gather_bytes(b"1" if done else b"0"))

    def publish(self) -> str:
        """Wait for all parts, give the checkpoint its name and delete those that are too many; returns the name.

        Raises:
            CheckpointError: on every rank when any failed; earlier checkpoints are untouched.
        """
        group = self._group
        try:
            shards = all_ranks(group, "writing a checkpoint", self._finish, CheckpointError)

            def publish() -> str:
                self._may_write()
                index = _merge(shards, self._step, self._save_id, self._model, self._state)
                return _publish(self._storage, self._folder, index)

            name: str = coordinator(group, "publishing a checkpoint", publish, CheckpointError)
        except CheckpointError:
            if group.rank == 0:
                # Its own alone: what else is incomplete may be another job's by now. A failing disk may refuse this.
                with contextlib.suppress(OSError):
                    self._storage.delete_folder(self._folder)
            raise
        # Older ones go only now that the new one has its name.
        if group.rank == 0 and self._keep is not None:
            prune(self._storage, self._keep, self._keep_best)
        return name

    def _begin(self) -> str:
        self._may_write()
        return _begin(self._storage, self._step)

    def _start(self) -> threading.Thread:
        """Copy the tensors and begin to write them. A failure is kept: all ranks hear of it in `publish`."""
        try:
            self._tensors = [_copied(part) for part in self._tensors]
        except Exception as error:
            self._failure = error
            self._tensors = []
        thread = threading.Thread(target=self._write_and_keep_failure, name="checkpoint", daemon=True)
        thread.start()
        return thread

    def _write_and_keep_failure(self) -> None:
        try:
            if self._failure is None:
                self._written = self._write()
        except SystemExit as leaving:
            # A thread would end without a word.
            self._failure = CheckpointError(describe_exit(leaving, "while writing"))
        except Exception as error:
            self._failure = error
        finally:
            self._tensors = []

    def _write(self) -> dict[str, Any]:
        return _write_shard(self._storage, self._folder, self._save_id, self._group.rank, self._tensors)

    def _finish(self) -> dict[str, Any]:
        if self._thread is None:
            return self._write()
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        assert self._written is not None
        return self._written


def _copied(part: TensorPart) -> TensorPart:
    """Return a part with elements of its own; none where another rank writes them."""
    return replace(part, boxes=[(box, data.copy()) for box, data in part.boxes] if part.is_writer else [])


def _begin(storage: Storage, step: int) -> str:
    delete_leftovers(storage)
    save_id = secrets.token_hex(4)
    storage.create_folder(f"{step_name(step)}{INCOMPLETE}{save_id}")
    return save_id


def _write_shard(
    storage: Storage, folder: str, save_id: str, rank: int, tensors: Iterable[TensorPart]
) -> dict[str, Any]:
    """Write this rank's file; returns what the coordinator must know of it."""
    parts = list(tensors)
    entries = [(part, box, entry) for part in parts if part.is_writer for box, entry in _entries(part)]
    metadata = {"format": "pt", "hp_save": save_id, "hp_rank": str(rank)}
    size = storage.write_file(folder, shard_name(rank), file_parts([entry for _, _, entry in entries], metadata))
    chunks = [[part.name, entry.key, box.offset, box.shape, checksums(entry.data)] for part, box, entry in entries]
    known = {part.name: [part.dtype, list(part.shape)] for part in parts}
    return {"bytes": size, "tensors": known, "chunks": chunks}


def _entries(part: TensorPart) -> Iterator[tuple[Box, Entry]]:
    expected = storage_dtype(part.dtype)
    for box, data in part.boxes:
        if data.shape != box.shape or data.dtype != expected or not box.is_inside(part.shape):
            raise CheckpointError(
                f"tensor {part.name!r} ({part.dtype}{list(part.shape)}): {box} came with {data.dtype}"
                f"{list(data.shape)}; expected {expected}{list(box.shape)} within the tensor"
            )
        if box.numel:
            yield box, Entry(_key(part, box), part.dtype, np.ascontiguousarray(data).reshape(box.shape))


def _key(part: TensorPart, box: Box) -> str:
    """Return a box's key: of a whole tensor its name, so that one-rank checkpoints are plain safetensors."""
    if box.shape == part.shape:
        return part.name
    return f"{part.name}@{','.join(str(begin) for begin in box.offset)}"


def _merge(
    shards: Sequence[dict[str, Any]], step: int, save_id: str, model: Mapping[str, Any], state: Mapping[str, Any]
) -> Index:
    """Return the index of what the ranks wrote.

    Raises:
        CheckpointError: ranks disagree about a tensor, or their boxes do not cover it; lists all of them.
    """
    kinds, problems = _agreed_kinds(shards)
    chunks: dict[str, dict[Box, Chunk]] = {name: {} for name in kinds}
    for rank, shard in enumerate(shards):
        for name, key, offset, shape, sums in shard["chunks"]:
            box = Box(tuple(offset), tuple(shape))
            chunks[name].setdefault(box, Chunk(rank, key, box, tuple(sums)))
    for name, (_, shape) in kinds.items():
        reason = cover_exactly(list(chunks[name]), shape)
        if reason is not None:
            problems.append(f"tensor {name!r} of shape {tuple(shape)}: {reason}")
    if problems:
        raise CheckpointError("the ranks' parts make no whole checkpoint: " + "; ".join(problems))
    return Index(
        step=step,
        save_id=save_id,
        shard_bytes=tuple(shard["bytes"] for shard in shards),
        tensors={
            name: SavedTensor(dtype, tuple(shape), tuple(chunks[name].values()))
            for name, (dtype, shape) in kinds.items()
        },
        model=model,
        state=state,
    )


def _agreed_kinds(shards: Sequence[dict[str, Any]]) -> tuple[dict[str, list[Any]], list[str]]:
    kinds: dict[str, list[Any]] = {}
    problems = []
    for rank, shard in enumerate(shards):
        for name, kind in shard["tensors"].items():
            if kinds.setdefault(name, kind) != kind:
                problems.append(f"tensor {name!r} is {kinds[name]} on one rank and {kind} on rank {rank}")
    return kinds, problems


def _publish(storage: Storage, folder: str, index: Index) -> str:
    # The index comes last and the name after it: killed at any moment, a save leaves a whole checkpoint or a folder
    # that nothing takes for one.
    storage.write_file(folder, INDEX_FILE, [index.dump().encode()])
    name = free_name(storage, step_name(index.step))
    storage.rename_folder(folder, name)
    return name
