"""One-line descriptions of failures: errors of the machine (disk, quota, limits, memory) and calls of `sys.exit`."""

from __future__ import annotations

import errno
import re
import sys
import traceback

from hp_dtensor.exceptions import HPError

# errno -> (what it means, what to do)
_ERRORS = {
    errno.ENOSPC: ("the disk is full", "free some space"),
    errno.EDQUOT: ("your disk quota is used up", "free some space"),
    errno.EFBIG: ("the file would be larger than this process may write", "raise the limit (ulimit -f)"),
    errno.EROFS: ("the file system is read-only", "choose another folder, or mount it writable"),
    errno.EACCES: ("permission denied", "choose another folder, or change its permissions"),
    errno.EPERM: ("permission denied", "choose another folder, or change its permissions"),
    errno.EIO: ("the disk or the network file system failed", "look at the machine's log"),
    errno.ESTALE: ("the network file system has lost the file", "mount it again"),
    errno.EISDIR: ("there is a folder where a file is needed", "move it away"),
    errno.ENOTDIR: ("there is a file where a folder is needed", "move it away"),
    errno.ELOOP: ("a symbolic link points to itself", "remove it"),
    errno.EMFILE: ("this process has too many files open", "raise the limit (ulimit -n)"),
    errno.ENFILE: ("the machine has too many files open", "close other programs"),
    errno.EAGAIN: ("no more processes or threads can be started", "raise the limit (ulimit -u)"),
    errno.ENOMEM: ("the memory is used up", "raise the limit (ulimit -v), or use less"),
}
_MEMORY = re.compile(r"out of memory|can't allocate memory|cannot allocate memory|not enough memory|bad_alloc", re.I)
LESS_MEMORY = "Use more memory or ranks, a smaller training.micro_batch_size, or training.recompute=full"


def describe_machine_error(error: BaseException) -> str | None:
    """Return what is wrong with the machine and what to do; None if the error has another cause."""
    if isinstance(error, HPError):
        return None
    if isinstance(error, OSError) and error.errno in _ERRORS:
        what, advice = _ERRORS[error.errno]
        where = f"{error.filename2 or error.filename}: " if error.filename is not None else ""
        return f"{where}{what} ({error.strerror}); {advice}"
    if is_out_of_memory(error):
        first, *_ = str(error).splitlines() or ["an allocation failed"]
        return f"the memory is used up: {first}; {LESS_MEMORY[0].lower()}{LESS_MEMORY[1:]}"
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports that the memory of the machine or of a device is used up."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError | ImportError) and _MEMORY.search(str(error)) is not None


def with_path(error: OSError, path: object) -> OSError:
    """Return a system error that names `path`. An error of a write to an open file names none by itself."""
    if error.filename is not None or error.errno is None:
        return error
    return OSError(error.errno, error.strerror, str(path))


def describe_exit(leaving: SystemExit, when: str) -> str:
    """Return a clause about a call of `sys.exit` in a plugin, hook or user file, with the line of the call.

    Such a call must not be mistaken for the end of a run.

    Args:
        when: a clause, such as "in step 3".
    """
    # The builtin `exit()` and a replaced `sys.exit` (wandb's) have frames of their own, which do not help the user.
    replaced = getattr(sys.exit, "__code__", None)
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(leaving.__traceback__)
        if frame.f_code is not replaced and "_sitebuiltins" not in frame.f_code.co_filename
    ]
    where = f", called at {frames[-1][0]}:{frames[-1][1]}" if frames else ""
    return f"left with SystemExit({leaving.code!r}) {when}{where}; raise an error instead of calling sys.exit()"
