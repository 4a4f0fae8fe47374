"""`launch` and `RankPool`: run a program on several local ranks, once or repeatedly."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Self

from hp_dtensor.exceptions import LaunchError
from hp_dtensor.launch import local_ranks
from hp_dtensor.launch.local_ranks import LocalRanks, Output
from hp_dtensor.launch.nodes import Nodes, RanksOfNode, RanksOfNodes
from hp_dtensor.launch.rank_process import target_name
from hp_dtensor.launch.replacement import ReplacedRanks, Replacement
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
    replacement: Replacement | None = None,
    nodes: Nodes | None = None,
) -> list[Any]:
    """Run `target(*args)` in `num_ranks` local processes that form one job, and return the results by rank.

    In a rank, `current_world(platform)` is the world of the job, the variables of torchrun (`RANK`, ...) are set and
    standard input is closed. Rank 0 writes to this process's terminal. The output of the other ranks goes to
    `log_dir`; without it, their output is shown only if they fail.

    While the ranks run, SIGINT, SIGTERM and SIGHUP are passed on to them. Ranks that are still running after
    `stop_seconds` or at a second signal are killed. Then this process's own handler runs (for Ctrl-C it raises
    KeyboardInterrupt). SIGUSR1 makes every rank write its Python stacks to its output.

    Args:
        target: a top-level function of a module or script, or its name, `"module:function"`.
        args: picklable arguments, equal on every rank. Tensors in arguments and results are copied.
        log_dir: folder for `rank1.log`, `rank2.log`, ...
        timeout_seconds: limit for joining the job, and for each collective if the platform supports one.
        grace_seconds: after a rank has failed, time between SIGTERM to the others and SIGKILL.
        stop_seconds: the same after a signal; default `grace_seconds`. Ranks that save a checkpoint before they exit
            need more.
        replacement: rules by which ranks that die are replaced while the others go on. `target` then calls
            `hp_dtensor.launch.next_generation` when a collective fails, and starts again on the new ranks.
        nodes: the machines of the job, of which this process is the first one; `replacement` is then required. Each
            has `num_ranks / nodes.size` ranks. Arguments and results are JSON values.

    Returns:
        The results by rank. An empty list if the ranks have ended by a signal whose handler here does not raise.

    Raises:
        CapabilityError: a process of the platform joins a job only once, and there are several machines, or this
            system has no memory that outlives ranks. All ranks have been ended.
        LaunchError: a rank failed or died. The message has its number, error and traceback. All others are ended.
        PlatformError: the platform cannot be used; no process was started.
    """
    if num_ranks < 1:
        raise LaunchError(f"launch needs at least one rank, got num_ranks={num_ranks}")
    if nodes is not None and (replacement is None or num_ranks % nodes.size):
        raise LaunchError(
            f"launch on {nodes.size} machines needs replacement, and a multiple of {nodes.size} ranks, got "
            f"replacement={replacement} and num_ranks={num_ranks}"
        )
    name = target_name(target)
    output = Output(folder=None if log_dir is None else Path(log_dir))
    # Where ranks are forked, this process needs no framework to start them.
    is_forked = local_ranks.start_process is not subprocess.Popen
    chosen = platform if is_forked and isinstance(platform, str) else get_platform(platform).name
    options = (chosen, num_ranks, output, timeout_seconds, grace_seconds)
    if replacement is None:
        ranks = LocalRanks(*options)
    elif nodes is None:
        ranks = ReplacedRanks(*options, replacement=replacement)
    else:
        ranks = RanksOfNodes(*options, nodes.size, replacement=replacement, nodes=nodes)
    stopper = _Stopper(ranks, grace_seconds if stop_seconds is None else stop_seconds)
    with held_signals(stopper.stop), _stacks_on_request(ranks):
        try:
            ranks.start(stopper.check)
            stopper.started = True
            results = ranks.run(name, tuple(args), None)
            ranks.stop()
        except LaunchError:
            # Ranks that end because of the signal have not failed.
            if not stopper.stopping:
                raise
            results = []
        finally:
            stopper.cancel()
            ranks.kill()
    return results


def serve_node(
    target: str | Callable[..., Any],
    file: Path,
    node: int,
    num_nodes: int,
    num_ranks: int,
    platform: Platform | str | None = None,
    *,
    replacement: Replacement,
    log_dir: str | Path | None = None,
    timeout_seconds: float = 300.0,
    grace_seconds: float = 5.0,
    stop_seconds: float | None = None,
) -> Any:
    """Run the ranks of this machine for a job that `launch` runs on the first machine, and return `Nodes.result`.

    Args:
        target: the same function as in that call of `launch`, which sends its arguments.
        file: the file of `Nodes` there.
        node, num_nodes: number of this machine, not 0, and number of machines with ranks. A machine with a number from
            `num_nodes` on is a spare one, which waits until another machine is lost.
        num_ranks: ranks of the job.

    Raises:
        LaunchError: the job has failed, or the first machine did not come.
    """
    output = Output(None if log_dir is None else Path(log_dir), terminal=False)
    options = (get_platform(platform).name, num_ranks, output, timeout_seconds, grace_seconds, num_nodes)
    ranks = RanksOfNode(*options, replacement=replacement, target=target_name(target))
    stopper = _Stopper(ranks, grace_seconds if stop_seconds is None else stop_seconds)
    # The ranks of this machine run only after those of the first one have been started.
    stopper.started = True
    with held_signals(stopper.stop), _stacks_on_request(ranks):
        try:
            return ranks.serve(file, node, max(timeout_seconds, replacement.node_seconds), stopper.check_idle)
        except LaunchError:
            if not stopper.stopping:
                raise
            return None
        finally:
            stopper.cancel()
            ranks.kill()


@contextlib.contextmanager
def _stacks_on_request(ranks: LocalRanks) -> Iterator[None]:
    """Context in which SIGUSR1 to this process makes every rank write its Python stacks to its output."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGUSR1, lambda number, frame: ranks.write_stacks())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL if before is None else before)


class _Stopper:
    """Signal handler that passes the first signal on to the ranks, and kills them at a second one or after a timeout.

    Attributes:
        started: the ranks run the program. Until then they get SIGTERM whatever the signal, because it ends a starting
            interpreter silently and there is nothing to save.
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
        # A timer, because the main thread is waiting for the ranks' answers.
        self._timer.start()

    def check(self) -> None:
        """Raise a LaunchError after a signal: ranks that are started later did not get it."""
        if self.stopping:
            raise LaunchError("stopped by a signal while the ranks started")

    def check_idle(self) -> None:
        """Raise a LaunchError after a signal if no rank is left that would end by it."""
        if not self._ranks.has_ranks:
            self.check()

    def cancel(self) -> None:
        self._timer.cancel()


class RankPool:
    """A pool of `num_ranks` local processes that form one job, started at the first `run` and again after a failure.

    A context manager. The processes end with `close`, and with this process even if it is killed.

    Args:
        platform: a platform or its name; None for the selected one.
        timeout_seconds: limit for joining the job, and for each collective if the platform supports one.
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
            args: picklable arguments, equal on every rank.

        Raises:
            LaunchError: a rank failed, died or exceeded the timeout. All ranks are ended, and the next call starts new
                ones.
        """
        name = target_name(target)
        if self._ranks is None:
            started = LocalRanks(self.platform.name, self.num_ranks, Output(terminal=False), self._timeout_seconds)
            started.start()
            self._ranks = started
        ranks = self._ranks
        try:
            return ranks.run(name, args, timeout_seconds)
        except BaseException:
            # The ranks have ended: after a failure their collectives no longer match.
            self._ranks = None
            raise

    def close(self) -> None:
        """End the processes. A later `run` starts new ones."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def handled_signals(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Context in which `handler` handles stop signals, in the main thread. Ignored ones stay ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    wanted = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in wanted}
    try:
        yield
    finally:
        for number, old in before.items():
            # None: the previous handler was not installed from Python and cannot be restored.
            signal.signal(number, signal.SIG_DFL if old is None else old)


@contextlib.contextmanager
def held_signals(on_signal: Callable[[int], None]) -> Iterator[None]:
    """Context in which stop signals call `on_signal(number)`; the first is raised again for the old handlers."""
    # With this handler Ctrl-C raises no KeyboardInterrupt in the middle of the block, which would leave ranks running.
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
