"""Calls of `sys.exit` by a plugin, a hook or a user's file, which must not pass for the end of a run."""

from __future__ import annotations

import traceback


def describe_exit(leaving: SystemExit, when: str) -> str:
    """Return what a call of `sys.exit` has ended, and the line that made it.

    Args:
        when: a clause, such as "in step 3".
    """
    # The builtin `exit()` is a frame of its own.
    frames = [frame for frame in traceback.extract_tb(leaving.__traceback__) if "_sitebuiltins" not in frame.filename]
    where = f", called at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"left with SystemExit({leaving.code!r}) {when}{where}; raise an error there in place of sys.exit()"
