"""Sharded checkpoints: safetensors files and a JSON index, complete or absent, read by any layout."""

from hp_trainer.checkpoint.box import Box
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
from hp_trainer.checkpoint.index import Index, model_fingerprint
from hp_trainer.checkpoint.load import Checkpoint
from hp_trainer.checkpoint.save import PendingSave, TensorPart, save_checkpoint
from hp_trainer.checkpoint.storage import LocalStorage, Storage

__all__ = [
    "Box",
    "Checkpoint",
    "Index",
    "Latest",
    "LocalStorage",
    "PendingSave",
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
    "save_checkpoint",
    "set_aside_later",
]
