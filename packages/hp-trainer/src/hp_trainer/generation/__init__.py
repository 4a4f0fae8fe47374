"""Generation: texts that a trained model writes."""

from hp_trainer.generation.sampler import Sampler
from hp_trainer.generation.texts import generate, write_samples

__all__ = ["Sampler", "generate", "write_samples"]
