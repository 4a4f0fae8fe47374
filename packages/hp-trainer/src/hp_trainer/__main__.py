"""`python -m hp_trainer` is `hp-train`."""

import sys

from hp_trainer.cli import main

sys.exit(main())
