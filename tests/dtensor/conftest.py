from __future__ import annotations

import sys
from pathlib import Path

# Helpers that several folders share lie beside them.
sys.path.insert(0, str(Path(__file__).parent))
