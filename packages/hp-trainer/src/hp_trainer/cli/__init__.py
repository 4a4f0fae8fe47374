"""The command `hp-train`."""

from hp_trainer.cli.main import main

__all__ = ["main"]
