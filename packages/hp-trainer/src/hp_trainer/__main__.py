"""`python -m hp_trainer` runs `hp-train`. As with the command, the working directory is not on the import path."""

import os
import sys

if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]

from hp_trainer.cli import main

sys.exit(main())
