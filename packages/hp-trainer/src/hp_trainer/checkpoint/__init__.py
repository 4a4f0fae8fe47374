"""Sharded checkpoints: safetensors files and a JSON index, read by any layout and by either framework.

    checkpoints/
      step-00000100/
        shard-00000.safetensors     the boxes that rank 0 wrote
        shard-00001.safetensors
        index.json                  per tensor: dtype, global shape, and its boxes with file, key and checksums;
                                    the trainer's state, the model, and the size of every file
      step-00000200.incomplete-3f9a1c20/     a save in progress, or one that was killed

A tensor is saved as a set of boxes: an offset and a shape within the global tensor. Loading intersects the requested
box with the saved ones, so any layout reads a checkpoint of any other and reads only the bytes it needs. Nothing in a
checkpoint is executable.

A checkpoint is complete or absent. Ranks write into a folder with an `.incomplete-` name and force it to disk; the
coordinator (rank 0) then checks that the boxes cover each tensor exactly, writes the index, and renames the folder
(`save`, `storage`). Damage is detected before it is loaded: the index has a digest, the sizes of all files, and a
CRC-32 for every 4 MiB of every box (`index`, `verify`). `catalog` finds the newest sound checkpoint and deletes old
ones. `Storage` is the interface for other places than a file system (hook `hp_checkpoint_storages`).
"""

from hp_trainer.checkpoint.catalog import (
    Latest,
    delete_leftovers,
    find_latest,
    list_checkpoints,
    list_set_aside,
    open_latest,
    open_step,
    prune,
    set_aside_newer,
)
from hp_trainer.checkpoint.index import Chunk, Index, SavedTensor, model_fingerprint
from hp_trainer.checkpoint.load import Checkpoint, CheckpointFormat, ForeignCheckpoint, refuse_other_model
from hp_trainer.checkpoint.save import PendingSave, TensorPart, save_checkpoint
from hp_trainer.checkpoint.shard_file import Box
from hp_trainer.checkpoint.storage import LocalStorage, Storage

__all__ = [
    "Box",
    "Checkpoint",
    "CheckpointFormat",
    "Chunk",
    "ForeignCheckpoint",
    "Index",
    "Latest",
    "LocalStorage",
    "PendingSave",
    "SavedTensor",
    "Storage",
    "TensorPart",
    "delete_leftovers",
    "find_latest",
    "list_checkpoints",
    "list_set_aside",
    "model_fingerprint",
    "open_latest",
    "open_step",
    "prune",
    "refuse_other_model",
    "save_checkpoint",
    "set_aside_newer",
]
