"""The command `hp-train`.

`--help` loads no framework: `commands`, which imports everything else, is imported only when a command runs. A new
command is a function, an entry of `commands.COMMANDS`, and its lines of help in `arguments`.
"""

from hp_trainer.cli.main import main

__all__ = ["main"]
