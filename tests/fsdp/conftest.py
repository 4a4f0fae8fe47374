from __future__ import annotations

import sys
from pathlib import Path

# Ranks of the pool import the functions that tests give them by module name.
sys.path.insert(0, str(Path(__file__).parent))
