"""Hugging Face models: `config.json` and weights, read as data, without transformers.

Nothing is executed: `config.json` is JSON and weights are safetensors. A new architecture is an entry in
`architectures.py`, names in `tensor_map.py` where they differ, and a configuration in
`tests/trainer/models/hugging_face/hugging_face_models.py`, whose test compares its logits with those of transformers.
"""

from hp_trainer.models.hugging_face.architectures import ARCHITECTURES, read_architecture
from hp_trainer.models.hugging_face.model_directory import COMPANIONS, ModelDirectory

__all__ = ["ARCHITECTURES", "COMPANIONS", "ModelDirectory", "read_architecture"]
