"""Sharded checkpoints: safetensors files and a JSON index, complete or absent, read by any layout."""

from hp_trainer.checkpoint.catalog import (
    Latest,
    delete_leftovers,
    find_latest,
    list_checkpoints,
    list_set_aside,
    open_latest,
    open_step,
    prune,
    set_aside_later,
)
from hp_trainer.checkpoint.formats import CheckpointFormat, ForeignCheckpoint
from hp_trainer.checkpoint.index import Chunk, Index, SavedTensor, model_fingerprint
from hp_trainer.checkpoint.load import Checkpoint, refuse_other_model
from hp_trainer.checkpoint.save import PendingSave, TensorPart, save_checkpoint
from hp_trainer.checkpoint.storage import LocalStorage, Storage
from hp_trainer.checkpoint.tensor_box import Box

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
    "set_aside_later",
]
