"""`launch` and `RankPool`: run a program on several local ranks, once or repeatedly."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from hp_dtensor.exceptions import LaunchError
from hp_dtensor.launch.local_ranks import LocalRanks, Output
from hp_dtensor.launch.rank_process import target_name
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


class RankPool:
    """A pool of `num_ranks` connected local processes, started when first needed and again after any failure.

    A context manager; `close` ends the processes, and so does the end of this process, however it comes.

    Args:
        platform: a platform or its name; None for the selected one.
        timeout_seconds: for joining the job, and for each collective where the platform can limit that.
    """

    def __init__(self, platform: Platform | str | None, num_ranks: int, timeout_seconds: float = 120.0) -> None:
        self.platform = get_platform(platform)
        self.num_ranks = num_ranks
        self._timeout_seconds = timeout_seconds
        self._ranks: LocalRanks | None = None

    def run(self, target: str | Callable[..., Any], *args: Any, timeout_seconds: float | None = 300.0) -> list[Any]:
        """Run `target(*args)` on every rank and return the results by rank.

        Args:
            target: a top-level function, or its name, `"module:function"`.
            args: picklable arguments, the same for every rank.

        Raises:
            LaunchError: a rank failed, died or took too long; all have been ended, and the next call starts
                new ones.
        """
        name = target_name(target)
        ranks = self._ranks if self._ranks is not None else self._start()
        try:
            return ranks.run(name, args, timeout_seconds)
        except BaseException:
            self._ranks = None
            raise

    def close(self) -> None:
        """End the processes; a later `run` starts new ones."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.stop()

    def _start(self) -> LocalRanks:
        ranks = LocalRanks(self.platform, self.num_ranks, Output(terminal=False), self._timeout_seconds)
        ranks.start()
        self._ranks = ranks
        return ranks

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def handled_signals(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Inside the block the stop signals go to `handler`; those that are ignored, as SIGHUP under nohup, stay so.

    In another than the main thread, where Python has no signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    wanted = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in wanted}
    try:
        yield
    finally:
        for number, old in before.items():
            # None: installed outside Python, cannot be put back.
            signal.signal(number, signal.SIG_DFL if old is None else old)


@contextlib.contextmanager
def held_signals(on_signal: Callable[[int], None]) -> Iterator[None]:
    """Inside the block, `on_signal(number)` is called instead of the handlers that were there.

    They are restored at the end and then get the first signal that came.
    """
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        on_signal(number)

    try:
        with handled_signals(handle):
            yield
    finally:
        if received:
            signal.raise_signal(received[0])
