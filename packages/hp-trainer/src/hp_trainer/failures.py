"""Errors of the machine (disk, quota, permissions, limits, memory) in one line: where, and what to do.

Calls of `sys.exit` by a plugin, a hook or a user's file, which must not pass for the end of a run.
"""

from __future__ import annotations

import errno
import re
import traceback

from hp_dtensor.exceptions import HPError

# errno -> (what it means, what to do)
_ERRORS = {
    errno.ENOSPC: ("the disk is full", "free some space"),
    errno.EDQUOT: ("your quota of the disk is used up", "free some of it"),
    errno.EFBIG: ("the file would be larger than this process may write", "raise the limit (ulimit -f)"),
    errno.EROFS: ("the file system is read-only", "choose a folder elsewhere, or mount it writable"),
    errno.EACCES: ("you may not write or read there", "choose another folder, or change its permissions"),
    errno.EPERM: ("you may not write or read there", "choose another folder, or change its permissions"),
    errno.EIO: ("the disk or the network file system failed", "look at the machine's log"),
    errno.ESTALE: ("the network file system has lost the file", "mount it again"),
    errno.EISDIR: ("a folder is in the place of a file", "move it away"),
    errno.ENOTDIR: ("a file is in the place of a folder", "move it away"),
    errno.ELOOP: ("a symbolic link leads to itself", "remove it"),
    errno.EMFILE: ("this process has too many files open", "raise the limit (ulimit -n)"),
    errno.ENFILE: ("the machine has too many files open", "close other programs"),
    errno.EAGAIN: ("the machine starts no more processes or threads", "raise the limit (ulimit -u)"),
    errno.ENOMEM: ("the memory is used up", "raise the limit (ulimit -v), or use less"),
}
_MEMORY = re.compile(r"out of memory|can't allocate memory|cannot allocate memory|not enough memory|bad_alloc", re.I)
LESS_MEMORY = "Use more memory or ranks, a smaller training.micro_batch_size, or training.recompute=full"


def describe_machine_error(error: BaseException) -> str | None:
    """Return what is wrong with the machine and what to do, or None if the error is about something else."""
    if isinstance(error, HPError):
        return None
    if isinstance(error, OSError) and error.errno in _ERRORS:
        what, advice = _ERRORS[error.errno]
        where = f"{error.filename2 or error.filename}: " if error.filename is not None else ""
        return f"{where}{what} ({error.strerror}); {advice}"
    if is_out_of_memory(error):
        first, *_ = str(error).splitlines() or ["no more is given to this process"]
        return f"the memory is used up: {first}; {LESS_MEMORY[0].lower()}{LESS_MEMORY[1:]}"
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory, of the machine or of a device, is used up."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError | ImportError) and _MEMORY.search(str(error)) is not None


def with_path(error: OSError, path: object) -> OSError:
    """Return a system error with the path that it is about; that of a write to an open file names none."""
    if error.filename is not None or error.errno is None:
        return error
    return OSError(error.errno, error.strerror, str(path))


def describe_exit(leaving: SystemExit, when: str) -> str:
    """Return what a call of `sys.exit` has ended, and the line that made it.

    Args:
        when: a clause, such as "in step 3".
    """
    # The builtin `exit()` is a frame of its own.
    frames = [frame for frame in traceback.extract_tb(leaving.__traceback__) if "_sitebuiltins" not in frame.filename]
    where = f", called at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"left with SystemExit({leaving.code!r}) {when}{where}; raise an error there in place of sys.exit()"
