"""A case of the campaign, and how one may end."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME, REFUSED = "same curve", "refused by name"

Case = Callable[[random.Random], str]


class Failure(Exception):
    """A case that ended as none may."""
