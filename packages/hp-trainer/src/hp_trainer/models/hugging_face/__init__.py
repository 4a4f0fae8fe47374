"""Models of Hugging Face: their `config.json` and weights, read as data, without transformers."""

from hp_trainer.models.hugging_face.architectures import ARCHITECTURES, read_architecture
from hp_trainer.models.hugging_face.model_directory import COMPANIONS, ModelDirectory

__all__ = ["ARCHITECTURES", "COMPANIONS", "ModelDirectory", "read_architecture"]
