"""Failures of ranks, described for the user who reads them."""

from __future__ import annotations

import re
import signal
import time
from dataclasses import dataclass

from hp_dtensor.launch.messages import Failed

_ADDRESS_IN_USE = re.compile(r"EADDRINUSE|address (is )?already in use|errno: 98", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of one rank: a line, its details, when it was noticed, and the class of its error (`kind`)."""

    headline: str
    details: str
    when: float
    died: bool = False
    address_in_use: bool = False
    kind: str = ""
    signal: int | None = None


def failure_of_exception(message: Failed) -> Failure:
    verb = "could not start" if message.phase == "start" else "failed"
    in_use = message.phase == "start" and bool(_ADDRESS_IN_USE.search(message.what))
    return Failure(f"{verb}: {message.what}", message.traceback, message.when, address_in_use=in_use, kind=message.kind)


def failure_of_end(code: int | None, tail: str) -> Failure:
    details, now = f"its last output:\n{tail}" if tail else "", time.monotonic()
    if code is not None and code < 0:
        hint = "; the machine may have run out of memory" if -code == signal.SIGKILL else ""
        # Frameworks abort a process whose partner is gone.
        died = -code != signal.SIGABRT
        return Failure(f"was killed by {signal.Signals(-code).name}{hint}", details, now, died, signal=-code)
    return Failure(f"ended without a result, exit code {code}", details, now, died=True)
