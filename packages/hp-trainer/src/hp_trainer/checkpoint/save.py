"""Write a checkpoint: every rank writes its shard file, then the coordinator writes the index and renames the folder.

In the background (`PendingSave`), tensors are copied to host memory and a thread writes them. The thread never
communicates, so the order of collectives is that of the main thread alone.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hp_trainer._coordination import Alone, Group, all_ranks, coordinator
from hp_trainer.checkpoint.catalog import delete_leftovers, free_name, incomplete_name, prune
from hp_trainer.checkpoint.index import INDEX_FILE, Chunk, Index, SavedTensor, shard_name, step_name
from hp_trainer.checkpoint.shard_file import Box, Entry, checksums, cover_exactly, file_parts, storage_dtype
from hp_trainer.checkpoint.storage import Storage
from hp_trainer.exceptions import CheckpointError, describe_exit

# Names that other processes may take, one after the other, before a save is published.
_ATTEMPTS = 100
_ABANDON_SECONDS = 10.0


@dataclass(frozen=True)
class TensorPart:
    """The boxes of a tensor that a rank holds.

    Attributes:
        name: dotted name, the same on every rank.
        dtype: name of the dtype, such as `bfloat16`.
        shape: global shape.
        boxes: boxes of this rank with their elements, in the NumPy dtype of the same name (uint16 for bfloat16).
        replica: index of this rank among the ranks that hold the same boxes.
        num_replicas: number of ranks that hold the same boxes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: Sequence[tuple[Box, np.ndarray]]
    replica: int = 0
    num_replicas: int = 1

    @property
    def is_writer(self) -> bool:
        """True on the replica that writes this tensor. A hash of the name chooses it, which spreads the writing."""
        # Not `hash`, which differs between processes: all ranks must agree on the writer.
        return zlib.crc32(self.name.encode()) % self.num_replicas == self.replica


def save_checkpoint(storage: Storage, tensors: Iterable[TensorPart], **options: Any) -> str:
    """Write a checkpoint and return the name of its folder. Every rank of `group` must call this.

    Args:
        options: further arguments of `PendingSave`, except `background`.

    Raises:
        CheckpointError: on every rank when any rank failed. Earlier checkpoints are untouched.
    """
    return PendingSave(storage, tensors, **options, background=False).publish()


class PendingSave:
    """A save in progress on every rank of a group. It starts with the constructor and is complete after `publish`.

    Args:
        storage: storage to write to.
        tensors: boxes that this rank holds. Names, shapes and dtypes must agree between ranks.
        step: number of completed optimizer steps.
        model: name and options of the model as JSON values, the same on every rank.
        state: state of the trainer as JSON values, the same on every rank.
        group: ranks that write the checkpoint together; by default, this rank alone.
        keep: after the save, delete all but the newest `keep` sound checkpoints. None deletes none.
        keep_best: additional number of older checkpoints to keep: those with the lowest `evaluation_loss` in their
            state.
        may_write: called by the coordinator before it creates, publishes or deletes anything. It raises where another
            job has taken over the run.
        background: True to copy the tensors to host memory now and write them in a thread, so that they may change
            meanwhile. False to write them in `publish`.

    Raises:
        CheckpointError: on every rank when the coordinator could not create the folder.
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
        self._thread: threading.Thread | None = None
        self._folder = incomplete_name(self._step)
        try:
            # One rank creates the folder and the others learn its name, so that all write into the same one.
            self._folder = coordinator(self._group, "creating a checkpoint", self._create_folder, CheckpointError)
        except Exception:
            self.abandon()
            raise
        self._save_id = self._folder.rpartition("-")[2]
        self._written: dict[str, Any] | None = None
        self._failure: Exception | None = None
        self._thread = self._start_thread() if background else None

    def is_written(self) -> bool:
        """Return True when every rank has written its shard, so that `publish` does not block. A collective call."""
        # All ranks must agree, because `publish` is a collective call.
        done = self._thread is None or not self._thread.is_alive()
        return all(flag == b"1" for flag in self._group.all_gather_bytes(b"1" if done else b"0"))

    def publish(self) -> str:
        """Wait for all shards, publish the checkpoint under its name, delete old ones, and return the name.

        Raises:
            CheckpointError: on every rank when any rank failed. Earlier checkpoints are untouched.
        """
        group = self._group
        try:
            # Only entries of the index are gathered, not data. An error on one rank is raised on all.
            shards = all_ranks(group, "writing a checkpoint", self._finish, CheckpointError)

            def publish() -> str:
                self._may_write()
                index = _build_index(shards, self._step, self._save_id, self._model, self._state)
                # The index is written after all shards, and the folder renamed after the index. A save killed at any
                # moment leaves a complete checkpoint or a folder that no search takes for one.
                self._storage.write_file(self._folder, INDEX_FILE, [index.dump().encode()])
                for _ in range(_ATTEMPTS):
                    name = free_name(self._storage, step_name(index.step))
                    # Another process may have just published the same step.
                    with contextlib.suppress(FileExistsError):
                        self._storage.rename_folder(self._folder, name)
                        return name
                raise CheckpointError(f"{self._storage.describe(name)} is taken, but not by a folder; move it away")

            name: str = coordinator(group, "publishing a checkpoint", publish, CheckpointError)
        except Exception:
            # Also where a rank has died, since the others may go on and save again.
            self.abandon()
            raise
        # Old checkpoints are deleted only after the new one is published.
        if group.rank == 0 and self._keep is not None:
            prune(self._storage, self._keep, self._keep_best)
        return name

    def abandon(self) -> None:
        """Delete what has been written of a checkpoint that will not be published. Not a collective call."""
        if self._thread is not None:
            # A hanging file system must not keep a failed process alive.
            self._thread.join(_ABANDON_SECONDS)
        if self._group.rank == 0:
            # Only our folder: other incomplete ones may belong to another job by now. A failing disk may refuse.
            with contextlib.suppress(OSError):
                self._storage.delete_folder(self._folder)

    def _create_folder(self) -> str:
        self._may_write()
        delete_leftovers(self._storage)
        self._storage.create_folder(self._folder)
        return self._folder

    def _start_thread(self) -> threading.Thread:
        """Copy the tensors and start the thread that writes them. A failure is raised on all ranks by `publish`."""
        try:
            # Copied, since training changes the tensors; without elements that another replica writes.
            self._tensors = [
                replace(part, boxes=[(box, data.copy()) for box, data in part.boxes] if part.is_writer else [])
                for part in self._tensors
            ]
        except Exception as error:
            self._failure = error
            self._tensors = []
        # A daemon, so that a hanging file system does not keep a failed process alive.
        thread = threading.Thread(target=self._write_in_thread, name="checkpoint", daemon=True)
        thread.start()
        return thread

    def _write_in_thread(self) -> None:
        try:
            if self._failure is None:
                self._written = self._write()
        except SystemExit as leaving:
            # A thread ends silently on SystemExit; here it must fail the save.
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


def _write_shard(
    storage: Storage, folder: str, save_id: str, rank: int, tensors: Iterable[TensorPart]
) -> dict[str, Any]:
    """Write the shard file of this rank, and return its entries of the index as JSON values for the coordinator."""
    parts = list(tensors)
    entries = [(part, box, entry) for part in parts if part.is_writer for box, entry in _entries(part)]
    metadata = {"format": "pt", "hp_save": save_id, "hp_rank": str(rank)}
    size = storage.write_file(folder, shard_name(rank), file_parts([entry for _, _, entry in entries], metadata))
    chunks = [[part.name, entry.key, box.offset, box.shape, checksums(entry.data)] for part, box, entry in entries]
    # Of all tensors, also those that other replicas write, so that disagreements are found.
    kinds = {part.name: [part.dtype, list(part.shape)] for part in parts}
    return {"bytes": size, "tensors": kinds, "chunks": chunks}


def _entries(part: TensorPart) -> Iterator[tuple[Box, Entry]]:
    expected = storage_dtype(part.dtype)
    for box, data in part.boxes:
        if data.shape != box.shape or data.dtype != expected or not box.is_inside(part.shape):
            raise CheckpointError(
                f"tensor {part.name!r} ({part.dtype}{list(part.shape)}): {box}: expected {expected}{list(box.shape)} "
                f"within the tensor, got {data.dtype}{list(data.shape)}"
            )
        # Ranks with an empty shard contribute nothing to the file.
        if box.numel:
            # The key of a full tensor is its name, so one-rank checkpoints are plain safetensors files.
            place = "" if box.shape == part.shape else f"@{','.join(map(str, box.offset))}"
            yield box, Entry(f"{part.name}{place}", part.dtype, np.ascontiguousarray(data).reshape(box.shape))


def _build_index(
    shards: Sequence[dict[str, Any]], step: int, save_id: str, model: Mapping[str, Any], state: Mapping[str, Any]
) -> Index:
    """Combine the entries of all ranks into the index."""
    kinds, problems = _agreed_kinds(shards)
    chunks: dict[str, dict[Box, Chunk]] = {name: {} for name in kinds}
    for rank, shard in enumerate(shards):
        for name, key, offset, shape, sums in shard["chunks"]:
            box = Box(tuple(offset), tuple(shape))
            # Replicas may write the same box; the first one counts.
            chunks[name].setdefault(box, Chunk(rank, key, box.offset, box.shape, tuple(sums)))
    for name, (_, shape) in kinds.items():
        reason = cover_exactly(list(chunks[name]), shape)
        if reason is not None:
            problems.append(f"tensor {name!r} of shape {tuple(shape)}: {reason}")
    if problems:
        raise CheckpointError("the ranks' shards do not form a complete checkpoint: " + "; ".join(problems))
    return Index(
        step=step,
        save_id=save_id,
        shard_bytes=tuple(shard["bytes"] for shard in shards),
        tensors={
            name: SavedTensor(dtype, tuple(shape), tuple(chunks[name].values()))
            for name, (dtype, shape) in kinds.items()
        },
        model=dict(model),
        state=dict(state),
    )


def _agreed_kinds(shards: Sequence[dict[str, Any]]) -> tuple[dict[str, list[Any]], list[str]]:
    """Return dtype and shape of each tensor, and a message for each on which ranks disagree."""
    kinds: dict[str, list[Any]] = {}
    problems = []
    for rank, shard in enumerate(shards):
        for name, kind in shard["tensors"].items():
            # The first rank that has a tensor determines what the others must agree with.
            if kinds.setdefault(name, kind) != kind:
                problems.append(f"tensor {name!r} is {kinds[name]} on one rank and {kind} on rank {rank}")
    return kinds, problems
