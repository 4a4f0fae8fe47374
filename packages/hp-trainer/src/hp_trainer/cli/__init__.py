"""The command `hp-train`.

`main` runs a command and turns errors into exit codes; `commands` has the table of commands and parses their words.
Each command is a Click command in the module that the table names, and is imported only when it runs.
"""

from hp_trainer.cli.main import main

__all__ = ["main"]
