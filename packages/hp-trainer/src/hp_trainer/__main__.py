"""`python -m hp_trainer` is `hp-train`: like a command it does not look for modules in the working directory."""

import os
import sys

if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]

from hp_trainer.cli import main

sys.exit(main())
