"""Texts from the model of a checkpoint: one rank, the whole model."""

from __future__ import annotations

from collections.abc import Sequence

from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform
from hp_trainer._files import write_atomically
from hp_trainer.checkpoint import Checkpoint, open_latest
from hp_trainer.config import TrainerConfig
from hp_trainer.generation.sampler import Sampler
from hp_trainer.plugins import registries
from hp_trainer.run import RunFolder, checkpoint_storage
from hp_trainer.training.whole_model import whole_model


def generate(config: TrainerConfig, platform: Platform, prompts: Sequence[str], checkpoint: Checkpoint) -> list[str]:
    """Continue prompts with the model of a checkpoint; the same texts for the same seed.

    Args:
        config: the run's configuration; `generate` says how tokens are drawn.
        platform: the framework to run the whole model on, on one rank.
        prompts: the beginnings.
        checkpoint: of the run, written by any layout on any platform.

    Returns:
        Each prompt with what follows it.

    Raises:
        CheckpointError: the checkpoint is of another model, or damaged.
    """
    source = registries().datasets.get(config.data.name).build(config.data.options)
    tokenizer = source.tokenizer()
    with whole_model(config, platform, checkpoint) as model:
        sampler = Sampler(
            config.generate,
            config.training.sequence_length,
            tokenizer.separator,
            vocab_size=tokenizer.vocab_size,
            begin=tokenizer.begin,
        )
        begun = [tokenizer.encode(prompt).tolist() for prompt in prompts]
        return [tokenizer.decode(tokens) for tokens in sampler.extend(platform, model, begun)]


def write_samples(run: RunFolder, config: TrainerConfig) -> list[str]:
    """Write what the model of a finished run makes of each configured prompt into `samples.txt`; return the texts.

    Nothing is written where there are no prompts, or where the newest checkpoint is not of the last step.
    """
    if not config.generate.prompts:
        return []
    newest = open_latest(checkpoint_storage(run, config), content=False)
    if newest.step < config.training.steps:
        return []
    texts = generate(config, get_platform(config.platform), config.generate.prompts, newest)
    separator = "\n" + "-" * 80 + "\n"
    write_atomically(run.samples_file, f"after {newest.step} steps{separator}{separator.join(texts)}{separator}")
    return texts
