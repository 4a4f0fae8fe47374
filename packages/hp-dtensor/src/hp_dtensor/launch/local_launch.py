"""A program on several local ranks."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hp_dtensor.exceptions import LaunchError
from hp_dtensor.launch.local_ranks import LocalRanks, Output
from hp_dtensor.launch.stop_signals import held_signals
from hp_dtensor.launch.target_names import target_name
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform


def launch(
    target: str | Callable[..., Any],
    args: Sequence[Any] = (),
    num_ranks: int = 1,
    platform: Platform | str | None = None,
    *,
    log_dir: str | Path | None = None,
    timeout_seconds: float = 300.0,
    grace_seconds: float = 5.0,
    stop_seconds: float | None = None,
) -> list[Any]:
    """Run `target(*args)` on `num_ranks` local processes, connected as one job, and return the results by rank.

    In a rank `current_world(platform)` is the job. Ranks have the variables of torchrun (`RANK`, ...) and
    standard input closed. Rank 0 writes to this process's terminal; the output of the others goes to
    `log_dir`, or is shown only when they fail.

    While the ranks run, SIGINT, SIGTERM and SIGHUP are passed on to them; those that have not ended after
    `stop_seconds`, or when a second signal comes, are killed; then this process's own handler runs (for Ctrl-C it
    raises KeyboardInterrupt). SIGUSR1 makes every rank write its Python stacks where its output goes.

    Args:
        target: a top-level function of a module or script, or its name, `"module:function"`.
        args: picklable arguments, the same for every rank; tensors are copied, as they are in results.
        log_dir: folder for `rank1.log`, `rank2.log`, ...
        timeout_seconds: for joining the job, and for each collective where the platform can limit that.
        grace_seconds: between asking ranks to end and killing them, once a rank has failed.
        stop_seconds: the same after a signal; default `grace_seconds`. Longer for ranks that end in an order of
            their own, as training does with a checkpoint.

    Raises:
        LaunchError: a rank failed or died; the message has its number, error and traceback. The others have
            been ended.
        PlatformError: the platform cannot be used; no process was started.
    """
    if num_ranks < 1:
        raise LaunchError(f"launch needs at least one rank, got num_ranks={num_ranks}")
    name = target_name(target)
    output = Output(folder=None if log_dir is None else Path(log_dir))
    ranks = LocalRanks(get_platform(platform), num_ranks, output, timeout_seconds, grace_seconds)
    stopper = _Stopper(ranks, grace_seconds if stop_seconds is None else stop_seconds)
    with held_signals(stopper.stop), _stacks_on_request(ranks):
        try:
            ranks.start(stopper.check)
            stopper.started = True
            results = ranks.run(name, tuple(args), None)
            ranks.stop()
        except LaunchError:
            # Ranks that end because they were told to have not failed.
            if not stopper.stopping:
                raise
            results = []
        finally:
            stopper.cancel()
            ranks.kill()
    return results


@contextlib.contextmanager
def _stacks_on_request(ranks: LocalRanks) -> Iterator[None]:
    """Inside the block SIGUSR1 to this process makes every rank write its Python stacks where its output goes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGUSR1, lambda number, frame: ranks.write_stacks())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL if before is None else before)


class _Stopper:
    """Handler that passes the first signal on to the ranks, and kills them at the second or when their time is up.

    Attributes:
        started: the ranks run the program. Before that they have nothing to end in order, and SIGTERM ends an
            interpreter that is starting without a word about it.
    """

    def __init__(self, ranks: LocalRanks, seconds: float) -> None:
        self.stopping = False
        self.started = False
        self._ranks = ranks
        self._timer = threading.Timer(seconds, ranks.signal, [signal.SIGKILL])
        self._timer.daemon = True

    def stop(self, number: int) -> None:
        if self.stopping:
            self._ranks.signal(signal.SIGKILL)
            return
        self.stopping = True
        self._ranks.signal(number if self.started else signal.SIGTERM)
        self._timer.start()

    def check(self) -> None:
        """Refuse to start more ranks after a signal, which those that were not there yet did not get.

        Raises:
            LaunchError: a signal came.
        """
        if self.stopping:
            raise LaunchError("stopped by a signal while the ranks started")

    def cancel(self) -> None:
        self._timer.cancel()
